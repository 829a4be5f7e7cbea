"""The ``midfill eval far`` command."""

from typing import Annotated

import typer

from midfill.cli.option_groups import with_option_groups
from midfill.cli.values import parse_names
from midfill_lab.cli.evaluation.options import (
    FilesOption,
    JsonOption,
    ModelFlags,
    ResumeOption,
    SeedOption,
)
from midfill_lab.cli.outputs import DocsOption, Outputs, SectionOption, earlier_run

WindowsOption = Annotated[
    str | None,
    typer.Option(
        help="Characters before and after the caret, separated by commas. The smallest is the one"
        " that doesn't show the names; 2000/600,7400/600,15400/600,23400/600 by default."
    ),
]
MethodsOption = Annotated[
    str | None,
    typer.Option(
        help="Methods with their options, separated by blanks, asked with the widest window; by"
        ' default lserve and hip. "" asks none.'
    ),
]
KindsOption = Annotated[
    str,
    typer.Option(
        metavar="KIND,...",
        help="Kinds of carets: far (a name that the file sets far above), imported (one that an"
        " imported file sets), any (any line of files that have others).",
    ),
]
LimitOption = Annotated[int, typer.Option(min=1, help="Maximum carets of each kind.")]
PerFileOption = Annotated[int, typer.Option(min=1, help="Maximum carets of a kind in one file.")]
TimedOption = Annotated[int, typer.Option(min=0, help="Files in which times are measured.")]
ShortestOption = Annotated[int, typer.Option(min=1, help="Characters of the shortest file.")]
LongestOption = Annotated[int, typer.Option(min=1, help="Characters of the longest file.")]
MaxTokensOption = Annotated[
    int, typer.Option(min=1, help="Maximum tokens per answer; it ends with its line.")
]


@with_option_groups
def far(
    *,
    files: FilesOption = None,
    asked: ModelFlags,
    windows: WindowsOption = None,
    methods: MethodsOption = None,
    kinds: KindsOption = "far,imported,any",
    limit: LimitOption = 200,
    per_file: PerFileOption = 4,
    timed: TimedOption = 6,
    shortest: ShortestOption = 8000,
    longest: LongestOption = 32_000,
    seed: SeedOption = 0,
    max_tokens: MaxTokensOption = 48,
    json: JsonOption = None,
    resume: ResumeOption = False,
    docs: DocsOption = None,
    section: SectionOption = "eval-far",
) -> None:
    """Measure what answers gain from text that is far from the caret, and what that costs.

    Carets are where a Python file's line goes on with a name that the smallest window doesn't show:
    the file sets it far above, or a file that it imports does. Each is asked with several windows,
    and with the widest also by methods that read a part of its keys; so are any lines, for
    comparison. Times are of the process: run it with --threads 1.
    """
    from midfill.cli.progress import show_progress
    from midfill.errors import MidfillError, OptionError
    from midfill_lab.evaluation.far import (
        DEFAULT_METHODS,
        DEFAULT_WINDOWS,
        FarOptions,
        far_conditions,
        load_far_files,
        measure_far,
        read_far,
    )
    from midfill_lab.evaluation.far_carets import FAR_KINDS
    from midfill_lab.evaluation.far_tables import far_tables
    from midfill_lab.evaluation.reuse_session import ReuseSession
    from midfill_lab.evaluation.windows import parse_windows, window_name
    from midfill_lab.reporting import saver

    if not files:
        raise MidfillError("nothing to ask: name held-out source files with --files")
    if asked.processes > 1:
        raise OptionError("--processes: carets are asked one after the other; leave it out")
    named = (DEFAULT_METHODS if methods is None else methods).split()
    rules = parse_windows(DEFAULT_WINDOWS if windows is None else windows)
    options = FarOptions(
        windows=tuple(window_name(rule) for rule in rules),
        methods=tuple(dict.fromkeys(named)),
        kinds=parse_names(kinds, FAR_KINDS, "--kinds"),
        limit=limit,
        per_file=per_file,
        timed=timed,
        seed=seed,
        max_tokens=max_tokens,
        shortest=shortest,
        longest=longest,
    )
    far_conditions(options.windows, options.methods)  # refuses methods that are none
    earlier = earlier_run(json, resume, read_far)
    drawn = load_far_files(files, options)
    choice = asked.choice()
    with show_progress() as progress:
        session = ReuseSession(choice, progress=progress)
        try:
            report = measure_far(
                session, choice.model, drawn, options, progress, saver(json), earlier
            )
        finally:
            session.close()
    Outputs(None, docs, section).show(far_tables(report), lambda _: None)
