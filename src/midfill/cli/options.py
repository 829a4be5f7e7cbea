"""Options that several commands share."""

from typing import Annotated

import typer

from midfill.cli.sizes import parse_size
from midfill.config import Backend, FimTokens, KvDtype, WeightsOption

_MODEL_HELP = (
    "A .gguf file, a model folder, ORG/NAME on the Hugging Face hub, or a name that"
    " 'midfill models' lists; fetched if need be."
)


def parse_fim_tokens(text: str) -> FimTokens:
    """Return the sentinels named by "PRE,SUF,MID".

    Raises:
        typer.BadParameter: it does not name exactly three.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(parts):
        raise typer.BadParameter("name three tokens: PREFIX,SUFFIX,MIDDLE")
    return FimTokens(*parts)


ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=_MODEL_HELP)]
BackendOption = Annotated[
    Backend,
    typer.Option(help="What computes: midfill's CPU kernels, or PyTorch on any device."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Device of the torch backend, such as cuda:1.", metavar="NAME")
]
WeightsFormatOption = Annotated[
    WeightsOption,
    typer.Option(
        "--weights",
        help="How the CPU kernels keep weights: as stored, or made 4-bit, 8-bit or float32.",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="CPU threads; if not set all cores this process may use, fewer under a CPU quota.",
    ),
]
ContextOption = Annotated[
    int | None, typer.Option(min=2, help="Most tokens of a prompt and its answer.")
]
KvMemoryOption = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Memory for KV, like 2GB; sized from what is free if not set.",
    ),
]
KvDtypeOption = Annotated[
    KvDtype,
    typer.Option(
        "--kv-cache-dtype",
        help="How the CPU kernels keep KV: float32, float16 or 8-bit; float16 beside quantised"
        " weights if not set.",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|none",
        help="Folder of a LoRA adapter to merge into the model; the one that comes with a model"
        " midfill knows by name if not set.",
    ),
]
FimTokensOption = Annotated[
    FimTokens | None,
    typer.Option(
        parser=parse_fim_tokens,
        metavar="PRE,SUF,MID",
        help="The model's FIM tokens, for models midfill doesn't know.",
    ),
]
SpeculationOption = Annotated[
    bool,
    typer.Option(
        help="Guess tokens that copy from the text and check several in one step; never changes"
        " an answer.",
    ),
]
MaxTokensOption = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Longest answer.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", "-t", min=0, help="0 always takes the likeliest token.")
]
SeedOption = Annotated[int | None, typer.Option(help="Makes a sampled answer reproducible.")]
StopOption = Annotated[
    list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
]
