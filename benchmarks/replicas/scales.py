"""``cluster-simulation``: 10 to 1,000 replicas, simulated with measured costs."""

import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from benchmarks.replicas.placement import moved
from benchmarks.replicas.population import Step, population
from benchmarks.replicas.simulation import Simulation, SimulationResult, StepCosts
from midfill.config import RouterName
from midfill.engine.routing import DEFAULT_SLOTS
from midfill.frontend.sampling import SamplingParams
from midfill.infill.window import WindowRule
from midfill.lab.bench.edits import layouts
from midfill.lab.bench.edits.cost import PieceTokenizer, PromptEncoder
from midfill.lab.bench.edits.measure import mixed_session
from midfill.llm import LLM
from midfill.system.machine import Machine, describe_machine
from midfill.system.reporting.result_table import ResultTable

_FEW_SLOTS = 8  # for comparison
_ROUTINGS: tuple[tuple[RouterName, int], ...] = (
    ("document", DEFAULT_SLOTS),
    ("document", _FEW_SLOTS),
    ("round-robin", DEFAULT_SLOTS),
)
_PROMPT = 1024  # tokens, to measure prefill
_DECODED = 48  # tokens, to measure decoding
_BATCH = 8  # answers that decode together
_MOVED_DOCUMENTS = 30_000  # whose first choices are compared
_WINDOW = WindowRule(6000, 1500)


class ScaleOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate.

    Attributes:
        replicas: numbers of them.
        users_per_replica: how many users there are for each.
        requests: of each user.
        warm_up: how many of these are not counted.
        utilisation: share of the time in which replicas are to work; sets how long users think.
        cache_tokens: that a replica's cache holds.
        output_tokens: of each answer.
        samples: requests of the editing mix that prompts are drawn from.
        seed: of all random choices.
    """

    replicas: tuple[int, ...] = (10, 100, 1000)
    users_per_replica: int = 100
    requests: int = 12
    warm_up: int = 2
    utilisation: float = 0.5
    cache_tokens: int = 300_000
    output_tokens: int = 16
    samples: int = 400
    seed: int = 0


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the documents that go elsewhere when a replica is added, or lost."""

    added: float
    lost: float


class ScalesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call simulated.

    Attributes:
        costs: what was measured first.
        think_seconds: mean pause of a user.
        prompt_tokens, new_tokens: means of the requests that prompts were drawn from.
        results: by number of replicas and router, in order.
        moves: by number of replicas.
    """

    model: str
    machine: Machine
    options: ScaleOptions
    costs: StepCosts
    think_seconds: float
    prompt_tokens: float
    new_tokens: float
    results: list[SimulationResult]
    moves: dict[int, Moves]


def simulate_scales(
    model: str, options: ScaleOptions, progress: Callable[[str], None] = lambda _: None
) -> ScalesReport:
    """Measure an engine's costs, count a session's prompts, and simulate."""
    progress("measuring an engine")
    costs = measure_costs(model)
    progress("counting an editing session")
    samples = edit_samples(options.samples, options.seed)
    results: list[SimulationResult] = []
    moves: dict[int, Moves] = {}
    thinks: list[float] = []
    for replicas in options.replicas:
        users = replicas * options.users_per_replica
        progress(f"{replicas} replicas, {users} users")
        sessions = population(users, options.requests, samples, seed=options.seed)
        thinks.append(_think_seconds(sessions, costs, options))
        for router, slots in _ROUTINGS:
            progress(f"{replicas} replicas, {users} users, {router}")
            simulation = Simulation(
                sessions,
                costs,
                replicas=replicas,
                router=router,
                capacity=options.cache_tokens,
                output_tokens=options.output_tokens,
                think_seconds=thinks[-1],
                warm_up=options.warm_up,
                slots=slots,
            )
            results.append(simulation.run())
        documents = min(3 * users, _MOVED_DOCUMENTS)
        now = range(replicas)
        moves[replicas] = Moves(
            added=moved(now, range(replicas + 1), documents),
            lost=moved(now, range(replicas - 1), documents),
        )
    return ScalesReport(
        model=model,
        machine=describe_machine(),
        options=options,
        costs=costs,
        think_seconds=sum(thinks) / len(thinks),
        prompt_tokens=sum(prompt for prompt, _ in samples) / len(samples),
        new_tokens=sum(new for _, new in samples) / len(samples),
        results=results,
        moves=moves,
    )


def _think_seconds(
    sessions: Sequence[Sequence[Step]], costs: StepCosts, options: ScaleOptions
) -> float:
    """Return the pause by which replicas work as long as they should, if nothing is evicted."""
    counted = [step.new for steps in sessions for step in steps[options.warm_up :]]
    prefill = sum(counted) / len(counted) * costs.prefill_seconds
    decode = options.output_tokens * costs.decode_seconds * costs.decode_weight
    return options.users_per_replica * (prefill + decode) / options.utilisation


def measure_costs(model: str) -> StepCosts:
    """Load a model on one thread, and measure prefill and decoding, alone and together."""
    with LLM(model, threads=1, speculation=False) as llm:
        ids = [index % 1000 + 20 for index in range(_PROMPT)]
        greedy = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        llm.generate([ids[:64]], greedy)  # whatever is slow at first
        prompts = itertools.count()
        # Each prompt begins otherwise, so that nothing of it is cached.
        prefill = _seconds(lambda: llm.generate([[next(prompts) + 20, *ids]], greedy)) / _PROMPT
        longer = msgspec.structs.replace(greedy, max_tokens=_DECODED)

        def decode(count: int) -> float:
            batch = [[30 + number, 40] for number in range(count)]
            return _seconds(lambda: llm.generate(batch, longer)) / _DECODED

        one, many = decode(1), decode(_BATCH)
    return StepCosts(
        prefill_seconds=prefill,
        decode_seconds=one,
        decode_weight=min(1.0, many / (_BATCH * one)),
    )


def edit_samples(count: int, seed: int) -> list[tuple[int, int]]:
    """Return prompts of the editing mix: their tokens, and how many of them are new."""
    rounds = mixed_session("mix", count, seed)
    tokenize = PieceTokenizer()
    encode = PromptEncoder(tokenize)
    prompts = layouts.plan(rounds, tokenize, _WINDOW).prompts
    computed = layouts.count(rounds, prompts, encode)
    lengths = [len(encode(segments)) for segments in prompts]
    seen = set[str]()
    samples = []
    for one, length, new in zip(rounds, lengths, computed, strict=True):
        if one.document in seen:  # the first of each is new as a whole
            samples.append((length, new))
        seen.add(one.document)
    return samples


def scales_table(report: ScalesReport) -> ResultTable:
    """A row per number of replicas and router."""
    rows = []
    for result in report.results:
        moves = report.moves[result.replicas]
        routed = result.router == "document"
        routing = f"document, {result.slots} slots" if routed else result.router
        rows.append(
            {
                "replicas": f"{result.replicas:,}",
                "users": f"{result.users:,}",
                "routing": routing,
                "hit rate": f"{result.hit_rate:.1%}",
                "first token ms, p50": f"{1000 * result.first_p50:.0f}",
                "p95": f"{1000 * result.first_p95:.0f}",
                "busy": f"{result.utilisation:.0%}",
                "busiest / mean": f"{result.imbalance:.2f}",
                "spilled": f"{result.spilled:.2%}" if routed else "-",
                "moved: added": f"{moves.added:.2%}" if routed else "-",
                "moved: lost": f"{moves.lost:.2%}" if routed else "-",
            }
        )
    options, costs = report.options, report.costs
    return ResultTable(
        rows=rows,
        labels=3,
        title="Simulated replicas",
        caption=f"{options.requests} requests per user, the first {options.warm_up} not counted,"
        f" prompts of the editing mix (mean {report.prompt_tokens:.0f} tokens,"
        f" {report.new_tokens:.0f} of them new), one in a hundred about a new document,"
        f" {options.output_tokens} tokens out, users think {report.think_seconds:.1f} s on average,"
        f" {options.cache_tokens:,} tokens of cache per replica. Costs of {report.model} on one"
        f" thread, measured: {1000 * costs.prefill_seconds:.2f} ms per prompt token,"
        f" {1000 * costs.decode_seconds:.1f} ms per token decoded alone, weight"
        f" {costs.decode_weight:.2f} beside others. Moved: documents whose replica changes when one"
        f" is added or lost. On {report.machine}.",
    )


def _seconds(work: Callable[[], Sequence[object]]) -> float:
    """Return the shortest of three runs."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
