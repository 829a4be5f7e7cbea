"""MiKV and GEAR on the default model: KL from full KV beside nulls of as many bytes; -s shows it.

Texts are source files of installed libraries, whose next tokens are known. Differences are paired,
text by text.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
from default_model import DefaultModel

from midfill.arrays import Float32Array
from midfill.engine.request import EngineSamplingParams
from midfill.methods.evict.accumulated_attention import ObservationMemory
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.quantize.gear import Gear, low_rank
from midfill.methods.quantize.mikv import MiKV, MixedPrecision
from midfill.methods.registry import resolve_method
from midfill.models.config import ModelConfig
from midfill_lab.bench.methods.nulls import make_null
from midfill_lab.bench.methods.probes import names
from serving import build_engine, request, serve

pytestmark = [
    pytest.mark.slow, pytest.mark.quality, pytest.mark.real_model, pytest.mark.timeout(900),
]  # fmt: skip

TEXTS, TOKENS, ANSWER = 10, 512, 17
LONG, KNOWN = 1024, 512
STUDENT = 2.262
"""97.5% quantile of Student's distribution with ``TEXTS`` - 1 degrees of freedom."""


Asked = tuple[list[int], list[int]]
"""A text, and the known tokens after it."""


class Dropping(MiKV):
    """Drops the keys that aren't important: eviction by the same score."""

    def start(self, config: ModelConfig) -> "DroppedKeys":
        return DroppedKeys(super().start(config))

    def recall(self, tokens: np.ndarray, tenant: str) -> "tuple[int, DroppedKeys]":
        known, compressor = super().recall(tokens, tenant)
        return known, DroppedKeys(compressor)


@dataclass
class DroppedKeys:
    """One answer's, which is shorter than the interval."""

    inner: MixedPrecision

    def fork(self) -> "DroppedKeys":
        raise AssertionError("one answer per prompt")

    def observe(self, keys: SequenceKeys, queries: Float32Array) -> None:
        self.inner.observe(keys, queries)

    def select(self, keys: SequenceKeys, queries: Float32Array) -> Selection | None:
        selection = self.inner.select(keys, queries)
        return selection and replace(selection, quantized=None)


class Asking:
    """Asks the default model for known tokens.

    Attributes:
        code: beginnings of source files, with what follows them.
        needles: source files with a number hidden in them, a question, and the answer.
        long_code: longer beginnings, with more of what follows.
    """

    def __init__(self, model: DefaultModel, stack: ExitStack) -> None:
        self.model, haystacks = model, model.haystacks
        # Texts have a few tokens fewer than they are asked for.
        texts = [haystacks.hide(number, TOKENS + 64, []) for number in range(TEXTS)]
        self.code = [(text[:TOKENS], text[TOKENS : TOKENS + ANSWER]) for text in texts]
        texts = [haystacks.hide(number, LONG + KNOWN + 64, []) for number in range(100, 102)]
        self.long_code = [(text[:LONG], text[LONG : LONG + KNOWN]) for text in texts]
        encode = model.checkpoint.tokenizer.encode_continuation
        self.needles = []
        for number in range(TEXTS):
            rng = random.Random(number)
            (name,), code = names(1, rng), rng.randrange(100_000, 1_000_000)
            question = encode(f"\n# The pass code of the {name} is")
            needle = (number % 5 + 0.5) / 5, f"# The pass code of the {name} is {code}.\n"
            text = haystacks.hide(number, TOKENS - len(question), [needle])
            self.needles.append(([*text, *question], encode(f" {code}.\n")))
        self._methods: dict[str, Method | None] = {"": None}
        slots = 2 * TEXTS * TOKENS + 3000
        self._answers = stack.enter_context(model.forced_answers(slots, self._methods))
        self._memory = ObservationMemory()

    def make(self, specification: str, null: str = "") -> Method:
        """Return a method or one of its nulls, or MiKV that drops what isn't important."""
        method = resolve_method(specification)
        if null == "dropped":
            assert isinstance(method, MiKV)
            method = Dropping(**asdict(method))
        elif null:
            method = make_null(specification, null, self.model.served)
        elif isinstance(method, ModelSpecific):
            method = method.for_model(self.model.served)
        assert method is not None
        if isinstance(method, MiKV):
            # What they observe of a prompt is the same, and takes longer than all else.
            vars(method)["memory"] = self._memory
        return method

    def logprobs(self, method: Method, asked: Asked) -> np.ndarray:
        """Return the log probabilities [known tokens, vocab] of what follows a text."""
        self._methods["m"] = method
        return self._answers.logprobs("m", *asked)

    def show(self, specification: str, null: str = "", kind: str = "code") -> np.ndarray:
        """Return each text's mean divergence from full KV: [texts].

        Prints their mean with its 95% interval, and their median.
        """
        self._methods["m"] = self.make(specification, null)
        texts: list[Asked] = getattr(self, kind)
        found = np.array([self._answers.divergence("m", *asked) for asked in texts])
        shown = f"{found.mean():.4f} ±{radius(found):.4f}, median {np.median(found):.4f}"
        print(f"\n{kind:8} {specification:28} {null:18} {shown}", end="")
        return found


