"""A training run: prepared from its inputs, and finished by writing what it leaves behind."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from midfill.errors import MidfillError
from midfill.infill.formats import FAMILIES, FimFormat, custom_format, find_format
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.lora_update import DEFAULT_ROUNDING, Rounding
from midfill.system.files import write_file
from midfill.version import __version__
from midfill_lab.training.corpus import MANIFEST, Corpus, describe_manifest, manifest_text
from midfill_lab.training.examples import ExampleMaker
from midfill_lab.training.export import adapter_record, model_card, write_adapter, write_model
from midfill_lab.training.filters import DocumentFilter, FilterOptions
from midfill_lab.training.lora import QAT_ROUNDING, QuantizationAwareLora, make_trainable
from midfill_lab.training.loss import BaseTeacher
from midfill_lab.training.parallel_stream import ParallelStream
from midfill_lab.training.recipe import TrainingRecipe
from midfill_lab.training.run_folder import (
    TrainingState,
    check_folder,
    describe_run,
    plot_loss,
    read_loss_log,
)
from midfill_lab.training.stream import TrainingStream
from midfill_lab.training.trainer import LOSS_LOG, Trainer, resolve_precision

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<EOT>", "</s>")
_MAX_NAMED_TOKENS = 24  # spare tokens named in an error; some models have hundreds


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run is made from, besides its recipe.

    Attributes:
        documents: the training documents.
        folder: where everything the run makes is written.
        fim_tokens: PRE, SUF and MID; None takes the model's own.
        protected: evaluation texts that no document may copy from.
        held_out: documents that must not be trained on, in any version.
        any_licence: train on documents whatever their licence.
        start_from: see ``Trainer``.
        base_name: the base's public name; None takes the name in its own metadata.
        checkpoint_seconds: time between two checkpoints.
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
class TrainingRun:
    """A prepared run.

    Attributes:
        checkpoint: the base model.
        inputs: what the run was prepared from, besides its recipe.
        trainer: trains the model.
    """

    checkpoint: Checkpoint
    inputs: RunInputs
    trainer: Trainer


def prepare_run(checkpoint: Checkpoint, recipe: TrainingRecipe, inputs: RunInputs) -> TrainingRun:
    """Prepare everything up to the first step; nothing is written.

    Raises:
        MidfillError: no sentinels, no end token, unusable inputs, or a folder that holds another
            run.
    """
    from midfill_lab.training.base_model import load_base_model

    format = choose_fim_format(checkpoint, inputs.fim_tokens)
    description = describe_run(checkpoint, format, recipe)
    check_folder(inputs.folder, description)
    stream = open_stream(checkpoint, format, recipe, inputs)
    dtype = torch.float32
    if recipe.method == "lora" and resolve_precision(recipe.precision) == "bf16":
        dtype = torch.bfloat16  # enough for frozen weights
    model = load_base_model(checkpoint, dtype)
    teacher = load_base_model(checkpoint, dtype) if recipe.distillation else None
    if torch.cuda.is_available():
        model = model.cuda()
        teacher = teacher and teacher.cuda()
    model = make_trainable(model, recipe, _sentinel_ids(format))
    lora = recipe.method == "lora"
    trainer = Trainer(
        model=model,
        recipe=recipe,
        stream=ParallelStream(stream, recipe.data.workers) if recipe.data.workers else stream,
        folder=inputs.folder,
        description=description,
        checkpoint_seconds=inputs.checkpoint_seconds,
        qat=QuantizationAwareLora.find(model, checkpoint) if lora else None,
        teacher=BaseTeacher(teacher) if teacher is not None else None,
        start_from=inputs.start_from,
    )
    return TrainingRun(checkpoint, inputs, trainer)


def open_stream(
    checkpoint: Checkpoint, format: FimFormat, recipe: TrainingRecipe, inputs: RunInputs
) -> TrainingStream:
    """Open the data of a run.

    Raises:
        MidfillError: no end token, or protected or held-out texts that can't be read.
    """
    return TrainingStream(
        corpus=inputs.documents,
        maker=ExampleMaker(
            checkpoint.tokenizer,
            format,
            choose_end_token(checkpoint, format),
            recipe.data,
            plain_text=recipe.distillation > 0,
        ),
        recipe=recipe,
        filter=DocumentFilter(
            FilterOptions(licences=None) if inputs.any_licence else FilterOptions(),
            protected=inputs.protected.texts() if inputs.protected else [],
            held_out=inputs.held_out.texts() if inputs.held_out else [],
        ),
    )


def choose_fim_format(checkpoint: Checkpoint, tokens: tuple[str, str, str] | None) -> FimFormat:
    """Return the format to teach: that of the given tokens, or the model's own.

    Raises:
        MidfillError: the model has none and no tokens are given.
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
    named = ", ".join(spare[:_MAX_NAMED_TOKENS])
    named += ", ..." if len(spare) > _MAX_NAMED_TOKENS else ""
    raise MidfillError(
        f"{checkpoint.path}: the model has no FIM tokens; name three special tokens that it does "
        f"not use otherwise with --fim-tokens PRE,SUF,MID. It has: {named}"
    )


