"""Options that several commands share."""

from typing import Annotated

import typer

from midfill.cli.option_groups import option_of
from midfill.config import Backend, FimTokens, KVCacheDtypeName, ModelOptions, WeightsOption
from midfill.serving.options import ServeOptions, WindowSize

_MODEL_HELP = (
    "A .gguf file, a model folder, ORG/NAME on the Hugging Face hub, or a name that"
    " 'midfill models' lists; downloaded if needed."
)

ModelArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help=f"{_MODEL_HELP} Of several, requests choose one by its name.",
    ),
]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", help=_MODEL_HELP)]
BackendOption = Annotated[Backend, option_of(ModelOptions, "backend")]
DeviceOption = Annotated[str | None, option_of(ModelOptions, "device")]
WeightsFormatOption = Annotated[WeightsOption, option_of(ModelOptions, "weights")]
ThreadsOption = Annotated[int | None, option_of(ModelOptions, "threads")]
KVCacheDtypeOption = Annotated[KVCacheDtypeName, option_of(ModelOptions, "kv_cache_dtype")]
AdapterOption = Annotated[str | None, option_of(ModelOptions, "adapter")]
FimTokensOption = Annotated[FimTokens | None, option_of(ServeOptions, "fim_tokens")]
WindowOption = Annotated[WindowSize | None, option_of(ServeOptions, "window")]
SnippetsOption = Annotated[int | None, option_of(ServeOptions, "snippets")]
MethodOption = Annotated[str, option_of(ModelOptions, "method")]
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
