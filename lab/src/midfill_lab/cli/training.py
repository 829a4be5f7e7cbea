"""The ``midfill train`` commands."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.options import FimTokensOption, ModelOption
from midfill.cli.progress import show_progress
from midfill.system.extras import require

if TYPE_CHECKING:
    from rich.console import Console

    from midfill.models.checkpoints.checkpoint import Checkpoint
    from midfill_lab.training.corpus import Corpus
    from midfill_lab.training.recipe import TrainingRecipe
    from midfill_lab.training.training_run import TrainingRun

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
        help="Tokenise text in fragments, so that the model can continue from half a word.",
    ),
]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Seed of all randomness.")]
ProtectOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Evaluation texts: documents that share 13 words in a row with one are refused."
    ),
]
HeldOutOption = Annotated[
    list[Path] | None, typer.Option(help="Documents that must not be trained on in any version.")
]
AnyLicenceOption = Annotated[
    bool, typer.Option("--any-licence", help="Accept documents under any licence.")
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
    full: Annotated[
        bool, typer.Option("--full", help="Train all weights instead of LoRA.")
    ] = False,
    seed: SeedOption = None,
    protect: ProtectOption = None,
    held_out: HeldOutOption = None,
    any_licence: AnyLicenceOption = False,
    start_from: Annotated[
        Path | None,
        typer.Option(help="Start with the weights of another run's checkpoint, or of an adapter."),
    ] = None,
    merge: Annotated[
        Path | None, typer.Option(help="Also write the merged model, a Hugging Face folder.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
) -> None:
    """Teach a model to infill; the same command continues an interrupted run."""
    from rich.console import Console

    require_training()
    import torch

    from midfill_lab.training.corpus import Corpus
    from midfill_lab.training.training_run import RunInputs, prepare_run

    if threads is not None:
        torch.set_num_threads(threads)
    chosen = _recipe(recipe, fragments=fragments, seed=seed, tokens=tokens, full=full)
    inputs = RunInputs(
        documents=Corpus.find(sources, chosen.data.suffixes, chosen.data.suffix_shares),
        folder=output,
        fim_tokens=fim_tokens,
        protected=_corpus(protect, chosen),
        held_out=_corpus(held_out, chosen),
        any_licence=any_licence,
        start_from=start_from,
        base_name=public_name(model),
    )
    console = Console(stderr=True, highlight=False)
    checkpoint = open_base(model)
    with console.status("loading the model"):
        run = prepare_run(checkpoint, chosen, inputs)
    train_and_finish(console, run, merge)


def require_training() -> None:
    """Check that the libraries that only training needs are installed.

    Raises:
        MidfillError: one is missing; the message says how to install it.
    """
    require("training", ["torch", "transformers", "accelerate", "peft"], extra="train")


def train_and_finish(console: "Console", run: "TrainingRun", merge: Path | None = None) -> None:
    """Train a prepared run to its end and write what it leaves; exit with 130 if interrupted."""
    from midfill.system.machine import describe_machine
    from midfill_lab.cli.training_display import StepDisplay, print_settings
    from midfill_lab.training.training_run import finish_run

    print_settings(console, run)
    steps = run.trainer.recipe.steps
    with StepDisplay(console, steps) as display:
        state = run.trainer.run(display.show)
    if state.step < steps:
        console.print(f"stopped after {state.step} of {steps} steps; the same command continues")
        raise typer.Exit(130)
    for line in finish_run(run, state, merge=merge, machine=str(describe_machine())):
        console.print(line, soft_wrap=True)


@app.command()
def data(
    sources: SourcesArgument,
    model: ModelOption = None,
    recipe: RecipeOption = None,
    fim_tokens: FimTokensOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to read.")] = 500_000,
    examples: Annotated[int, typer.Option(min=0, help="Number of examples to print.")] = 3,
    fragments: FragmentsOption = None,
    seed: SeedOption = None,
    protect: ProtectOption = None,
    held_out: HeldOutOption = None,
    any_licence: AnyLicenceOption = False,
) -> None:
    """Show what training would read: refused documents, examples, and the pipeline's speed."""
    require("midfill train data", ["torch"], extra="train")
    from rich.console import Console

    from midfill_lab.cli.training_display import print_survey
    from midfill_lab.training.corpus import Corpus
    from midfill_lab.training.stream import survey_stream
    from midfill_lab.training.training_run import RunInputs, choose_fim_format, open_stream

    chosen = _recipe(recipe, fragments=fragments, seed=seed)
    inputs = RunInputs(
        documents=Corpus.find(sources, chosen.data.suffixes, chosen.data.suffix_shares),
        folder=Path(),
        fim_tokens=fim_tokens,
        protected=_corpus(protect, chosen),
        held_out=_corpus(held_out, chosen),
        any_licence=any_licence,
    )
    checkpoint = open_base(model)
    format = choose_fim_format(checkpoint, inputs.fim_tokens)
    stream = open_stream(checkpoint, format, chosen, inputs)
    with Console(stderr=True).status("reading documents"):
        survey = survey_stream(stream, max_tokens=tokens, samples=examples)
    print_survey(Console(highlight=False), survey, checkpoint.tokenizer)


def _recipe(
    path: Path | None,
    *,
    fragments: bool | None,
    seed: int | None,
    tokens: int | None = None,
    full: bool = False,
) -> "TrainingRecipe":
    """Return the file's recipe, or the default one, with the values of given options."""
    from midfill_lab.training.recipe import TrainingRecipe

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
    """Return the corpus of an option's paths, None if it is not given."""
    from midfill_lab.training.corpus import Corpus

    return Corpus.find(paths, recipe.data.suffixes) if paths else None


def public_name(model: str | None) -> str | None:
    """Return the name by which a base was requested, None if it was a path."""
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    return None if model is not None and Path(model).exists() else model or DEFAULT_MODEL


def open_base(model: str | None) -> "Checkpoint":
    """Open the base, the default model if none is named."""
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
    from midfill.models.checkpoints.opening import open_checkpoint

    with show_progress() as progress:
        path = resolve(model or DEFAULT_MODEL, progress)
    return open_checkpoint(path)
