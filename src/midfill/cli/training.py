"""The ``midfill train`` commands."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.options import FimTokensOption, ModelOption

if TYPE_CHECKING:
    from rich.console import Console

    from midfill.checkpoints.checkpoint import Checkpoint
    from midfill.training.corpus import Corpus
    from midfill.training.recipe import TrainingRecipe
    from midfill.training.run import FimRun
    from midfill.training.survey import Survey

SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Folders of source files, .jsonl or .parquet files with a text field, or files."
    ),
]
RecipeOption = Annotated[
    Path | None, typer.Option(help="TOML file with the run's settings; see docs/training.md.")
]
FragmentsOption = Annotated[
    bool | None,
    typer.Option(
        "--fragments/--no-fragments",
        help="Tokenise text in fragments, so that the model can go on from half a word.",
    ),
]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Of everything that is drawn.")]
ProtectOption = Annotated[
    list[Path] | None,
    typer.Option(help="Evaluation texts: documents that share 13 words in a row are left out."),
]
HeldOutOption = Annotated[
    list[Path] | None, typer.Option(help="Documents that must not be trained on, in any version.")
]
AnyLicenceOption = Annotated[
    bool, typer.Option("--any-licence", help="Take documents whatever their licence.")
]

app = typer.Typer(no_args_is_help=True, help="Teach models to infill.")


@app.callback()
def _train() -> None:
    """Teach models to infill."""


@app.command()
def fim(
    sources: SourcesArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for adapter, checkpoints and loss curve.")
    ],
    model: ModelOption = None,
    recipe: RecipeOption = None,
    fim_tokens: FimTokensOption = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to train on.")] = None,
    fragments: FragmentsOption = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights, not LoRA.")] = False,
    seed: SeedOption = None,
    protect: ProtectOption = None,
    held_out: HeldOutOption = None,
    any_licence: AnyLicenceOption = False,
    start_from: Annotated[
        Path | None, typer.Option(help="A checkpoint of another run whose weights to start with.")
    ] = None,
    merge: Annotated[
        Path | None, typer.Option(help="Write the merged model here, a Hugging Face folder.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Teach a causal language model to infill; run it again to go on after an interruption."""
    from rich.console import Console

    from midfill.training.run import RunInputs, require_libraries

    require_libraries()
    import torch

    from midfill.system.machine import describe_machine
    from midfill.training.corpus import Corpus
    from midfill.training.finish import finish
    from midfill.training.run import prepare
    from midfill.training.step_display import StepDisplay

    if threads is not None:
        torch.set_num_threads(threads)
    chosen = _recipe(recipe, fragments=fragments, seed=seed, tokens=tokens, full=full)
    inputs = RunInputs(
        documents=Corpus.find(sources, chosen.data.suffixes),
        folder=output,
        fim_tokens=fim_tokens,
        protected=_corpus(protect, chosen),
        held_out=_corpus(held_out, chosen),
        any_licence=any_licence,
        start_from=start_from,
        base_name=_known_name(model),
    )
    console = Console(stderr=True, highlight=False)
    checkpoint = _open_base(model)
    with console.status("loading the model"):
        run = prepare(checkpoint, chosen, inputs)
    _print_settings(console, run, chosen, output)
    with StepDisplay(console, chosen.steps) as display:
        reached = run.trainer.run(display.show)
    if reached.step < chosen.steps:
        console.print(
            f"stopped after {reached.step} of {chosen.steps} steps; the same command goes on"
        )
        raise typer.Exit(130)
    machine = str(describe_machine())
    for line in finish(run, chosen, inputs, reached, merge=merge, machine=machine):
        console.print(line, soft_wrap=True)


@app.command()
def data(
    sources: SourcesArgument,
    model: ModelOption = None,
    recipe: RecipeOption = None,
    fim_tokens: FimTokensOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Stop after so many.")] = 500_000,
    examples: Annotated[int, typer.Option(min=0, help="How many to print.")] = 3,
    fragments: FragmentsOption = None,
    seed: SeedOption = None,
    protect: ProtectOption = None,
    held_out: HeldOutOption = None,
    any_licence: AnyLicenceOption = False,
) -> None:
    """Look at what training would read: refusals, examples, and the pipeline's speed."""
    from rich.console import Console

    from midfill.training.corpus import Corpus
    from midfill.training.example_text import example_text
    from midfill.training.run import RunInputs, fim_format_of, open_stream
    from midfill.training.survey import survey_stream

    chosen = _recipe(recipe, fragments=fragments, seed=seed)
    inputs = RunInputs(
        documents=Corpus.find(sources, chosen.data.suffixes),
        folder=Path(),
        fim_tokens=fim_tokens,
        protected=_corpus(protect, chosen),
        held_out=_corpus(held_out, chosen),
        any_licence=any_licence,
    )
    checkpoint = _open_base(model)
    format = fim_format_of(checkpoint, inputs.fim_tokens)
    stream = open_stream(checkpoint, format, chosen, inputs)
    with Console(stderr=True).status("reading documents"):
        survey = survey_stream(stream, tokens=tokens, samples=examples)
    console = Console(highlight=False)
    for number, example in enumerate(survey.samples, 1):
        hole = example.hole
        console.rule(
            f"example {number}: {hole.kind} hole of {hole.end - hole.caret} characters, "
            f"{hole.layout} layout, {len(example.ids)} tokens"
        )
        console.print(example_text(example, checkpoint.tokenizer), soft_wrap=True)
    if survey.samples:
        console.rule()
    _print_survey(console, survey)


