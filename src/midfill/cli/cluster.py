"""``midfill cluster``: replicas on Ray."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from midfill.cli.option_groups import FlagsOf, with_option_groups
from midfill.cli.options import AdapterOption, ModelArgument
from midfill.config import ModelOptions
from midfill.serving.options import RouterName, ServeOptions
from midfill.version import __version__

if TYPE_CHECKING:
    from midfill.serving.cluster.deployment import Overview
    from midfill.serving.cluster.spec import EnginesSpec, ModelSpec

app = typer.Typer(
    help="Replicas of the server on a Ray cluster: one address, each document's KV in one place.",
    no_args_is_help=True,
)

AddressOption = Annotated[
    str | None,
    typer.Option(
        envvar="RAY_ADDRESS",
        metavar="HOST:PORT",
        help="A Ray cluster that runs already; by default midfill's own on this machine.",
    ),
]
ReplicasOption = Annotated[
    int, typer.Option(min=1, help="How many replicas; the least, with --max-replicas.")
]
MaxReplicasOption = Annotated[
    int,
    typer.Option(
        min=0, help="Start up to this many while requests queue, and end them again; 0: never."
    ),
]
TargetRequestsOption = Annotated[
    float,
    typer.Option(min=0.1, help="Requests in progress per replica that --max-replicas aims at."),
]
CpusOption = Annotated[
    float | None,
    typer.Option(
        "--cpus-per-replica",
        min=0,
        help="Cores that each replica reserves and computes on; by default this machine's, shared.",
    ),
]
GpusOption = Annotated[
    float, typer.Option("--gpus-per-replica", min=0, help="GPUs that each replica reserves.")
]
RouterOption = Annotated[
    RouterName,
    typer.Option(
        help="Which replica a request goes to: the one with its document's KV, or each in turn.",
    ),
]
MoveKvOption = Annotated[
    bool,
    typer.Option(
        help="Fetch a document's KV from the replica that had it, where computing takes longer."
    ),
]
ImageOption = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Container image with midfill and Ray, see the Containerfile."
    ),
]
NameOption = Annotated[str, typer.Option(metavar="NAME", help="The RayService's name.")]
NamespaceOption = Annotated[str | None, typer.Option(metavar="NAME", help="Where it belongs.")]
MemoryOption = Annotated[
    str, typer.Option(metavar="QUANTITY", help="Memory of each replica's pod, such as 8Gi.")
]
KeySecretOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A Secret whose key 'api-keys' is a file as 'midfill keys' writes it.",
    ),
]
CacheClaimOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A PersistentVolumeClaim that all pods share, for models and compiled kernels.",
    ),
]
RayVersionOption = Annotated[
    str | None, typer.Option(metavar="VERSION", help="Ray's in the image; by default this one's.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON for programs.")]

# What a replica takes as ``midfill serve`` does; the fields of ModelSpec have the same names.
_NAMES = ("served_name", "aliases")
_PROMPTS = ("fim_tokens", "window", "snippets", "idle_prefill", "logs")
_ACCESS = ("api_keys", "api_key_file", "allowed_hosts")
_LOADING = ("backend", "weights", "context", "kv_memory", "kv_cache_dtype")
_STEPS = ("token_budget", "scheduler", "speculation")
_METHODS = ("method", "allow_methods", "reuse", "sentence_encoder")


@dataclass(frozen=True)
class ReplicaFlags:
    """How many replicas there are, and what each reserves."""

    replicas: ReplicasOption = 2
    max_replicas: MaxReplicasOption = 0
    target_requests: TargetRequestsOption = 4.0
    cpus_per_replica: CpusOption = None
    gpus_per_replica: GpusOption = 0.0

    def check(self) -> None:
        """Check that there can be so many.

        Raises:
            typer.BadParameter: the most are less than the least.
        """
        if 0 < self.max_replicas < self.replicas:
            raise typer.BadParameter(
                f"--max-replicas {self.max_replicas} is less than {self.replicas}"
            )

    def engines(
        self, model: "ModelSpec", cpus: float, router: RouterName = "document"
    ) -> "EnginesSpec":
        """Return the engines of a model; ``cpus`` is what each reserves if it isn't named."""
        from midfill.serving.cluster.spec import EnginesSpec

        return EnginesSpec(
            model=model,
            replicas=self.replicas,
            max_replicas=self.max_replicas,
            target_requests=self.target_requests,
            cpus=self.cpus_per_replica or cpus,
            gpus=self.gpus_per_replica,
            router=router,
        )


