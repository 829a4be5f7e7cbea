"""A kind of method that the engine has never heard of: it drops, scales and lists keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from naive_attention import uniform_ragged_index
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.request import EngineSamplingParams
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.errors import InvalidRequestError
from midfill.kv.compressed_prefix import CompressedPrefix
from midfill.kv.pool import KVPool
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.methods.kinds import MethodKinds
from midfill.methods.method import ModelSpecific
from midfill.methods.registry import resolve_method
from midfill.methods.sequence_method import (
    PlainLengths,
    Prefill,
    RequestFacts,
    SequenceMethod,
    SequenceRows,
    SequenceView,
)
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan, KeyPart, LayerProbe, SpanLists
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from serving import preempting_every, request, serve, torch_runner

CHUNK, FIRST, HEATED = 8, 4, 3
"""Rows of a chunk attend to it and to the FIRST tokens; of every other token, which stay, the first
HEATED have a temperature and a scale."""
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
PROMPT = np.random.default_rng(3).integers(10, VOCAB, 29).tolist()


class Lister:
    def plan(self, probe: LayerProbe) -> SpanLists:
        listed = np.zeros((1, probe.query_heads, probe.first + probe.rows), bool)
        listed[..., :FIRST] = listed[..., probe.first :] = True
        return SpanLists.from_mask(listed)

    def record(self, layer: int, pairs: np.ndarray) -> None:
        assert (pairs > 0).all()


@dataclass(frozen=True)
class Toy:
    temperature: float = 0.8
    scale: float = 0.9


def heated(toy: Toy, cells: RaggedIndex, others: RaggedIndex) -> AttentionPlan:
    nothing = np.zeros(0, np.int32)
    part = KeyPart(nothing, cells, temperature=toy.temperature, scale=toy.scale)
    return AttentionPlan(others, parts=(part,))


class ToySequence(SequenceMethod):
    name = title = "toy"

    def __init__(self, toy: Toy, runner: Runner, pool: KVPool) -> None:
        self._toy, self._runner, self._pool = toy, runner, pool

    @property
    def is_private(self) -> bool:
        return True

    def reusable(self, sequence: SequenceView, limit: int) -> int:
        return 0

    def prefill(self, sequence: SequenceView) -> Prefill:
        return "chunks"

    def barrier(self, sequence: SequenceView) -> int | None:
        end = sequence.computed // CHUNK * CHUNK + CHUNK
        return (
            min(end, sequence.prompt_length) if sequence.computed < sequence.prompt_length else None
        )

    def atomic_tokens(self, computed: int) -> int:
        return min(CHUNK, len(PROMPT) - computed) if computed < len(PROMPT) else 0

    def arrange(
        self, sequence: SequenceView, first: int, end: int, rows: SequenceRows
    ) -> SequenceRows:
        assert sequence.kv is not None
        prefix = sequence.kv.prefix
        if prefix is None:
            return rows._replace(plan=AttentionPlan(lister=Lister()))
        inside = prefix.numbers < 2 * HEATED
        cells, others = prefix.index.take(inside), prefix.index.take(~inside)
        return rows._replace(plan=heated(self._toy, cells, others))

    def decide(self, sequence: SequenceView) -> bool:
        kv, config = sequence.kv, self._runner.config
        if kv is None or kv.prefix is not None or sequence.computed != sequence.prompt_length:
            return True
        numbers = np.arange(0, sequence.prompt_length, 2, dtype=np.int32)
        heads, total = config.layers * config.kv_heads, self._runner.slots
        kept = self._runner.cells.take(cells_of_slots(kv.slots[numbers], heads, total).reshape(-1))
        slots = kv.exchange(len(numbers))
        index = uniform_ragged_index(slots, heads, total)
        self._runner.cells.put(index.cells, kept)
        every = np.tile(numbers, heads)
        kv.prefix = CompressedPrefix(
            sequence.computed, index, slots, self._pool.slots, numbers=every
        )
        return True


class ToyKind(PlainLengths):
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.pool: KVPool

    def attach(
        self, name: str, method: object, request: RequestFacts, sequence: SequenceView
    ) -> SequenceMethod | None:
        return ToySequence(method, self._runner, self.pool) if isinstance(method, Toy) else None


def engine(runner: Runner, budget: int = 64) -> Engine:
    kind = ToyKind(runner)
    built = Engine(
        runner, (), EngineOptions(), policy=SarathiServe(budget, 16), kinds=(kind,),
        find_method={"toy": Toy(), "none": None}.__getitem__,  # type: ignore[dict-item]
    )  # fmt: skip
    kind.pool = built._queues.pool
    return built


@pytest.fixture(scope="module", params=["cpu", "torch"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("t") / "llama"))
    if request.param == "torch":
        yield torch_runner(checkpoint, slots=300)
        return
    runner = CpuRunner.load(checkpoint, slots=300, threads=2, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def by_hand(runner: Runner, toy: Toy, count: int) -> list[int]:
    """The greedy answer without an engine; token i is in slot i and stays there."""
    tokens, config = list(PROMPT), runner.config

    def run(first: int, end: int, slots: np.ndarray, plan: AttentionPlan) -> int:
        rows = np.arange(first, end, dtype=np.int32)
        ends = [np.array([0, len(array)], np.int32) for array in (rows, slots)]
        batch = ForwardBatch(
            np.array(tokens, np.int32)[rows], rows, rows, ends[0], ends[1],
            slots.astype(np.int32), rows[-1:] - first, attention=(plan,),
        )  # fmt: skip
        return int(runner.forward(batch)[0].argmax())

    for first in range(0, len(PROMPT), CHUNK):
        end = min(first + CHUNK, len(PROMPT))
        following = run(first, end, np.arange(end), AttentionPlan(lister=Lister()))
    heads = config.layers * config.kv_heads
    kept = np.arange(0, len(PROMPT), 2, dtype=np.int32)
    inside, outside = (
        uniform_ragged_index(part, heads, runner.slots) for part in (kept[:HEATED], kept[HEATED:])
    )
    for _ in range(count):
        tokens.append(following)
        first = len(tokens) - 1
        later = np.arange(len(PROMPT), len(tokens))
        following = run(first, first + 1, later, heated(toy, inside, outside))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("budget", [3, 64])
def test_its_answers_are_those_computed_by_hand(runner: Runner, budget: int) -> None:
    found = serve(engine(runner, budget), [request("r", PROMPT, PARAMS, method="toy")])["r", 0]
    assert found.tokens == by_hand(runner, Toy(), PARAMS.max_tokens)


def test_requests_beside_it_keep_their_bits_and_so_does_it(runner: Runner) -> None:
    plain = request("plain", PROMPT[::-1], PARAMS, method="none")
    toy = request("toy", PROMPT, PARAMS, method="toy")
    alone = {
        one.request_id: serve(engine(runner), [one])[one.request_id, 0] for one in (plain, toy)
    }
    both = serve(engine(runner), [plain, toy], after_step=preempting_every(11))
    for name, expected in alone.items():
        assert both[name, 0].tokens == expected.tokens


@pytest.mark.parametrize(
    ("variant", "reason"),
    [("deepseek2", "latent attention"), ("gemma3n", "layers share their KV")],
    ids=["keys are values", "shared KV"],
)
def test_methods_are_refused_where_kv_is_of_another_kind(
    variant: str, reason: str, tmp_path: Path
) -> None:
    runner = torch_runner(open_checkpoint(write_variant(variant, tmp_path)), slots=64)
    kinds = MethodKinds(runner, KVPool(64))
    kinds.check(None)
    method = resolve_method("snapkv")
    assert method is not None
    assert not isinstance(method, ModelSpecific)
    with pytest.raises(InvalidRequestError, match=f"not possible with .*{reason}") as caught:
        kinds.check(method)
    assert "\n" not in str(caught.value)
