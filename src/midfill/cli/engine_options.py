"""Options of the commands that run an engine for clients: serve and cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from midfill.cli.options import (
    BackendOption,
    ContextOption,
    KvDtypeOption,
    KvMemoryOption,
    MethodOption,
    SpeculationOption,
    WeightsFormatOption,
)
from midfill.cli.values import parse_allowed_method, parse_codec, parse_size
from midfill.config import SchedulerName

if TYPE_CHECKING:
    from midfill.config import ModelOptions, WarmTierOptions

TokenBudgetOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Maximum tokens per step. Lower: steadier streams; higher: faster prompts.",
    ),
]
SchedulerOption = Annotated[
    SchedulerName,
    typer.Option(
        metavar="NAME",
        help="How prompts longer than the token budget are computed beside running answers:"
        " sarathi-serve in chunks of tokens, layered-prefill by groups of layers. Answers are the"
        " same.",
    ),
]
IdlePrefillOption = Annotated[
    bool,
    typer.Option(
        help="While the engine is idle, compute the prompts that documents will probably need next."
    ),
]
AllowMethodOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A method that requests may choose for their own prompt (midfill.method); may be"
        " repeated. 'none' lets them keep all KV, 'any' allows everything.",
        parser=parse_allowed_method,
        metavar="NAME",
    ),
]
WarmTierMemoryOption = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Host memory for KV that has no room in the KV pool, like 4GB. It outlives the engine"
        " process, not the server.",
    ),
]
WarmTierDiskOption = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Disk space for KV, like 20GB: documents stay warm when the server is restarted.",
    ),
]
WarmTierFolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where --warm-tier-disk keeps its files; by default in midfill's cache folder.",
    ),
]
WarmTierCodecOption = Annotated[
    str,
    typer.Option(
        parser=parse_codec,
        metavar="NAME[:OPTION=VALUE,...]",
        help="How the warm tier writes KV: none, as it was computed, or cachegen, less than a"
        " quarter as large, whose answers are not exact.",
    ),
]


@dataclass(frozen=True)
class WeightsFlags:
    """How a model is loaded, and how much KV there is."""

    backend: BackendOption = "auto"
    weights: WeightsFormatOption = "auto"
    context: ContextOption = None
    kv_memory: KvMemoryOption = None
    kv_cache_dtype: KvDtypeOption = "auto"

    @property
    def options(self) -> "ModelOptions":
        """The same for the engine process."""
        from midfill.config import ModelOptions

        return ModelOptions(
            backend=self.backend,
            weights=self.weights,
            context=self.context,
            kv_memory=self.kv_memory,
            kv_dtype=self.kv_cache_dtype,
        )


@dataclass(frozen=True)
class StepFlags:
    """What an engine computes in a step, and what of a prompt's KV it keeps."""

    token_budget: TokenBudgetOption = 128
    scheduler: SchedulerOption = "sarathi-serve"
    speculation: SpeculationOption = True
    method: MethodOption = "none"
    allow_method: AllowMethodOption = None

    def apply(self, options: "ModelOptions") -> "ModelOptions":
        """Return the options of an engine process with these."""
        return msgspec.structs.replace(
            options,
            token_budget=self.token_budget,
            scheduler=self.scheduler,
            speculation=self.speculation,
            method=self.method,
            allow_methods=tuple(self.allow_method or ()),
        )


@dataclass(frozen=True)
class WarmTierFlags:
    """Where KV is kept that may be evicted or lost."""

    warm_tier_memory: WarmTierMemoryOption = "0"  # type: ignore[assignment]
    warm_tier_disk: WarmTierDiskOption = "0"  # type: ignore[assignment]
    warm_tier_folder: WarmTierFolderOption = None
    warm_tier_codec: WarmTierCodecOption = "none"

    @property
    def options(self) -> "WarmTierOptions":
        """The same for the engine process."""
        from midfill.config import WarmTierOptions

        folder = self.warm_tier_folder
        return WarmTierOptions(
            memory=self.warm_tier_memory,
            disk=self.warm_tier_disk,
            codec=self.warm_tier_codec,
            folder=None if folder is None else str(folder.absolute()),
        )
