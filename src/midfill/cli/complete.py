"""``midfill complete``: infill at a place in a file, and show the result there."""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.option_groups import with_option_groups
from midfill.cli.options import (
    AdapterOption,
    BackendOption,
    DeviceOption,
    FimTokensOption,
    MaxTokensOption,
    MethodOption,
    ModelOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    ThreadsOption,
    WindowOption,
)
from midfill.cli.running_server import ServerFlags
from midfill.errors import MidfillError
from midfill.infill.trim import Brackets, Lines

if TYPE_CHECKING:
    from midfill.frontend.sampling import SamplingParams
    from midfill.llm import LLM
    from midfill.system.progress import Progress

_PLACE = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?")


@dataclass(frozen=True)
class LoadingFlags:
    """How a model is loaded into this process, and how it is shown documents."""

    fim_tokens: FimTokensOption = None
    window: WindowOption = None
    backend: BackendOption = "auto"
    device: DeviceOption = None
    threads: ThreadsOption = None
    method: MethodOption = "none"

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        changed = (each.name for each in fields(self) if getattr(self, each.name) != each.default)
        return [f"--{name.replace('_', '-')}" for name in changed]

    def load(self, model: str | None, adapter: str | None, progress: "Progress") -> "LLM":
        """Load a model, the default one if none is named.

        Raises:
            MidfillError: it can't be found or loaded.
        """
        from midfill.infill.window import WindowRule
        from midfill.llm import LLM
        from midfill.models.checkpoints.model_store import DEFAULT_MODEL

        return LLM(
            model or DEFAULT_MODEL,
            backend=self.backend,
            device=self.device,
            threads=self.threads,
            method=self.method,
            adapter=adapter,
            fim_tokens=self.fim_tokens,
            window=None if self.window is None else WindowRule(*self.window),
            progress=progress,
        )


@dataclass(frozen=True)
class Caret:
    """A place in a file.

    Attributes:
        line: the line's number, from 1.
        prefix, suffix: the file's text before and after the place.
    """

    line: int
    prefix: str
    suffix: str


PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="FILE:LINE[:COL]",
        help="Where to fill in: lines and columns count from 1, and the caret stands before the"
        " column's character; without COL it stands at the line's end.",
    ),
]
TrimOption = Annotated[
    bool, typer.Option(help="Cut the answer where it begins to repeat what comes after it.")
]
LinesOption = Annotated[
    Lines,
    typer.Option(help="Where to cut: after one line, at the end of the block, or nowhere."),
]
BracketsOption = Annotated[
    Brackets, typer.Option(help="Whether to close brackets that the answer leaves open.")
]
EmptyThresholdOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Suggest nothing where the probability of an empty answer is above this, and"
        " something elsewhere; 0 leaves it to each token. By default what the model or its"
        " adapter names.",
    ),
]
AroundOption = Annotated[int, typer.Option(min=0, help="Lines to show around it.")]


@dataclass(frozen=True)
class AnswerFlags:
    """What is asked of the answer."""

    max_tokens: MaxTokensOption = 64
    temperature: TemperatureOption = 0.0
    seed: SeedOption = None
    stop: StopOption = None
    trim: TrimOption = True
    lines: LinesOption = "block"
    brackets: BracketsOption = "keep"
    empty_threshold: EmptyThresholdOption = None

    def body(self, model: str, caret: Caret) -> dict[str, object]:
        """Return the body of a request to a server for a model."""
        return {
            "model": model,
            "prompt": caret.prefix,
            "suffix": caret.suffix,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stop": self.stop,
            "midfill": {
                "trim": self.trim,
                "lines": self.lines,
                "brackets": self.brackets,
                "empty_threshold": self.empty_threshold,
            },
        }

    def sampling(self) -> "SamplingParams":
        """Return the same for a model in this process, but for ``empty_threshold``."""
        from midfill.frontend.sampling import PostProcessing, SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            post_processing=PostProcessing(
                overlap=self.trim, lines=self.lines, brackets=self.brackets
            ),
        )