def choose_end_token(checkpoint: Checkpoint, format: FimFormat) -> int:
    """Return the token that ends an answer: the format's, else an end-of-text token, else EOS.

    Raises:
        MidfillError: the model has none of these.
    """
    special = checkpoint.tokenizer.special_tokens
    own = next((family.stop[:1] for family in FAMILIES if family.name == format.name), ())
    for text in (*own, *_END_TOKENS):
        if text in special:
            return special[text]
    if checkpoint.tokenizer.eos_token_ids:
        return checkpoint.tokenizer.eos_token_ids[0]
    raise MidfillError(f"{checkpoint.path}: the tokenizer has no token that ends a text")


def finish_run(
    run: TrainingRun, state: TrainingState, *, merge: Path | None, machine: str
) -> list[str]:
    """Write what a finished run leaves behind: adapter or model, manifest, loss curve.

    Args:
        run: the run. With ``merge``, its model can't be trained on afterwards.
        state: its state at the end.
        merge: folder for the merged model; None writes the adapter alone.
        machine: what it was trained on, for the record.

    Returns:
        One line per thing written.

    Raises:
        MidfillError: something can't be written.
    """
    folder = run.inputs.folder
    recipe, stream = run.trainer.recipe, run.trainer.stream
    maker = stream.maker
    write_file(folder / MANIFEST, manifest_text(stream.manifest.values()))
    record = adapter_record(
        run.checkpoint,
        maker.format,
        maker.end_token_id,
        recipe.data.fragments,
        _rounding(run),
        name=run.inputs.base_name,
        training=_training_record(recipe, state, folder / LOSS_LOG, machine),
        data=_data_record(stream),
        recipe=recipe.as_dict(),
    )
    written = []
    model = run.trainer.model
    if recipe.method == "lora":
        card = model_card(record, adapter=True)
        write_adapter(folder / "adapter", model, record, card, recipe.adapter_precision)
        written.append(f"adapter: {folder / 'adapter'} (midfill serve MODEL --adapter ...)")
    if merge is not None or recipe.method == "full":
        target = merge or folder / "model"
        card = model_card(record, adapter=False)
        write_model(target, model, run.checkpoint, maker.format, record, card)
        written.append(f"model: {target} (midfill serve {target})")
    try:
        plot_loss(folder / LOSS_LOG, folder / "loss.png")
        written.append(f"loss curve: {folder / 'loss.png'}")
    except ImportError:  # matplotlib is part of the training extra, but not essential
        written.append(f"loss of each step: {folder / LOSS_LOG}")
    return written


def _sentinel_ids(format: FimFormat) -> list[int]:
    sentinels = (format.prefix, format.suffix, format.middle)
    return [each.token_id for each in sentinels if each is not None]


def _rounding(run: TrainingRun) -> Rounding:
    """Return the rounding rule that serving has to merge the adapter with."""
    quantization_aware = run.trainer.qat is not None and run.trainer.recipe.qat_start < 1
    return QAT_ROUNDING if quantization_aware else DEFAULT_ROUNDING


def _training_record(
    recipe: TrainingRecipe, state: TrainingState, log: Path, machine: str
) -> dict[str, Any]:
    losses = [line["loss"] for line in read_loss_log(log)]
    tenth = max(1, len(losses) // 10)
    return {
        "made_with": f"midfill {__version__}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "precision": resolve_precision(recipe.precision),
        "steps": state.step,
        "tokens": state.tokens,
        "characters": state.characters,
        "hours": round(state.seconds / 3600, 2),
        "first_loss": round(sum(losses[:tenth]) / tenth, 4),
        "last_loss": round(sum(losses[-tenth:]) / tenth, 4),
    }


def _data_record(stream: TrainingStream | ParallelStream) -> dict[str, Any]:
    """Return counts and licences of the documents; refusals are those of the first pass."""
    return {
        **describe_manifest(stream.manifest.values()),
        "passes": stream.position.epoch + 1,
        "examples": stream.examples,
        "refused": dict(stream.refused.most_common()),
    }
