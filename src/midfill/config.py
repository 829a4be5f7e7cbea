"""Options: how a model is loaded and run; ``serving.options`` has those of servers.

An option is declared once, as an annotated field here: its ``Flag`` says how the command line takes
it and what it means (``cli.option_groups``). Options travel to where they are used in these
objects.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

Backend = Literal["auto", "cpu", "torch"]
WeightsOption = Literal["auto", "q4", "q8", "f32"]
ExpertOffload = Literal["auto", "on", "off"]
KVCacheDtypeName = Literal["auto", "f32", "f16", "bf16", "i8", "i4"]
"""What ``--kv-cache-dtype`` asks for: the value of a ``KVCacheDtype``, or "auto".

What "auto" means for a model, ``runners.cpu.runner.choose_kv_cache_dtype`` says.
"""
DEFAULT_SCHEDULER = "sarathi-serve+shortest-first"
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MAX_QUEUED_TOKENS = 262_144
DEFAULT_DOCUMENT_MEMORY = 256 * 2**20
DEFAULT_STEP_TIMEOUT = 120.0


Panel = Literal["Basics", "Memory", "Network", "Limits", "Advanced"]
"""A group of options in ``--help``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How the command line takes an option.

    Attributes:
        help: what it means.
        panel: its group in ``midfill serve --help``.
        name: the option; None takes the field's name, with hyphens.
        metavar: what stands for its value in the help.
        kind: how its value is written, see ``cli.option_groups.PARSERS``.
        min, max: bounds of its value.
        scale: what its value is multiplied by.
        written_default: its default as one writes it, where that is not the value.
        repeated: it may be given several times; the field is a tuple.
        envvar: environment variable that gives its value otherwise.
        former: former name of the option, for one release.
        missing: error for other options of its group without it.
    """

    help: str
    panel: Panel = "Basics"
    name: str | None = None
    metavar: str | None = None
    kind: str | None = None
    min: float | None = None
    max: float | None = None
    scale: float | None = None
    written_default: str | None = None
    repeated: bool = False
    envvar: str | None = None
    former: str | None = None
    missing: str | None = None


class FimTokens(NamedTuple):
    """The texts of a model's FIM sentinels, as a user or an adapter names them."""

    prefix: str
    suffix: str
    middle: str


class Workers(NamedTuple):
    """How many engine processes compute prompts, and how many answers; 0 of both: one does both."""

    prefill: Annotated[
        int,
        Flag(
            name="--prefill-workers",
            panel="Advanced",
            min=0,
            metavar="N",
            help="Engine processes that compute prompts, and their answers' first tokens; with"
            " --decode-workers. Each has --threads and --kv-memory of its own.",
        ),
    ] = 0
    decode: Annotated[
        int,
        Flag(
            name="--decode-workers",
            panel="Advanced",
            min=0,
            metavar="N",
            help="Engine processes that go on with the answers, so that prompts never slow them"
            " down; with --prefill-workers. Without both, one engine does everything.",
        ),
    ] = 0


class WarmTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where KV is kept that the engine's own memory has no room for, or that it could lose.

    Attributes:
        memory: bytes in host memory; 0 keeps none there. They outlive the engine process, not the
            server.
        disk: bytes on disk; 0 keeps none there.
        folder: where on disk; None takes one in the cache folder.
        memory_folder: where in memory; made by whoever starts the engine.
        scope: digest of what makes tenants' names unique, see ``kv.blob.bind_tenant``.
        codec: how KV is written: "none" as it was computed, "cachegen" smaller and not exact, see
            ``methods.codecs``.
    """

    memory: Annotated[
        int,
        Flag(
            name="--warm-tier-memory",
            panel="Memory",
            kind="size",
            metavar="SIZE",
            help="Host memory for KV that has no room in the KV pool, like 4GB. It outlives the"
            " engine process, not the server.",
        ),
    ] = 0
    disk: Annotated[
        int,
        Flag(
            name="--warm-tier-disk",
            panel="Memory",
            kind="size",
            metavar="SIZE",
            help="Disk space for KV, like 20GB: documents stay warm when the server is restarted.",
        ),
    ] = 0
    folder: Annotated[
        str | None,
        Flag(
            name="--warm-tier-folder",
            panel="Memory",
            kind="folder",
            metavar="FOLDER",
            help="Where --warm-tier-disk keeps its files; by default in midfill's cache folder.",
        ),
    ] = None
    memory_folder: str | None = None
    scope: str = ""
    codec: Annotated[
        str,
        Flag(
            name="--warm-tier-codec",
            panel="Memory",
            kind="codec",
            metavar="NAME[:OPTION=VALUE,...]",
            help="How the warm tier writes KV: none, as it was computed, or cachegen, less than a"
            " quarter as large, whose answers are not exact.",
        ),
    ] = "none"


_STEP_TOKENS = 128
_OFFLINE_STEP_TOKENS = 16


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded and run. Crosses the process boundary, so plain values only.

    Attributes:
        backend: "cpu" is midfill's compiled CPU kernels, "torch" is PyTorch on any device; "auto"
            takes PyTorch if it finds a CUDA GPU and the kernels otherwise.
        device: torch device such as "cuda:0", for the torch backend; None lets torch choose.
        weights: how the CPU kernels store the weights: "auto" as in the checkpoint,
            losslessly where possible; the others quantise (or dequantise) all of them.
        expert_offload: whether the CPU kernels leave a mixture's experts on disk, from where the
            system keeps in memory what is used most: "auto" where all weights exceed the free
            memory and the others don't.
        expert_memory: bytes of the torch backend's device for a mixture's experts, of which the
            others stay in the machine's memory; None puts all of them on the device.
        latent_parts: by how many processes the latents of the torch backend are kept, each a part
            of every latent; None: by one. Answers are not exact then, see ``methods.latents``.
        threads: CPU threads per step; None takes the cores this process may use.
        context: maximum tokens of a prompt and its answer; None takes the model's own.
        kv_memory: bytes for KV; None sizes it from free memory.
        memory_share: of the free memory, where ``kv_memory`` is None; others on the machine have
            the rest.
        kv_cache_dtype: how the CPU kernels store KV: "auto" is float32 with float32 weights,
            otherwise bfloat16 on chips that multiply it and float16 on others; with "bf16" queries
            and softmax weights are rounded, too; "i8" and "i4" have one scale per token and head.
        token_budget: maximum tokens per step; fewer where steps were measured to take long. None is
            as many as suit the device, see ``step_tokens``.
        offline_token_budget: the same where only rows of batches run, since a request that arrives
            meanwhile waits for the step's end; the tokens of answers may exceed it.
        scheduler: which tokens run in a step, and who is admitted next: the policies that
            ``engine.scheduling.registry`` finds by such a specification.
        max_running: maximum number of answers in progress; others wait.
        adapter: folder of the LoRA adapter that is merged into the model; None for none.
        speculation: verify drafts of an answer's next tokens, copied from its own text, where that
            saves more time than it costs. Answers are the same with and without.
        method: compresses the KV of every prompt whose request names no method, or takes it from
            elsewhere: "cake:budget=256", see ``methods.registry``.
        allow_methods: names of the methods that requests may choose; "any" allows all.
        reuse: takes KV of infilling prompts from elsewhere whose requests name no method: a
            specification, "off", or "auto" for what was measured of the model. Servers ask for it.
        sentence_encoder: folder of the model by which methods embed texts; None: they do without.
        warm_tier: where KV is kept that may be evicted or lost.
    """

    backend: Annotated[
        Backend, Flag(help="What runs the model: midfill's CPU kernels, or PyTorch on any device.")
    ] = "auto"
    device: Annotated[
        str | None, Flag(metavar="NAME", help="Device of the torch backend, such as cuda:1.")
    ] = None
    weights: Annotated[
        WeightsOption,
        Flag(
            panel="Memory",
            help="How the CPU kernels store weights: as in the file, in at most 4 or 8 bits,"
            " float32.",
        ),
    ] = "auto"
    expert_offload: Annotated[
        ExpertOffload,
        Flag(
            panel="Memory",
            help="Leave the experts of a mixture of experts on disk, of which the system keeps in"
            " memory what is used most; by default where the model exceeds the free memory.",
        ),
    ] = "auto"
    expert_memory: Annotated[
        int | None,
        Flag(
            panel="Memory",
            kind="size",
            metavar="SIZE",
            help="With --backend torch, the device's memory for experts of a mixture of experts;"
            " the others stay in the machine's memory, and are computed by its CPU or copied.",
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        Flag(help="On a GPU, run PyTorch's own operations instead of fused kernels and graphs."),
    ] = False
    latent_parts: Annotated[
        int | None,
        Flag(
            panel="Advanced",
            min=2,
            max=64,
            metavar="N",
            help="With --backend torch and latent attention (DeepSeek), processes that keep a part"
            " of each token's latent, on a GPU each if there are any. Prompts are exact, answers"
            " are not (TPLA); --kv-memory and --threads are those of each.",
        ),
    ] = None
    threads: Annotated[
        int | None,
        Flag(
            min=1,
            max=1024,
            help="CPU threads; by default all cores this process may use, fewer under a CPU quota."
            " Steps run on fewer of them while other processes keep cores busy.",
        ),
    ] = None
    context: Annotated[
        int | None, Flag(min=2, help="Maximum tokens of a prompt and its answer.")
    ] = None
    kv_memory: Annotated[
        int | None,
        Flag(
            panel="Memory",
            kind="size",
            metavar="SIZE",
            help="Memory for KV, like 2GB; by default sized from free memory.",
        ),
    ] = None
    memory_share: float = 1.0
    kv_cache_dtype: Annotated[
        KVCacheDtypeName,
        Flag(
            panel="Memory",
            help="How the CPU kernels store KV: float32, float16, bfloat16, 8-bit or 4-bit; with"
            " quantised weights by default bfloat16 on chips with AVX512-BF16, float16 on others."
            " With bfloat16 attention is rounded, too; these chips compute long prompts faster so.",
        ),
    ] = "auto"
    token_budget: Annotated[
        int | None,
        Flag(
            panel="Advanced",
            min=1,
            help="Maximum tokens per step; by default 128, and 2048 on a GPU. Lower: steadier"
            " streams; higher: faster prompts.",
        ),
    ] = None
    offline_token_budget: int | None = None
    scheduler: Annotated[
        str,
        Flag(
            panel="Advanced",
            kind="scheduler",
            metavar="NAME[:OPTION=VALUE,...]",
            help="What a step runs and who is admitted next: sarathi-serve, layered-prefill, or an"
            " order such as fcfs, priority or edf; see docs/scheduling.md. Answers are"
            " the same.",
        ),
    ] = DEFAULT_SCHEDULER
    max_running: int = 128
    adapter: Annotated[
        str | None,
        Flag(
            metavar="PATH|none",
            help="Folder of a LoRA adapter to merge into the model; by default the one that midfill"
            " ships for a model of this name.",
        ),
    ] = None
    speculation: Annotated[
        bool,
        Flag(
            panel="Advanced",
            help="Draft tokens that copy from the text and verify several per step; never changes"
            " an answer.",
        ),
    ] = True
    method: Annotated[
        str,
        Flag(
            panel="Advanced",
            kind="method",
            metavar="NAME[:OPTION=VALUE,...]",
            help="Compress the KV of every prompt, as in cake:budget=256, or take it from"
            " elsewhere, as in cacheblend:ratio=0.15; see 'midfill methods'.",
        ),
    ] = "none"
    allow_methods: Annotated[
        tuple[str, ...],
        Flag(
            name="--allow-method",
            panel="Advanced",
            kind="allowed_method",
            metavar="NAME",
            repeated=True,
            help="A method that requests may choose for their own prompt (midfill.method); may be"
            " repeated. 'none' lets them keep all KV, 'any' allows everything.",
        ),
    ] = ()
    reuse: Annotated[
        str,
        Flag(
            panel="Advanced",
            kind="reuse",
            metavar="auto|off|NAME[:OPTION=VALUE,...]",
            help="How infilling prompts take KV from elsewhere after a jump of the caret, as in"
            " cacheblend:ratio=0.4,order=caret: auto, as was measured for the model, and not where"
            " --method is given; off, never. The exact KV follows in idle time.",
        ),
    ] = "auto"
    sentence_encoder: Annotated[
        str | None,
        Flag(
            panel="Advanced",
            kind="folder",
            metavar="FOLDER",
            help="A sentence-transformers folder of a BERT model such as all-MiniLM-L6-v2, for"
            " methods that find topics in conversations.",
        ),
    ] = None
    warm_tier: WarmTierOptions = WarmTierOptions()

    @property
    def adapter_path(self) -> Path | None:
        """``adapter`` as a path."""
        return None if self.adapter is None else Path(self.adapter)

    @property
    def step_tokens(self) -> int:
        """Maximum tokens per step; without ``token_budget``, what suits a CPU."""
        return _STEP_TOKENS if self.token_budget is None else self.token_budget

    @property
    def offline_step_tokens(self) -> int:
        """The same of steps in which only rows of batches run."""
        given = self.offline_token_budget
        return _OFFLINE_STEP_TOKENS if given is None else given


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the server and its engine process log, and how. Crosses the process boundary.

    Attributes:
        format: "text" for people, "json" for programs: an object per line.
    """

    format: Annotated[
        LogFormat,
        Flag(
            name="--log-format",
            panel="Advanced",
            help="How to log on stderr: text for people, json for programs.",
        ),
    ] = "text"
    level: Annotated[
        LogLevel,
        Flag(
            name="--log-level",
            panel="Advanced",
            help="What is less urgent is not logged. Each finished request is info.",
        ),
    ] = "info"
    redact: Annotated[
        bool,
        Flag(
            name="--redact",
            panel="Advanced",
            help="Leave out of logs and traces whatever a client could have chosen: its request"
            " ids, unknown paths, messages of exceptions, what libraries log. Prompts, answers and"
            " keys are never logged.",
        ),
    ] = False
