"""A training run from its inputs: opens the base, builds stream, model and trainer."""

from dataclasses import dataclass
from pathlib import Path

import torch

from midfill.checkpoints.checkpoint import Checkpoint
from midfill.errors import MidfillError
from midfill.infill.formats import FAMILIES, FimFormat, custom_format, find_format
from midfill.system.extras import require
from midfill.training.corpus import Corpus
from midfill.training.examples import ExampleMaker
from midfill.training.filters import DocumentFilter, FilterOptions
from midfill.training.lora import trainable
from midfill.training.recipe import TrainingRecipe
from midfill.training.run_file import check_folder, describe_run
from midfill.training.stream import TrainingStream
from midfill.training.trainer import Trainer, precision_of

_LIBRARIES = ("transformers", "accelerate", "peft")
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<EOT>", "</s>")
_SHOWN = 24  # spare tokens named in an error; some models have hundreds


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run is made from, beside its recipe.

    Attributes:
        documents: what is read.
        folder: where everything it makes goes.
        fim_tokens: PRE, SUF and MID; None takes those the model has.
        protected: evaluation texts that no document may copy from, if any.
        held_out: documents that are kept out in any version, if any.
        any_licence: train on documents whatever their licence.
        start_from: see ``Trainer``.
        base_name: what people know the base by; None takes what it calls itself.
        checkpoint_seconds: between two checkpoints.
    """

    documents: Corpus
    folder: Path
    fim_tokens: tuple[str, str, str] | None = None
    protected: Corpus | None = None
    held_out: Corpus | None = None
    any_licence: bool = False
    start_from: Path | None = None
    base_name: str | None = None
    checkpoint_seconds: float = 300.0


@dataclass
class FimRun:
    """A prepared run.

    Attributes:
        checkpoint: the base model.
        format: the sentinels that are taught.
        end_token_id: what ends an answer.
        stream, trainer: see their classes.
    """

    checkpoint: Checkpoint
    format: FimFormat
    end_token_id: int
    stream: TrainingStream
    trainer: Trainer


def prepare(checkpoint: Checkpoint, recipe: TrainingRecipe, inputs: RunInputs) -> FimRun:
    """Everything up to the first step; nothing is written.

    Raises:
        MidfillError: no sentinels, no end token, inputs that can't be used, or a folder with
            another run in it.
    """
    from midfill.training.base_model import load_base
    from midfill.training.grid import BaseGrid

    format = fim_format_of(checkpoint, inputs.fim_tokens)
    description = describe_run(checkpoint, format, recipe)
    check_folder(inputs.folder, description)
    stream = open_stream(checkpoint, format, recipe, inputs)
    precision = precision_of(recipe.precision)
    dtype = torch.float32
    if precision == "bf16" and recipe.method == "lora":
        dtype = torch.bfloat16  # frozen weights need no more
    model = load_base(checkpoint, dtype)
    if torch.cuda.is_available():
        model = model.cuda()
    model = trainable(model, recipe, _sentinel_ids(format))
    trainer = Trainer(
        model=model,
        recipe=recipe,
        stream=stream,
        folder=inputs.folder,
        description=description,
        checkpoint_seconds=inputs.checkpoint_seconds,
        grid=BaseGrid.of(model, checkpoint) if recipe.method == "lora" else None,
        start_from=inputs.start_from,
    )
    return FimRun(checkpoint, format, stream.maker.end_token_id, stream, trainer)


def open_stream(
    checkpoint: Checkpoint, format: FimFormat, recipe: TrainingRecipe, inputs: RunInputs
) -> TrainingStream:
    """The data of a run.

    Raises:
        MidfillError: no end token, or protected or held out texts that can't be read.
    """
    return TrainingStream(
        corpus=inputs.documents,
        maker=ExampleMaker(
            checkpoint.tokenizer, format, end_token_of(checkpoint, format), recipe.data
        ),
        recipe=recipe,
        filter=DocumentFilter(
            FilterOptions(licences=None) if inputs.any_licence else FilterOptions(),
            protected=inputs.protected.texts() if inputs.protected else [],
            held_out=inputs.held_out.texts() if inputs.held_out else [],
        ),
    )


def fim_format_of(checkpoint: Checkpoint, tokens: tuple[str, str, str] | None) -> FimFormat:
    """The format to teach: the one named, or the model's own.

    Raises:
        MidfillError: the model has none and none is named.
    """
    special = checkpoint.tokenizer.special_tokens
    if tokens is not None:
        return custom_format(*tokens, special)
    format = find_format(checkpoint.config.family, special, checkpoint.metadata)
    if format is not None:
        return format
    ends = {checkpoint.tokenizer.bos_token_id, *checkpoint.tokenizer.eos_token_ids}
    spare = [text for text, token_id in special.items() if token_id not in ends]
    if len(spare) < 3:
        raise MidfillError(
            f"{checkpoint.path}: the tokenizer has no FIM tokens and too few spare special tokens "
            f"to serve as such ({', '.join(spare) or 'none'}); add three to the model first"
        )
    shown = ", ".join(spare[:_SHOWN]) + (", ..." if len(spare) > _SHOWN else "")
    raise MidfillError(
        f"{checkpoint.path}: the model has no FIM tokens; name three special tokens that it makes "
        f"no other use of with --fim-tokens PRE,SUF,MID. It has: {shown}"
    )


def end_token_of(checkpoint: Checkpoint, format: FimFormat) -> int:
    """The token an infilled answer ends with: the family's, else end of text where there is one.

    Raises:
        MidfillError: the model has no end token.
    """
    special = checkpoint.tokenizer.special_tokens
    own = next((family.stop[:1] for family in FAMILIES if family.name == format.name), ())
    for text in (*own, *_END_OF_TEXT):
        if text in special:
            return special[text]
    if checkpoint.tokenizer.eos_token_ids:
        return checkpoint.tokenizer.eos_token_ids[0]
    raise MidfillError(f"{checkpoint.path}: the tokenizer has no token that ends a text")


def require_libraries() -> None:
    """Check that what only training needs is installed.

    Raises:
        MidfillError: something is missing; says how to install it.
    """
    require("training", _LIBRARIES, extra="train")


def _sentinel_ids(format: FimFormat) -> list[int]:
    sentinels = (format.prefix, format.suffix, format.middle)
    return [each.token_id for each in sentinels if each is not None]