def radius(numbers: np.ndarray) -> float:
    """Return the half width of the 95% interval of a mean."""
    return float(STUDENT * numbers.std(ddof=1) / np.sqrt(len(numbers)))


def is_nearer(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether one is below the other, by the 95% interval of the mean of the ratios' logarithms.

    Divergences of some texts are a hundred times those of others.
    """
    ratios = np.log(other) - np.log(one)
    return bool(ratios.mean() > radius(ratios))


@pytest.fixture(scope="module")
def asking(default_model: DefaultModel) -> Iterator[Asking]:
    with ExitStack() as stack:
        yield Asking(default_model, stack)


def test_mikv_order(asking: Asking) -> None:
    """For the keys with least attention, and balanced; but uniform bits win."""
    coarse, mikv = asking.show("mikv:ratio=0,balance=0"), asking.show("mikv")
    for null in ("random split", "no balancer"):
        assert is_nearer(mikv, asking.show("mikv", null))
    assert is_nearer(mikv, coarse)
    assert is_nearer(asking.show("mikv:low=4"), mikv)
    assert is_nearer(asking.show("mikv", "uniform bits"), mikv), "as many bytes, 4 bits for all"


def test_mikv_keeps_what_eviction_loses(asking: Asking) -> None:
    """Of what is asked for later, on needles. What just follows in code doesn't need it."""
    dropped = asking.show("mikv", "dropped", "needles")
    coarse = asking.show("mikv:ratio=0,balance=0", kind="needles")
    mikv, finer = (asking.show(each, kind="needles") for each in ("mikv", "mikv:low=4"))
    assert is_nearer(coarse, dropped)
    assert is_nearer(mikv, coarse)
    assert is_nearer(finer, mikv)
    assert is_nearer(mikv, asking.show("mikv:ratio=0.35", "dropped", "needles")), "as many bytes"


def test_gear_nulls(asking: Asking) -> None:
    """Both corrections help, and know where; but their bytes are better spent on codes."""
    plain, low = asking.show("gear:bits=2,outliers=0,rank=0"), asking.show("gear:bits=2,outliers=0")
    sparse, gear = asking.show("gear:bits=2,rank=0"), asking.show("gear:bits=2")
    assert is_nearer(low, plain)
    assert is_nearer(sparse, plain)
    assert is_nearer(gear, sparse)
    # Ten texts are too few for this one's interval; it is apart with twenty.
    assert low.mean() < asking.show("gear:bits=2,outliers=0", "random directions").mean()
    assert is_nearer(gear, asking.show("gear:bits=2", "random outliers"))
    assert is_nearer(asking.show("gear:bits=2,outliers=0", "smaller groups"), low), (
        "KIVI's, as many bytes"
    )
    assert is_nearer(asking.show("gear:bits=2", "wider codes"), gear), "3 bits, in fewer bytes"


def test_gear_at_four_bits(asking: Asking) -> None:
    """The default loses half of what its backbone does."""
    gear, plain = asking.show("gear"), asking.show("gear:outliers=0,rank=0")
    assert gear.mean() < 0.7 * plain.mean()
    assert is_nearer(gear, plain)


def test_gear_on_real_keys_and_values(asking: Asking) -> None:
    """Each correction, and each rank, takes some of the error off; power iterations find it."""
    keys, values = asking.model.keys_and_values(asking.code[0][0][:256])

    def error(method: Gear) -> np.ndarray:
        lost = np.zeros(2)
        for layer in range(len(keys)):
            blocks = method.encode(keys[layer], values[layer], method.rank)
            decoded = zip(*(block.decode(keys.shape[-1]) for block in blocks), strict=True)
            for part, (found, exact) in enumerate(zip(decoded, (keys, values), strict=True)):
                lost[part] += np.square(np.stack(found) - exact[layer]).sum()
        norms: np.ndarray = np.sqrt(lost / [np.square(part).sum() for part in (keys, values)])
        return norms

    by_rank = [error(Gear(bits=2, rank=rank, outliers=0)) for rank in (0, 1, 2, 4, 8, 16)]
    sparse, both = error(Gear(bits=2, rank=0)), error(Gear(bits=2))
    print("\nrelative error of keys, values")
    for name, found in (("D", by_rank[0]), ("D + L", by_rank[3]), ("D + S", sparse), ("all", both)):
        print(f"{name:8} {found[0]:.4f} {found[1]:.4f}")
    assert (np.diff(by_rank, axis=0) < 0).all()
    assert (both < sparse).all()
    assert (sparse < by_rank[0]).all()
    plain = Gear(bits=2, rank=0, outliers=0)
    for layer in range(0, len(keys), 5):
        backbone = [block.decode(64) for block in plain.encode(keys[layer], values[layer], 0)]
        for exact, found in zip((keys, values), zip(*backbone, strict=True), strict=True):
            residual = exact[layer] - np.stack(found)
            coefficients, basis = low_rank(residual, 4)
            lost = np.linalg.norm(residual - coefficients @ basis)
            best = np.sqrt(np.square(np.linalg.svd(residual, compute_uv=False)[:, 4:]).sum())
            assert lost <= 1.05 * best


def test_gear_greedy(asking: Asking) -> None:
    """An answer leaves that of full KV later, on average, than without the low rank."""
    steps, methods = 24, {"": None}
    methods["low rank"] = asking.make("gear:bits=2,outliers=0,rank=4,later_rank=4,buffer=16")
    methods["without"] = asking.make("gear:bits=2,outliers=0,rank=0,later_rank=0,buffer=16")
    params = EngineSamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
    found: dict[str, list[int]] = {"low rank": [], "without": []}
    with asking.model.runner(TEXTS * TOKENS + 3000) as runner:
        engine = build_engine(runner, token_budget=8192, methods=methods)
        for text, _ in asking.code:
            answers = {
                name: serve(engine, [request("r", text, params, method=name)])["r", 0].tokens
                for name in methods
            }
            for name, left in found.items():
                pairs = zip(answers[""], answers[name], strict=True)
                left.append(next((at for at, (a, b) in enumerate(pairs) if a != b), steps))
    later, earlier = (np.array(found[name]) for name in ("low rank", "without"))
    print(f"\nanswers part at step {later.mean():.1f} with, {earlier.mean():.1f} without low rank")
    difference = later - earlier
    print(f"difference {difference.mean():.1f} ±{radius(difference):.1f}")
    assert later.mean() > earlier.mean()


def test_gear_perplexity(asking: Asking) -> None:
    """Of 512 known tokens after 1,024, blocks of the answer included."""
    losses = []
    for specification in ("gear:bits=2,outliers=0", "gear:bits=2,outliers=0,rank=0,later_rank=0"):
        method, found = asking.make(specification), []
        for text, known in asking.long_code:
            rows = asking.logprobs(method, (text, known))
            found.append(-rows[np.arange(KNOWN), known])
        losses.append(np.concatenate(found))
        print(f"\n{specification:40} perplexity {np.exp(losses[-1].mean()):.3f}", end="")
    difference = losses[1] - losses[0]
    assert difference.mean() > 1.96 * difference.std(ddof=1) / np.sqrt(len(difference))