def _recipe(
    path: Path | None,
    *,
    fragments: bool | None,
    seed: int | None,
    tokens: int | None = None,
    full: bool = False,
) -> "TrainingRecipe":
    """The file's recipe, or the usual one, with the options' values."""
    from midfill.training.recipe import TrainingRecipe

    recipe = TrainingRecipe() if path is None else TrainingRecipe.from_toml(path)
    if fragments is not None:
        recipe = dataclasses.replace(
            recipe, data=dataclasses.replace(recipe.data, fragments=fragments)
        )
    return dataclasses.replace(
        recipe,
        tokens=tokens or recipe.tokens,
        seed=recipe.seed if seed is None else seed,
        method="full" if full else recipe.method,
    )


def _corpus(paths: list[Path] | None, recipe: "TrainingRecipe") -> "Corpus | None":
    """Where the texts of an option are, if it is given."""
    from midfill.training.corpus import Corpus

    return Corpus.find(paths, recipe.data.suffixes) if paths else None


def _known_name(model: str | None) -> str | None:
    """The name a base was asked for by; None where it was a path."""
    from midfill.checkpoints.model_store import DEFAULT_MODEL

    return None if model is not None and Path(model).exists() else model or DEFAULT_MODEL


def _open_base(model: str | None) -> "Checkpoint":
    from midfill.checkpoints.model_store import DEFAULT_MODEL, resolve
    from midfill.checkpoints.opening import open_checkpoint
    from midfill.cli.progress import show_progress

    with show_progress() as progress:
        path = resolve(model or DEFAULT_MODEL, progress)
    return open_checkpoint(path)


def _print_settings(
    console: "Console", run: "FimRun", recipe: "TrainingRecipe", output: Path
) -> None:
    """What is about to happen, before it takes hours."""
    import torch

    from midfill.training.checkpoints import newest_checkpoint
    from midfill.training.trainer import CHECKPOINTS, precision_of

    corpus = run.stream.corpus
    files = len(corpus.files)
    documents = [f"{files:,} file{'s' if files > 1 else ''}"] if files else []
    documents += [path.name for path in corpus.records]
    trained = sum(each.numel() for each in run.trainer.model.parameters() if each.requires_grad)
    method = "all weights" if recipe.method == "full" else f"LoRA of rank {recipe.rank}"
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"{torch.get_num_threads()} CPU threads"
    sentinels = (run.format.prefix, run.format.suffix, run.format.middle)
    checkpoint = newest_checkpoint(output / CHECKPOINTS)
    rows = {
        "base": str(run.checkpoint.path),
        "documents": ", ".join(documents),
        "FIM tokens": " ".join(each.text for each in sentinels if each is not None),
        "text": "in fragments" if recipe.data.fragments else "as a whole",
        "training": f"{method}, {trained:,} numbers",
        "on": f"{device}, in {precision_of(recipe.precision)}",
        "length": f"{recipe.tokens:,} tokens, {recipe.steps:,} steps",
    }
    if checkpoint is not None:
        rows["goes on from"] = str(checkpoint)
    elif run.trainer.start_from is not None:
        rows["starts with"] = str(run.trainer.start_from)
    for name, value in rows.items():
        console.print(f"{name:>12}: {value}", soft_wrap=True, markup=False)


def _print_survey(console: "Console", survey: "Survey") -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None)
    counts = ", ".join(f"{reason} {count:,}" for reason, count in survey.refused.most_common())
    licences = ", ".join(f"{name} {count:,}" for name, count in survey.licences.most_common())
    kinds = ", ".join(
        f"{kind} {layout} {count:,}" for (kind, layout), count in sorted(survey.examples.items())
    )
    examples = survey.examples.total()
    read = "all of them" if survey.whole else "there are more"
    table.add_row("documents", f"{survey.documents:,} read ({read}), {survey.kept:,} kept")
    table.add_row("refused", counts or "none")
    table.add_row("licences", licences)
    table.add_row("examples", f"{examples:,}: {kinds}")
    table.add_row("longer than a row", f"{survey.too_long:,}")
    table.add_row(
        "tokens",
        f"{survey.tokens:,}, {survey.learned / survey.tokens:.0%} of them learned; "
        f"{survey.fragments / examples:.1f} cuts an example",
    )
    table.add_row("speed", f"{survey.tokens / survey.seconds:,.0f} tokens/s")
    console.print(table)
