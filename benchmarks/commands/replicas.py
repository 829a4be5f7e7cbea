"""The commands ``replicas`` and ``cluster-simulation``."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption, OutputTokensOption
from midfill.cli.options import ModelArgument
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill.system.extras import require
from midfill.system.reporting.publish import publish

CountsOption = Annotated[str, typer.Option(help="Numbers of replicas, separated by commas.")]
UsersOption = Annotated[int, typer.Option(min=1, help="Users who work at once.")]
RoundsOption = Annotated[
    int, typer.Option(min=1, max=7, help="Requests per user of EFIM's rounds.")
]
EditsOption = Annotated[int, typer.Option(min=1, help="Requests per user of the editing mix.")]
CharactersOption = Annotated[int, typer.Option(min=200, help="Characters of a document.")]
FailoverOption = Annotated[bool, typer.Option(help="Kill one of two replicas as well.")]
MovesOption = Annotated[
    bool, typer.Option("--moves", help="Measure KV that follows documents to other replicas, only.")
]


def replicas(
    model: ModelArgument = None,
    counts: CountsOption = "1,2,4",
    users: UsersOption = 8,
    rounds: RoundsOption = 4,
    edits: EditsOption = 12,
    characters: CharactersOption = 3000,
    output_tokens: OutputTokensOption = 8,
    failover: FailoverOption = True,
    moves: MovesOption = False,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure replicas on Ray: hit rates by document and in turn, and what a lost one costs."""
    from midfill.serving.cluster.spec import require_ray

    require("bench replicas", ["httpx"], extra="bench")
    require_ray()
    from benchmarks.replicas.load import ReplicaLoad
    from benchmarks.replicas.measure import measure_replicas, replicas_table
    from benchmarks.replicas.moves import measure_moves, moves_table
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    load = ReplicaLoad(
        users=users,
        rounds=rounds,
        edits=edits,
        characters=characters,
        output_tokens=output_tokens,
    )
    if moves:
        with show_steps("starting") as progress:
            moved = measure_moves(model or DEFAULT_MODEL, load, progress)
        table = moves_table(moved)
        section = "kv-moves"
        publish(moved, table.drawn(), table.markdown(), section=section, json=json, docs=docs)
        return
    numbers = parse_counts(counts)
    with show_steps("starting") as progress:
        report = measure_replicas(
            model or DEFAULT_MODEL, load, numbers, failover=failover, progress=progress
        )
    table = replicas_table(report)
    publish(report, table.drawn(), table.markdown(), section="replicas", json=json, docs=docs)


ScalesOption = Annotated[str, typer.Option(help="Numbers of replicas, separated by commas.")]
PerReplicaOption = Annotated[int, typer.Option(min=1, help="Users for each replica.")]
RequestsOption = Annotated[int, typer.Option(min=6, help="Requests of each user.")]
UtilisationOption = Annotated[
    float,
    typer.Option(min=0.01, max=0.95, help="Share of the time in which replicas are to work."),
]
CacheTokensOption = Annotated[int, typer.Option(min=1, help="Tokens that a replica's cache holds.")]
AnswerTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]


def cluster_simulation(
    model: ModelArgument = None,
    counts: ScalesOption = "10,100,1000",
    users_per_replica: PerReplicaOption = 100,
    requests: RequestsOption = 12,
    utilisation: UtilisationOption = 0.5,
    cache_tokens: CacheTokensOption = 300_000,
    output_tokens: AnswerTokensOption = 16,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Simulate many replicas with one engine's measured costs: hit rate, load, moved documents."""
    from benchmarks.replicas.scales import ScaleOptions, scales_table, simulate_scales
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve

    options = ScaleOptions(
        replicas=parse_counts(counts),
        users_per_replica=users_per_replica,
        requests=requests,
        utilisation=utilisation,
        cache_tokens=cache_tokens,
        output_tokens=output_tokens,
    )
    name = model or DEFAULT_MODEL
    resolve(name)
    with show_steps("measuring an engine") as progress:
        report = simulate_scales(name, options, progress)
    table = scales_table(report)
    section = "cluster-simulation"
    publish(report, table.drawn(), table.markdown(), section=section, json=json, docs=docs)
