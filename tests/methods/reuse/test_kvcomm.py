"""KVCOMM: what its formulas give, when a prompt is assembled, and what of."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import msgspec
import numpy as np
import pytest
from naive_blend import NaiveBlend
from tiny_checkpoints import VOCAB

from benchmarks.reuse_nulls import reuse_nulls
from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.registry import resolve_method
from midfill.methods.reuse.anchors import Anchor, AnchorStore, PieceKV
from midfill.methods.reuse.kvcomm import AssembledSequence, KVComm, entropy
from midfill.methods.reuse.sequence import ReuseKind
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.rope import layer_frequencies, shift_keys
from serving import Answer, build_engine, next_logits, preempting_every, request, same, serve

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)
ALWAYS = KVComm(gamma=1.0)
NEVER = KVComm(gamma=0.0)


# --- formulas


def made_piece(tokens: int, seed: int, scale: float = 1.0) -> PieceKV:
    drawn = np.random.default_rng(seed).standard_normal((2, 3, 2, tokens, 4)) * scale
    return PieceKV(*drawn.astype(np.float32))


def made_anchor(tokens: int, seed: int, after: int = 3) -> Anchor:
    pieces = made_piece(tokens, seed), made_piece(tokens, seed + 50)
    return Anchor(b"%d" % seed, *pieces, made_piece(after, seed + 90))


def shares(distances: list[float]) -> list[float]:
    exponents = [np.exp(-distance) for distance in distances]
    return [float(each / sum(exponents)) for each in exponents]


def naive_content(x: PieceKV, anchors: list[Anchor], temperature: float = 1.0) -> PieceKV:
    found = PieceKV(x.keys.copy(), x.values.copy())
    for part in (0, 1):
        for token in range(x.tokens):
            distances = [
                float(np.mean(np.abs(x[part][:, :, token] - a.content[part][:, :, token])))
                for a in anchors
            ]
            weights = shares([each / temperature for each in distances])
            assert sum(weights) == pytest.approx(1.0)
            for weight, a in zip(weights, anchors, strict=True):
                found[part][1:, :, token] += weight * a.offset[part][1:, :, token]
    return found


def naive_segment(
    segment: PieceKV, x: PieceKV, anchors: list[Anchor], temperature: float = 1.0
) -> PieceKV:
    found = PieceKV(segment.keys.copy(), segment.values.copy())
    for part in (0, 1):
        layers, heads, _, width = x[part].shape
        for layer in range(1, layers):
            for head, channel in np.ndindex(heads, width):
                own = x[part][layer, head, :, channel]
                distances = [
                    float(
                        np.linalg.norm(own - a.content[part][layer, head, :, channel][-len(own) :])
                    )
                    for a in anchors
                ]
                weights = shares([each / temperature for each in distances])
                for weight, a in zip(weights, anchors, strict=True):
                    assert a.after is not None
                    found[part][layer, head, :, channel] += (
                        weight * a.after[part][layer, head, :, channel]
                    )
    return found


def test_estimates_are_those_of_a_loop() -> None:
    x, segment = made_piece(5, 1), made_piece(3, 2)
    anchors = [made_anchor(5 + seed, seed) for seed in range(3)]
    method = KVComm(temperature=0.7)
    found = method.estimate_content(x, anchors), method.estimate_segment(segment, x, anchors)
    expected = naive_content(x, anchors, 0.7), naive_segment(segment, x, anchors, 0.7)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.keys, other.keys, atol=1e-5)
        np.testing.assert_allclose(one.values, other.values, atol=1e-5)
    assert (found[0].keys[0] == x.keys[0]).all(), "the first layer needs no offset"
    assert (found[1].values[0] == segment.values[0]).all()


def test_weights_sum_to_one_over_anchors() -> None:
    x, bases = made_piece(5, 1), [made_piece(7, seed).keys for seed in range(4)]
    assert ALWAYS.content_weights(x.keys, bases).sum(axis=0) == pytest.approx(np.ones(5))
    weights = ALWAYS.segment_weights(x.keys, bases)
    assert weights.shape == (4, 3, 2, 4)
    assert weights.sum(axis=0) == pytest.approx(np.ones((3, 2, 4)))


@pytest.mark.parametrize("distance", ["norm", "rms"])
def test_nearness_is_that_of_the_paper(distance: str) -> None:
    x, bases = made_piece(4, 1, 0.1), [made_piece(6, seed, 0.1) for seed in range(3)]
    norms = [float(np.linalg.norm(x.values - base.values[:, :, :4])) for base in bases]
    if distance == "rms":
        norms = [norm / x.values.size**0.5 for norm in norms]
    method = KVComm(distance=distance)
    assert method.nearness(x, bases) == pytest.approx(np.array(shares(norms)))


def test_equal_anchors_are_no_reason_to_assemble_and_a_near_one_is() -> None:
    method, x = KVComm(), made_piece(4, 1)
    far = [made_piece(4, 2)] * 5
    assert entropy(method.nearness(x, far)) == pytest.approx(np.log2(5))
    assert not method.may_assemble(method.nearness(x, far))
    near = PieceKV(x.keys, x.values + np.float32(0.01))
    assert method.may_assemble(method.nearness(x, [*far, near]))
    assert entropy(np.array([1.0, 0.0])) == 0.0
    assert not NEVER.may_assemble(np.array([0.9, 0.1]))


# --- in the engine


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=900, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5, VOCAB), k=length)


CONTENTS = {name: text(20, seed) for seed, name in enumerate("ABCDEFGH")}
CONTENTS |= {"l": text(33, 20), "t": [9], "-": []}
CONTENTS |= {"a": [6, *CONTENTS["A"][1:]], "b": [*CONTENTS["B"][:9], 7, *CONTENTS["B"][10:]]}
LAST = text(6, 91)


@dataclass(frozen=True)
class Told:
    """A prompt: the fixed tokens of agent 0, 1, ..., and a content after each but the last."""

    contents: str
    agent: int = 0

    @property
    def pieces(self) -> list[list[int]]:
        found = [[1, *text(11, 30 + self.agent)]]
        for number, name in enumerate(self.contents):
            found += [CONTENTS[name], text(8, 40 + 10 * number + self.agent)]
        return found

    @property
    def tokens(self) -> list[int]:
        return [*chain(*self.pieces), *LAST]

    @property
    def bounds(self) -> tuple[int, ...]:
        return tuple(np.cumsum([len(piece) for piece in self.pieces]).tolist())

    def asked(self, name: str = "r", method: str = "comm", **fields: object) -> EngineRequest:
        return request(name, self.tokens, PARAMS, method=method, contexts=self.bounds, **fields)


def engine_of(runner: CpuRunner, method: KVComm = ALWAYS, **options: object) -> Engine:
    return build_engine(runner, methods={"comm": method, "none": None}, **options)


def ask(engine: Engine, prompt: Told, method: str = "comm", **fields: object) -> Answer:
    return serve(engine, [prompt.asked(method=method, **fields)])["r", 0]


def exact(runner: CpuRunner, prompt: Told) -> Answer:
    return ask(engine_of(runner), prompt, "none")


def kind_of(engine: Engine) -> ReuseKind:
    return next(kind for kind in engine._methods._kinds if isinstance(kind, ReuseKind))


def store_of(engine: Engine, method: KVComm = ALWAYS) -> AnchorStore:
    return kind_of(engine).state_of(method.kept, lambda: AnchorStore(method.memory << 20))


def pools_of(engine: Engine) -> list[list[int]]:
    """Return how many anchors each content of each template has."""
    templates = store_of(engine)._templates.values()
    return [[len(pool.anchors) for pool in template.pools] for template in templates]


def with_anchors(runner: CpuRunner, method: KVComm = ALWAYS, **options: object) -> Engine:
    """Return an engine that has computed two prompts, and has nothing of them in its cache."""
    first, engine = (engine_of(runner, method, **options) for _ in range(2))
    for contents in ("AB", "CD"):
        ask(first, Told(contents))
    kind_of(engine)._states = kind_of(first)._states
    return engine


def reused(engine: Engine, prompt: Told, **fields: object) -> int:
    before = engine.stats().reused_tokens
    ask(engine, prompt, **fields)
    return engine.stats().reused_tokens - before


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[int, PieceKV]:
    """What is written of assembled prompts: keys as they lie in the cells, by number of the first
    token of each piece."""
    found: dict[int, PieceKV] = {}
    write = AssembledSequence._write

    def spy(
        self: AssembledSequence, slots: np.ndarray, start: int, piece: PieceKV, computed: int
    ) -> None:
        write(self, slots, start, piece, computed)
        own = slots[start : start + piece.tokens]
        again = self._read(own, start)  # rotated on, and back
        np.testing.assert_allclose(again.keys, piece.keys, atol=1e-5)
        assert (again.values == piece.values).all()
        layers = range(self.shared.runner.config.layers)
        kv = [self.read_kv(own, layer) for layer in layers]
        found[start] = PieceKV(
            np.stack([each.keys for each in kv]), np.stack([each.values for each in kv])
        )

    monkeypatch.setattr(AssembledSequence, "_write", spy)
    return found


def dense(runner: CpuRunner, tokens: list[int]) -> PieceKV:
    """Return a prompt's KV: [layers, tokens, kv_heads, head_dim]."""
    next_logits(runner, tokens)
    slots, naive = np.arange(len(tokens)), NaiveBlend(runner, 0)
    kv = [naive.kv(slots, layer) for layer in range(runner.config.layers)]
    return PieceKV(np.stack([each.keys for each in kv]), np.stack([each.values for each in kv]))


