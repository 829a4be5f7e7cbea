"""The ``midfill eval reuse`` command."""

from pathlib import Path
from typing import Annotated

import typer

from midfill.cli.option_groups import with_option_groups
from midfill_lab.cli.evaluation.options import (
    FilesOption,
    JsonOption,
    ModelFlags,
    ResumeOption,
    SeedOption,
    SuffixesOption,
    parse_suffixes,
)
from midfill_lab.cli.outputs import DocsOption, Outputs, SectionOption, earlier_run

MethodsOption = Annotated[
    str | None,
    typer.Option(
        help="Methods with their options, separated by blanks; by default cacheblend with several"
        " shares of tokens computed again, by deviation and by distance to the caret."
    ),
]
LimitOption = Annotated[int, typer.Option(min=1, help="Maximum jumps.")]
PerFileOption = Annotated[int, typer.Option(min=1, help="Maximum jumps in one file.")]
ShortestOption = Annotated[
    int, typer.Option(min=1, help="Characters of the shortest file to jump in.")
]
LongestOption = Annotated[
    int,
    typer.Option(
        min=1, help="Characters of the longest file: far jumps in longer ones show nothing known."
    ),
]
MaxTokensOption = Annotated[
    int, typer.Option(min=1, help="Maximum tokens per answer; it ends with its line.")
]
WriteOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write the method, or that there is none, into the midfill.json of this adapter's or"
        " Hugging Face model's folder: servers take it as --reuse auto.",
    ),
]


@with_option_groups
def reuse(
    *,
    files: FilesOption = None,
    suffixes: SuffixesOption = ".py",
    asked: ModelFlags,
    methods: MethodsOption = None,
    limit: LimitOption = 1500,
    per_file: PerFileOption = 12,
    shortest: ShortestOption = 12_000,
    longest: LongestOption = 24_000,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = 64,
    json: JsonOption = None,
    resume: ResumeOption = False,
    docs: DocsOption = None,
    section: SectionOption = "eval-reuse",
    write: WriteOption = None,
) -> None:
    """Measure what answers lose after jumps of the caret if KV is taken from elsewhere, and choose.

    The caret jumps through files. Each prompt is answered exactly and with each method. Chosen is
    the method with the least work whose first lines are right as often as exact ones, within 0.5
    points at 95%, over at least 1,000 jumps for which there was something to take; else none.
    """
    from midfill.cli.progress import show_progress
    from midfill.errors import MidfillError, OptionError
    from midfill.models.checkpoints.checkpoint import REUSE_KEY
    from midfill.models.checkpoints.model_record import write_reuse
    from midfill_lab.evaluation.jumps import (
        DEFAULT_METHODS,
        JumpOptions,
        load_walks,
        measure_jumps,
        parse_reuse_methods,
    )
    from midfill_lab.evaluation.reuse import choose_reuse, read_jumps
    from midfill_lab.evaluation.reuse_session import ReuseSession
    from midfill_lab.reporting import saver, wide_console

    if not files:
        raise MidfillError("nothing to ask: name held-out source files with --files")
    if asked.processes > 1:
        raise OptionError("--processes: jumps are asked one after the other; leave it out")
    if write is not None:
        asked.check_target(write, REUSE_KEY)
    options = JumpOptions(
        methods=parse_reuse_methods(DEFAULT_METHODS if methods is None else methods),
        limit=limit,
        per_file=per_file,
        seed=seed,
        max_tokens=max_tokens,
        suffixes=parse_suffixes(suffixes),
        shortest=shortest,
        longest=longest,
    )
    earlier = earlier_run(json, resume, read_jumps)
    walks = load_walks(files, options)
    choice = asked.choice()
    with show_progress() as progress:
        session = ReuseSession(choice, progress=progress)
        try:
            report = measure_jumps(
                session, choice.model, walks, options, progress, saver(json), earlier
            )
        finally:
            session.close()
    chosen = choose_reuse(report)
    Outputs(None, docs, section).show(chosen.tables(), lambda _: None)
    console = wide_console()
    console.print(f"reuse: {chosen.method}. {chosen.reason}", markup=False, highlight=False)
    if write is not None:
        path = write_reuse(write, chosen.method, chosen.measurement())
        console.print(f"written to {path}", markup=False, highlight=False)