@with_option_groups
def complete(
    *,
    place: PlaceArgument,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    answer: AnswerFlags,
    around: AroundOption = 4,
    server: ServerFlags,
    loading: LoadingFlags,
) -> None:
    """Fill in at a place in a file, and show the result there; the file is not changed.

    A server that runs at the default address is asked if it serves the model, which else is loaded.

    If the model suggests nothing there, a line on stderr says so; the exit status is still 0.
    """
    caret = find_caret(place)
    own = ["--adapter"] if adapter is not None else []
    found = server.find(model, own + loading.given)
    show = partial(_show, place, caret, around)
    if found is not None:
        client, served = found
        show(client.complete(answer.body(served.id, caret)), served.infills)
        return
    from midfill.cli.progress import show_progress

    sampling = answer.sampling()
    with show_progress() as progress:
        llm = loading.load(model, adapter, progress)
    with llm:
        deltas = llm.infill_stream(
            caret.prefix, caret.suffix, sampling, empty_threshold=answer.empty_threshold
        )
        show((delta.text for delta in deltas), llm.fim_format is not None)


def _show(place: str, caret: Caret, around: int, answer: Iterable[str], infills: bool) -> None:
    """Show an answer in its place as it arrives, and say what is wrong with it."""
    parts: list[str] = []

    def noted() -> Iterator[str]:
        for part in answer:
            parts.append(part)
            yield part

    for text in render(caret, noted(), around, _has_colours()):
        sys.stdout.write(text)
        sys.stdout.flush()
    if not "".join(parts).strip():
        typer.echo(f"midfill: no suggestion at {place}", err=True)
    if not infills:
        typer.echo(
            "midfill: no FIM tokens known for this model; it saw only the text before the caret",
            err=True,
        )


def find_caret(place: str) -> Caret:
    """Parse FILE:LINE[:COL], and read the file.

    Raises:
        typer.BadParameter: the text is not of that form.
        MidfillError: there is no such file, line or column, or the file is no text.
    """
    match = _PLACE.fullmatch(place)
    if match is None:
        raise typer.BadParameter(f"{place!r} is not FILE:LINE or FILE:LINE:COL")
    path, line = Path(match["file"]), int(match["line"])
    try:
        # No newline translation: the model should see the file as it is.
        text = path.read_bytes().decode()
    except OSError as error:
        raise MidfillError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MidfillError(f"{path}: not UTF-8 text (byte {error.start})") from None
    lines = re.split(r"(?<=\n)", text)
    if not 1 <= line <= len(lines):
        raise MidfillError(f"{path}: there is no line {line}; the file has {len(lines)}")
    content = lines[line - 1].rstrip("\r\n")
    column = len(content) + 1 if match["column"] is None else int(match["column"])
    if not 1 <= column <= len(content) + 1:
        raise MidfillError(
            f"{path}:{line}: there is no column {column}; the line has {len(content)} characters"
        )
    offset = sum(map(len, lines[: line - 1])) + column - 1
    return Caret(line, text[:offset], text[offset:])


def render(caret: Caret, answer: Iterator[str], around: int, colours: bool) -> Iterator[str]:
    """Yield the lines around the caret with the answer in place, as the answer arrives.

    Args:
        caret: the place.
        answer: the text to insert there, in parts.
        around: lines to show before and after.
        colours: whether to mark the answer and dim the line numbers.
    """
    green, dim, plain = ("\033[1;32m", "\033[2m", "\033[0m") if colours else ("", "", "")

    def gutter(number: int | None) -> str:
        return f"{dim}{'' if number is None else number:>5} |{plain} "

    before = caret.prefix.split("\n")[-around - 1 :]
    first = caret.line - len(before) + 1
    for number, line in enumerate(before[:-1], first):
        yield f"{gutter(number)}{line}\n"
    yield f"{gutter(caret.line)}{before[-1]}"
    for part in answer:
        for number, line in enumerate(part.split("\n")):
            if number:
                yield f"\n{gutter(None)}"
            if line:
                yield f"{green}{line}{plain}"
    rest, *after = caret.suffix.split("\n")
    yield f"{rest}\n"
    if after and after[-1] == "":
        after.pop()
    for number, line in enumerate(after[:around], caret.line + 1):
        yield f"{gutter(number)}{line}\n"


def _has_colours() -> bool:
    import os

    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