def test_without_two_anchors_prompts_are_computed_bit_for_bit(runner: CpuRunner) -> None:
    engine = engine_of(runner)
    for contents in ("AB", "CD"):
        assert same(ask(engine, Told(contents)), exact(runner, Told(contents)))
    assert engine.stats().reused_tokens == 0
    assert pools_of(engine) == [[2, 2]]


def test_a_prompt_like_its_anchor_is_that_of_a_dense_prefill(
    runner: CpuRunner, written: dict[int, PieceKV]
) -> None:
    engine = with_anchors(runner, KVComm(gamma=1.0, temperature=1e-6))
    prompt = Told("AB")
    answer = ask(engine, prompt)
    assert engine.stats().reused_tokens == 2 * (20 + 8)
    assert sorted(written) == list(prompt.bounds[:-1])
    expected = exact(runner, prompt)
    assert answer.tokens == expected.tokens
    for one, other in zip(answer.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    whole = dense(runner, prompt.tokens)
    for start, piece in written.items():
        end = start + piece.keys.shape[1]
        np.testing.assert_allclose(piece.keys, whole.keys[:, start:end], atol=1e-4)
        np.testing.assert_allclose(piece.values, whole.values[:, start:end], atol=1e-4)


def test_the_first_layer_is_that_of_a_dense_prefill_whatever_the_content(
    runner: CpuRunner, written: dict[int, PieceKV]
) -> None:
    engine, prompt = with_anchors(runner), Told("EF")
    ask(engine, prompt)
    whole = dense(runner, prompt.tokens)
    assert written
    for start, piece in written.items():
        end = start + piece.keys.shape[1]
        np.testing.assert_allclose(piece.keys[0], whole.keys[0, start:end], atol=1e-4)
        np.testing.assert_allclose(piece.values[0], whole.values[0, start:end], atol=1e-4)
        assert np.abs(piece.values[1:] - whole.values[1:, start:end]).max() > 1e-3


def unturned(runner: CpuRunner, kv: PieceKV, start: int, end: int) -> PieceKV:
    """Return a part of ``dense`` with keys as at position 0, in the order of ``PieceKV``."""
    keys = kv.keys[:, start:end]
    frequencies = layer_frequencies(runner.config)
    turned = np.empty_like(keys)
    for layer, token, head in np.ndindex(keys.shape[:3]):
        back, number = np.array([-(start + token)], np.int32), np.array([layer], np.int32)
        turned[layer, token, head] = shift_keys(
            keys[layer, token, head][None], back, frequencies, number
        )[0]
    return PieceKV(turned.swapaxes(1, 2), kv.values[:, start:end].swapaxes(1, 2).copy())


def naive_alone(runner: CpuRunner, content: list[int]) -> PieceKV:
    kv = dense(runner, [1, *content])
    return unturned(runner, kv, 1, 1 + len(content))


def naive_bases(runner: CpuRunner, prompt: Told) -> list[PieceKV]:
    """Return the base KV of the segments after f_0."""
    fixed = prompt.pieces[::2]
    kv = dense(runner, [*chain(*fixed)])
    ends = np.cumsum([len(each) for each in fixed]).tolist()
    return [unturned(runner, kv, *span) for span in pairwise(ends)]


def naive_anchors(runner: CpuRunner, prompt: Told) -> list[Anchor]:
    """Return what each content of a prompt leaves."""
    whole, bases, found = dense(runner, prompt.tokens), naive_bases(runner, prompt), []
    for number, name in enumerate(prompt.contents):
        start, middle, end = prompt.bounds[2 * number : 2 * number + 3]
        alone = naive_alone(runner, CONTENTS[name])
        offset = unturned(runner, whole, start, middle).minus(alone)
        after = unturned(runner, whole, middle, end).minus(bases[number])
        found.append(Anchor(name.encode(), alone, offset, after))
    return found


def test_the_answer_begins_as_a_naive_assembly_does(
    runner: CpuRunner, written: dict[int, PieceKV]
) -> None:
    engine, prompt = with_anchors(runner), Told("EF")
    ask(engine, prompt)
    earlier = [naive_anchors(runner, Told(contents)) for contents in ("AB", "CD")]
    bases = naive_bases(runner, prompt)
    frequencies = layer_frequencies(runner.config)
    for number, name in enumerate(prompt.contents):
        anchors = [each[number] for each in earlier]
        alone = naive_alone(runner, CONTENTS[name])
        pieces = naive_content(alone, anchors), naive_segment(bases[number], alone, anchors)
        for start, piece in zip(prompt.bounds[2 * number :], pieces, strict=False):
            found = written[start]
            expected = piece.values.swapaxes(1, 2)
            np.testing.assert_allclose(found.values, expected, atol=1e-4)
            for layer, token in np.ndindex(found.keys.shape[:2]):
                on = np.full(piece.keys.shape[1], start + token, np.int32)
                layers = np.full(len(on), layer, np.int32)
                turned = shift_keys(piece.keys[layer, :, token], on, frequencies, layers)
                np.testing.assert_allclose(found.keys[layer, token], turned, atol=1e-4)


def test_as_many_rows_run_as_there_are_new_contents_and_last_tokens(runner: CpuRunner) -> None:
    engine = with_anchors(runner)
    for prompt, apart, first in ((Told("EF"), 2 * 21, 12), (Told("EG"), 21, 0)):
        before = engine.stats()
        ask(engine, prompt)
        after = engine.stats()
        rows = after.computed_tokens - before.computed_tokens
        assert rows == first + apart + len(LAST) + PARAMS.max_tokens - 1
        assert after.reused_tokens - before.reused_tokens == 56


def test_the_same_content_twice_is_computed_alone_once(runner: CpuRunner) -> None:
    engine = with_anchors(runner)
    before = engine.stats().computed_tokens
    assert reused(engine, Told("EE")) == 56
    rows = engine.stats().computed_tokens - before
    assert rows == 12 + 21 + len(LAST) + PARAMS.max_tokens - 1


@pytest.mark.parametrize("contents", ["lE", "El", "-E", "E-", "--"])
def test_contents_that_are_too_long_or_empty_are_computed(runner: CpuRunner, contents: str) -> None:
    engine = with_anchors(runner)
    assert same(ask(engine, Told(contents)), exact(runner, Told(contents)))
    assert engine.stats().reused_tokens == 0


def test_contents_of_one_token_are_assembled(runner: CpuRunner) -> None:
    assert reused(with_anchors(runner), Told("tE")) == 1 + 20 + 16


def test_a_new_agent_has_no_anchors(runner: CpuRunner) -> None:
    engine = with_anchors(runner)
    for contents in ("AB", "EF"):
        other = Told(contents, agent=1)
        assert same(ask(engine, other), exact(runner, other))
    assert engine.stats().reused_tokens == 0
    assert pools_of(engine) == [[2, 2], [2, 2]]


def test_contents_that_no_anchor_is_near_become_anchors(runner: CpuRunner) -> None:
    engine = with_anchors(runner, NEVER)
    assert same(ask(engine, Told("EF")), exact(runner, Told("EF")))
    assert pools_of(engine) == [[3, 3]]


def test_near_duplicates_are_assembled_by_three_agents(runner: CpuRunner) -> None:
    """Of each agent's prompts the first two are computed, and no third one of the like."""
    engine = engine_of(runner)
    for contents in ("AB", "CD"):
        for agent in range(3):
            assert reused(engine, Told(contents, agent)) == 0
    for agent in range(3):
        assert reused(engine, Told("ab", agent)) == 56


def test_assembled_kv_is_found_by_no_request_that_expects_exact_kv(runner: CpuRunner) -> None:
    engine = with_anchors(runner)
    assert reused(engine, Told("EF")) == 56
    assert same(ask(engine, Told("EF"), "none"), exact(runner, Told("EF")))


def test_an_exact_prompt_that_is_cached_is_used(runner: CpuRunner) -> None:
    engine = with_anchors(runner)
    ask(engine, Told("EF"), "none")
    assert same(ask(engine, Told("EF")), exact(runner, Told("EF")))
    assert engine.stats().reused_tokens == 0


def test_what_is_cached_of_a_prompt_stays(runner: CpuRunner) -> None:
    engine = with_anchors(runner)
    ask(engine, Told("EG"), "none")
    assert reused(engine, Told("EH")) == 28, "the second content and what comes after it"


def test_another_tenant_has_no_anchors(runner: CpuRunner) -> None:
    engine = with_anchors(runner)
    assert same(ask(engine, Told("EF"), tenant="bob"), exact(runner, Told("EF")))
    assert engine.stats().reused_tokens == 0


def test_prompts_without_contents_are_served_as_ever(runner: CpuRunner) -> None:
    engine, prompt = with_anchors(runner), Told("EF")
    plain = request("r", prompt.tokens, PARAMS, method="comm")
    assert same(serve(engine, [plain])["r", 0], exact(runner, prompt))


@pytest.mark.parametrize("budget", [5, 64])
def test_chunks_and_other_requests_change_no_bit(runner: CpuRunner, budget: int) -> None:
    engines = [engine_of(runner, token_budget=size) for size in (512, budget)]
    for engine in engines:
        for contents in ("AB", "CD"):
            ask(engine, Told(contents))
    alone = ask(engines[0], Told("EF"))
    others = [request(f"o{seed}", [1, *text(20 * seed, 50 + seed)], PARAMS) for seed in range(3)]
    found = serve(engines[1], others, arrivals={2: [Told("EF").asked()]})
    assert same(found["r", 0], alone)
    assert engines[1].stats().reused_tokens == 56


def test_concurrent_requests_leave_each_content_once(runner: CpuRunner) -> None:
    engine = engine_of(runner, NEVER, token_budget=24)
    prompts = [Told(contents).asked(contents) for contents in ("AB", "AD", "CB")]
    found = serve(engine, prompts)
    for contents in ("AB", "AD", "CB"):
        assert same(found[contents, 0], exact(runner, Told(contents)))
    assert pools_of(engine) == [[2, 2]]


def test_nulls_take_other_offsets_of_the_same_anchors() -> None:
    x = made_piece(5, 1)
    made = [made_anchor(5, seed) for seed in range(3)]
    settings = "kvcomm:gamma=1"
    nulls = {
        name.removeprefix(settings): each for name, (_, each) in reuse_nulls([settings]).items()
    }
    expected = {
        " no offsets": x.keys,
        " mean of anchors": x.keys + np.mean([each.offset.keys for each in made], axis=0),
    }
    for name, null in nulls.items():
        assert isinstance(null, KVComm)
        assert null.kept == ALWAYS.kept
        found = null.estimate_content(x, made).keys
        if name in expected:
            np.testing.assert_allclose(found[1:], expected[name][1:], atol=1e-5)
        else:
            each = [np.abs(found - x.keys - one.offset.keys)[1:].max() for one in made]
            assert min(each) < 1e-5
    assert len(nulls) == 3


def test_answers_to_one_prompt_share_its_kv(runner: CpuRunner) -> None:
    engine = with_anchors(runner)
    prompt, sampling = Told("EF"), msgspec.structs.replace(PARAMS, n=2)
    several = request("r", prompt.tokens, sampling, method="comm", contexts=prompt.bounds)
    found = serve(engine, [several])
    assert found["r", 0].tokens == found["r", 1].tokens
    assert engine.stats().reused_tokens == 56


@pytest.mark.parametrize("steps", [2, 5])
def test_preempted_and_cancelled_requests_leave_no_slot_behind(
    runner: CpuRunner, steps: int
) -> None:
    engine = with_anchors(runner, token_budget=16)
    prompts = [Told("EF").asked("r"), Told("GH").asked("s"), Told("lA").asked("t")]
    found = serve(engine, prompts, after_step=preempting_every(steps), cancellations={4: "s"})
    assert len(found["r", 0].tokens) == PARAMS.max_tokens


@pytest.mark.parametrize("step", range(1, 7))
def test_a_request_that_is_cancelled_at_any_step_leaves_no_anchor_and_no_slot(
    runner: CpuRunner, step: int
) -> None:
    engine = engine_of(runner, token_budget=16)
    serve(engine, [Told("AB").asked()], cancellations={step: "r"})
    assert all(counts == [0, 0] for counts in pools_of(engine))


def test_memory_is_bounded(runner: CpuRunner) -> None:
    method = KVComm(gamma=0.0, memory=1)
    engine = engine_of(runner, method)
    for first in "ABCDEFGH":
        for agent in range(4):
            ask(engine, Told(first + "lA"[agent % 2], agent))
            assert 0 < store_of(engine, method).nbytes <= 1 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("gamma=1.5", "gamma must be from 0 to 1, not 1.5"),
        ("gamma=nan", "gamma must be from 0 to 1, not nan"),
        ("anchors=1", "anchors must be at least 2, not 1"),
        ("distance=max", "distance must be norm or rms, not 'max'"),
        ("temperature=0", "temperature must be above 0, not 0"),
        ("memory=0", "memory must be at least 1 MiB, not 0"),
    ],
)
def test_bad_options_are_one_clear_line(options: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_method(f"kvcomm:{options}")
