"""Options of the ``midfill eval`` commands."""

from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.outputs import writable
from midfill.cli.values import parse_method

HumanEvalOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="HumanEval-Infilling: the 'data' folder of OpenAI's human-eval-infilling repository.",
    ),
]
FilesOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="PATH",
        help="Source files, or folders of them, that the model hasn't seen; repeatable.",
    ),
]
SuffixesOption = Annotated[
    str,
    typer.Option(
        metavar="SUFFIXES",
        help="Suffixes of the files to take from folders, separated by commas, such as .js.",
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        help="Ask an OpenAI-style server instead, such as http://127.0.0.1:8080/v1; prompts are"
        " laid out here, with --fim-tokens."
    ),
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        help="Kinds of holes, separated by commas: single-line, multi-line, random-span"
        " (HumanEval), line, subtoken, block, span, nothing, word-top, word-deep (files). By"
        " default all there is data for."
    ),
]
ConditionsOption = Annotated[
    str | None,
    typer.Option(
        help="Ways of asking, separated by commas: prefix-only, prefix-only+healing, psm, spm,"
        " efim, efim+healing, auto. By default all that apply to the model."
    ),
]
MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        parser=parse_method,
        metavar="NAME[:OPTION=VALUE,...]",
        help="Ask once more with the prompts' KV compressed, as in cake:budget=256; repeatable. A"
        " server must allow it. With it, --conditions is auto by default.",
    ),
]
LimitOption = Annotated[
    int, typer.Option(min=0, help="Maximum holes per kind; 0 takes all (of files, a thousand).")
]
SeedOption = Annotated[int, typer.Option(help="Seed of all randomness.")]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum tokens per answer; by default 64 in a line, 256 for multi-line, else 128.",
    ),
]
ContextOption = Annotated[
    str,
    typer.Option(metavar="BEFORE,AFTER", help="Maximum context around a hole."),
]
TypedOption = Annotated[
    bool,
    typer.Option(
        "--typed",
        help="Tokenise the last 40 characters after the middle token in fragments of 1 to 8, as"
        " if typed.",
    ),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        callback=writable,
        help="Write every answer and score to this file, for 'eval compare'; updated during the"
        " run.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue the run in --json with the same options: ask only what it lacks.",
    ),
]
ProcessesOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Copies of the model, each in a process with its share of the threads: faster where"
        " other programs keep the machine busy.",
    ),
]
