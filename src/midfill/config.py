"""Options: how a model is loaded and run, and how it is served."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from midfill.errors import MidfillError

Backend = Literal["auto", "cpu", "torch"]
WeightsOption = Literal["auto", "q4", "q8", "f32"]
KvDtype = Literal["auto", "f32", "f16", "i8"]

DEFAULT_MAX_QUEUED_TOKENS = 262_144


class FimTokens(NamedTuple):
    """The texts of a model's FIM sentinels, as a user or an adapter names them."""

    prefix: str
    suffix: str
    middle: str


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded and run. Crosses the process boundary, so plain values only.

    Attributes:
        backend: "cpu" is midfill's compiled CPU kernels, "torch" plain PyTorch on any device;
            "auto" takes PyTorch when it sees a CUDA GPU and the kernels otherwise.
        device: torch device such as "cuda:0", for the torch backend; None lets torch choose.
        weights: how the CPU kernels keep the weights: "auto" as the checkpoint stores them,
            without loss where that is possible; the others quantise (or dequantise) them all.
        threads: CPU threads of a step; None takes the cores this process may use.
        context: most tokens of a prompt and its answer; None takes the model's own.
        kv_memory: bytes for KV; None sizes it from the memory that is free.
        kv_dtype: how the CPU kernels keep KV: "auto" is float32 beside float32 weights and float16
            otherwise; "i8" has a scale for each token and head.
        token_budget: most tokens a step runs.
        max_running: most answers in progress at a time; others wait.
        adapter: folder of the LoRA adapter that is merged into the model; None for none.
        speculation: run drafts of an answer's next tokens, copied from its own text, where they
            make steps shorter than the tokens they save. Answers are the same with and without.
    """

    backend: Backend = "auto"
    device: str | None = None
    weights: WeightsOption = "auto"
    threads: int | None = None
    context: int | None = None
    kv_memory: int | None = None
    kv_dtype: KvDtype = "auto"
    token_budget: int = 128
    max_running: int = 128
    adapter: str | None = None
    speculation: bool = True

    @property
    def adapter_path(self) -> Path | None:
        """``adapter`` as a path."""
        return None if self.adapter is None else Path(self.adapter)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What ``midfill serve`` serves and how.

    Attributes:
        model: name or path, see ``midfill models``.
        served_name: what clients call it; None takes ``model``, of a path the last part.
        host, port: where to listen; port 0 takes a free one.
        api_keys: keys that clients must send, each with a cache of its own; no keys let everyone
            in.
        fim_tokens: the model's FIM sentinels (prefix, suffix, middle), where midfill doesn't know
            them.
        max_body_bytes: maximum size of a request body.
        max_queued_tokens: maximum number of prompt tokens whose requests wait for their first
            token; requests beyond it are refused with status 429.
        idle_prefill: compute the prompts that documents will probably ask for next while the
            engine has nothing else to do.
        stream_interval: seconds for which the tokens of a streamed answer, after its first, may be
            held back to be sent together; 0 sends each at once.
        options: how the model is run.

    Raises:
        MidfillError: an API key that is empty or that no client could send.
    """

    model: str
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    fim_tokens: FimTokens | None = None
    max_body_bytes: int = 16 * 1024 * 1024
    max_queued_tokens: int = DEFAULT_MAX_QUEUED_TOKENS
    idle_prefill: bool = True
    stream_interval: float = 0.025
    options: ModelOptions = field(default_factory=ModelOptions)

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key.strip():
                raise MidfillError("an API key is empty; leave it out to serve without keys")
            if key != key.strip() or not key.isprintable():
                raise MidfillError(
                    "an API key begins or ends with a space, or holds a character that can't be"
                    " printed; no client could send it"
                )
