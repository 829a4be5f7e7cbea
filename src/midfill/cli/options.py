"""Options that several commands share."""

from typing import Annotated

import typer

from midfill.cli.values import parse_fim_tokens, parse_method, parse_size, parse_window
from midfill.config import Backend, FimTokens, KvDtype, WeightsOption, WindowSize

_MODEL_HELP = (
    "A .gguf file, a model folder, ORG/NAME on the Hugging Face hub, or a name that"
    " 'midfill models' lists; downloaded if needed."
)

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=_MODEL_HELP)]
BackendOption = Annotated[
    Backend,
    typer.Option(help="What runs the model: midfill's CPU kernels, or PyTorch on any device."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="Device of the torch backend, such as cuda:1.", metavar="NAME")
]
WeightsFormatOption = Annotated[
    WeightsOption,
    typer.Option(
        "--weights",
        help="How the CPU kernels store weights: as in the file, in at most 4 or 8 bits, float32.",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="CPU threads; by default all cores this process may use, fewer under a CPU quota.",
    ),
]
ContextOption = Annotated[
    int | None, typer.Option(min=2, help="Maximum tokens of a prompt and its answer.")
]
KvMemoryOption = Annotated[
    int | None,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Memory for KV, like 2GB; by default sized from free memory.",
    ),
]
KvDtypeOption = Annotated[
    KvDtype,
    typer.Option(
        "--kv-cache-dtype",
        help="How the CPU kernels store KV: float32, float16, bfloat16 or 8-bit; with quantised"
        " weights by default bfloat16 on chips with AVX512-BF16, float16 on others. With bfloat16"
        " attention is rounded, too; these chips compute long prompts faster so.",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|none",
        help="Folder of a LoRA adapter to merge into the model; by default the one that midfill"
        " ships for a model of this name.",
    ),
]
FimTokensOption = Annotated[
    FimTokens | None,
    typer.Option(
        parser=parse_fim_tokens,
        metavar="PRE,SUF,MID",
        help="The model's FIM tokens, for models that midfill doesn't know.",
    ),
]
WindowOption = Annotated[
    WindowSize | None,
    typer.Option(
        parser=parse_window,
        metavar="BEFORE,AFTER",
        help="How much of a long document to show the model: about BEFORE characters before the"
        " caret, at most AFTER after it; by default what the model or its adapter names.",
    ),
]
SnippetsOption = Annotated[
    int | None,
    typer.Option(
        "--snippets",
        metavar="CHARACTERS",
        min=0,
        help="How much to show of the snippets of other text that editor plugins send by"
        " themselves; by default what the model or its adapter names.",
    ),
]
DocumentMemoryOption = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Memory for the texts of documents, which are remembered from request to request; up"
        " to 3/8 of it more for their tokens and for what prompts begin with.",
    ),
]
SpeculationOption = Annotated[
    bool,
    typer.Option(
        help="Draft tokens that copy from the text and verify several per step; never changes an"
        " answer.",
    ),
]
MethodOption = Annotated[
    str,
    typer.Option(
        parser=parse_method,
        metavar="NAME[:OPTION=VALUE,...]",
        help="Compress the KV of every prompt, as in cake:budget=256, or take it from elsewhere,"
        " as in cacheblend:ratio=0.15; see 'midfill methods'.",
    ),
]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, help="Maximum tokens of an answer.")
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", "-t", min=0, help="0 always takes the most likely token.")
]
SeedOption = Annotated[int | None, typer.Option(help="Makes a sampled answer reproducible.")]
StopOption = Annotated[
    list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
]