@app.command()
@with_option_groups
def up(
    *,
    model: ModelArgument = None,
    size: ReplicaFlags,
    router: RouterOption = "document",
    move_kv: MoveKvOption = True,
    address: AddressOption = None,
    listen: Annotated[dict[str, Any], FlagsOf(ServeOptions, "host", "port")],
    access: Annotated[dict[str, Any], FlagsOf(ServeOptions, *_ACCESS)],
    adapter: AdapterOption = None,
    served: Annotated[dict[str, Any], FlagsOf(ServeOptions, *_NAMES, *_PROMPTS)],
    engine: Annotated[dict[str, Any], FlagsOf(ModelOptions, *_LOADING, *_STEPS, *_METHODS)],
) -> None:
    """Start replicas; if some run already, change their model, number or options."""
    from midfill.cli.progress import show_steps
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.serving.cluster.spec import FrontSpec, ModelSpec, require_ray
    from midfill.system.machine import available_threads

    size.check()
    require_ray()
    from midfill.serving.cluster.command import start

    spec = ModelSpec(
        model=_absolute(model or DEFAULT_MODEL),
        adapter=None if adapter is None else _absolute(adapter),
        options=ModelOptions(**engine),
        **served,
    )
    most = max(size.replicas, size.max_replicas)
    engines = size.engines(spec, max(1.0, available_threads() // most), router)
    key_file = access["api_key_file"]
    front = FrontSpec(
        api_keys=access["api_keys"],
        api_key_file=None if key_file is None else str(key_file.resolve()),
        logs=spec.logs,
        move_kv=move_kv,
        own_hosts=access["allowed_hosts"],
    )
    with show_steps("connecting") as report:
        shown = start(engines, front, address, listen["host"], listen["port"], report)
    typer.echo(describe(shown))


@app.command()
def status(address: AddressOption = None, as_json: JsonOption = False) -> None:
    """Show the replicas: documents, requests, and how much of the prompts was cached."""
    from midfill.serving.cluster.spec import require_ray

    require_ray()
    from midfill.serving.cluster.command import look

    shown = look(address)
    typer.echo(json.dumps(as_plain(shown), indent=2) if as_json else describe(shown))


@app.command()
def down(address: AddressOption = None) -> None:
    """End the replicas once their requests have ended, and the cluster if midfill started it."""
    from midfill.cli.progress import show_steps
    from midfill.serving.cluster.spec import require_ray

    require_ray()
    from midfill.serving.cluster.command import stop

    with show_steps("connecting") as report:
        what = stop(address, report)
    typer.echo(what)


@app.command()
@with_option_groups
def manifest(
    *,
    model: ModelArgument = None,
    image: ImageOption = f"midfill-cluster:{__version__}",
    name: NameOption = "midfill",
    namespace: NamespaceOption = None,
    size: ReplicaFlags,
    memory: MemoryOption = "8Gi",
    key_secret: KeySecretOption = None,
    cache_claim: CacheClaimOption = None,
    ray_version: RayVersionOption = None,
    served: Annotated[dict[str, Any], FlagsOf(ServeOptions, *_NAMES)],
    adapter: AdapterOption = None,
    engine: Annotated[dict[str, Any], FlagsOf(ModelOptions, *_LOADING)],
) -> None:
    """Write a RayService for KubeRay, to be applied with kubectl."""
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.serving.cluster.manifest import ManifestOptions, ray_service, to_yaml
    from midfill.serving.cluster.spec import FrontSpec, ModelSpec, installed_ray

    size.check()
    spec = ModelSpec(
        model=model or DEFAULT_MODEL,
        adapter=adapter,
        options=ModelOptions(**engine),
        **served,
    )
    options = ManifestOptions(
        name=name,
        image=image,
        ray_version=ray_version or installed_ray(),
        memory=memory,
        namespace=namespace,
        key_secret=key_secret,
        cache_claim=cache_claim,
    )
    engines = size.engines(spec, cpus=4.0)
    typer.echo(to_yaml(ray_service(engines, FrontSpec(), options)), nl=False)


def describe(shown: "Overview") -> str:
    """Return a cluster's state as text."""
    where = "" if shown.url is None else f" on {shown.url}"
    states = ", ".join(f"{count} {state.lower()}" for state, count in shown.states.items())
    lines = [
        f"midfill serves {shown.model}{where}",
        f"  replicas {states or 'none'}; generation {shown.generation},"
        f" {shown.resumed} requests resumed elsewhere, KV of {shown.moved} moved",
        "",
        f"  {'replica':<10} {'state':<10} {'documents':>9} {'running':>8} {'waiting':>8}"
        f" {'prompt tokens':>14} {'cached':>7}",
    ]
    for name, each in sorted(shown.replicas.items()):
        stats = each.stats
        lines.append(
            f"  {name:<10} {each.state:<10} {each.documents:>9} {stats.running:>8}"
            f" {stats.waiting:>8} {stats.prompt_tokens:>14} {each.hit_rate:>7.1%}"
        )
    return "\n".join(lines)


def as_plain(shown: "Overview") -> dict[str, object]:
    """Return a cluster's state as what JSON can hold."""
    plain: dict[str, Any] = msgspec.to_builtins(shown)
    for name, each in shown.replicas.items():
        plain["replicas"][name]["hit_rate"] = each.hit_rate
    return plain


def _absolute(name: str) -> str:
    """Return a path in full, since replicas run in other folders; any other name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name
