"""The mixture of experts on the CPU: what a plain one in NumPy gives, and always the same bits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from ggml_blocks import random_matrix
from mxfp4_checkpoints import as_ggml, random_blocks

from midfill.kernels.cpu.experts.table import MAX_MIXED_ROWS
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.config import Experts, ModelConfig, tensor_shapes
from midfill.runners.cpu.packed_model import pack_model
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from midfill.stored_tensor import StoredTensor

HIDDEN, SLOTS = 256, 20
EXPERTS = Experts(count=10, per_token=3, ffn=256, normalised=True)

MIXTURES = {
    "as in Qwen3": EXPERTS,
    "weights as they are": replace(EXPERTS, normalised=False),
    "with a shared expert": replace(EXPERTS, normalised=False, shared_ffn=96),
    "all experts for each token": replace(EXPERTS, per_token=10),
    "one expert": Experts(count=1, per_token=1, ffn=32, normalised=False),
    "more experts than a panel": Experts(count=33, per_token=5, ffn=64, normalised=True),
    "the shared expert's row in a panel of its own": Experts(32, 4, 32, True, shared_ffn=32),
    "a shared expert without a gate": replace(EXPERTS, shared_ffn=96, shared_gated=False),
    "as in DeepSeek-V2": Experts(
        12,
        3,
        32,
        False,
        shared_ffn=64,
        shared_gated=False,
        groups=4,
        groups_per_token=2,
        weight_factor=2.5,
    ),
    "as in DeepSeek-V3": Experts(
        32,
        4,
        32,
        True,
        shared_ffn=64,
        shared_gated=False,
        scoring="sigmoid",
        corrected=True,
        groups=4,
        groups_per_token=2,
        weight_factor=1.5,
    ),
    "sigmoids as they are": replace(EXPERTS, normalised=False, scoring="sigmoid"),
    "as in gpt-oss": replace(EXPERTS, router_bias=True),
}


@dataclass
class MadeModel:
    """One layer whose attention adds nothing; implements ``weight_packing.TensorSource``.

    Attributes:
        experts: its mixture.
        kind: how its experts are stored. With a bias of the router, all matrices have one, and
            experts are gpt-oss's.
        router: of the experts; None is random.
    """

    experts: Experts
    kind: str = "f32"
    router: np.ndarray | None = None
    path: Path = field(default_factory=Path)

    def __post_init__(self) -> None:
        self.config = ModelConfig(
            "qwen3moe", layers=1, hidden=HIDDEN, query_heads=2, kv_heads=1, head_dim=32, ffn=0,
            vocab=32, context=2048, experts=self.experts, mlp_bias=self.experts.router_bias,
            activation="swiglu_oai" if self.experts.router_bias else "silu", swiglu_limit=1.2,
        )  # fmt: skip
        self.tensor, self.exact = cache(self._tensor), cache(self._exact)

    def names(self) -> list[str]:
        return list(tensor_shapes(self.config))

    def _tensor(self, name: str) -> StoredTensor:
        shape = tensor_shapes(self.config)[name]
        random = np.random.default_rng(sum(name.encode()))
        module = name.split(".")[-2]
        if name == "layers.0.o.weight":
            values = np.zeros(shape, np.float32)
        elif name == "layers.0.router.weight" and self.router is not None:
            values = self.router.astype(np.float32)
        elif name.endswith("correction_bias"):
            values = random.uniform(-0.3, 0.3, shape).astype(np.float32)
        elif name.endswith("bias"):
            values = random.uniform(-0.5, 0.5, shape).astype(np.float32)
        elif len(shape) == 1:
            values = random.uniform(0.5, 1.5, shape).astype(np.float32)
        elif self.kind != "f32" and module in ("gate", "up", "down") and shape[1] % 256 == 0:
            return replace(self._quantised(*shape), name=name)
        else:
            values = (random.standard_normal(shape) * 1.5 * shape[1] ** -0.5).astype(np.float32)
        return StoredTensor(name, shape, "f32", values)

    def _quantised(self, outputs: int, inputs: int) -> StoredTensor:
        if self.kind != "mxfp4":
            return random_matrix(self.kind, outputs, inputs, size=1.5 * inputs**-0.5)
        blocks = as_ggml(random_blocks(outputs, inputs))
        return StoredTensor("w", (outputs, inputs), "mxfp4", blocks)

    def _exact(self, name: str, leaf: str = "weight") -> np.ndarray:
        """A tensor of the layer in float64."""
        return self.tensor(f"layers.0.{name}.{leaf}").to_float32().astype(np.float64)

    def apply(self, name: str, x: np.ndarray) -> np.ndarray:
        """A matrix times a row, plus its bias if it has one."""
        bias = self.exact(name, "bias") if self.experts.router_bias else 0.0
        product: np.ndarray = self.exact(name) @ x + bias
        return product

    def open(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """The activation of gate times up."""
        if not self.experts.router_bias:
            return gate / (1 + np.exp(-gate)) * up
        limit = self.config.swiglu_limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def route(model: MadeModel, scores: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The factor of each expert, and those that a row is sent to, the likeliest first."""
    experts = model.experts
    if experts.scoring == "sigmoid":
        shares = 1 / (1 + np.exp(-scores))
    else:
        shares = np.exp(scores) / np.exp(scores).sum()
    preferred = shares.copy()
    if experts.corrected:
        correction = model.tensor("layers.0.router.e_score_correction_bias").to_float32()
        preferred += correction.astype(np.float64)
    groups = np.arange(experts.count) // (experts.count // experts.groups)
    held = [np.sort(preferred[groups == g])[::-1] for g in range(experts.groups)]
    worth = np.array([each[: 2 if experts.corrected else 1].sum() for each in held])
    allowed = np.argsort(-worth, kind="stable")[: experts.groups_per_token]
    preferred[~np.isin(groups, allowed)] = -np.inf
    chosen = np.argsort(-preferred, kind="stable")[: experts.per_token].tolist()
    if experts.normalised:
        shares = shares / shares[chosen].sum()
    return shares * experts.weight_factor, chosen


def naive(model: MadeModel, hidden: np.ndarray) -> np.ndarray:
    """hidden + the mixture of norm(hidden), row by row in float64."""
    experts, results = model.experts, []
    for row in hidden.astype(np.float64):
        x = row / np.sqrt(np.mean(row * row) + model.config.norm_epsilon) * model.exact("mlp_norm")

        def mlp(prefix: str, x: np.ndarray = x) -> np.ndarray:
            gate, up = model.apply(f"{prefix}.gate", x), model.apply(f"{prefix}.up", x)
            return model.apply(f"{prefix}.down", model.open(gate, up))

        shares, chosen = route(model, model.apply("router", x))
        mixed = sum(shares[e] * mlp(f"experts.{e}") for e in chosen)
        if experts.shared_ffn and experts.shared_gated:
            score = (model.exact("shared_router") @ x).item()
            mixed = mixed + mlp("shared") / (1 + np.exp(-score))
        elif experts.shared_ffn:
            mixed = mixed + mlp("shared")
        results.append(row + mixed)
    return np.array(results)


Mix = Callable[[np.ndarray], np.ndarray]


@pytest.fixture
def mixes() -> Iterator[Callable[..., Mix]]:
    """Makes functions that run a model's layer over hidden rows, on a runner of their own."""
    runners: list[CpuRunner] = []

    def make(model: MadeModel, threads: int = 2) -> Mix:
        packed = pack_model(model)
        runner = CpuRunner(model.config, packed, KVCacheDtype.F32, slots=SLOTS, threads=threads)
        runners.append(runner)

        def mix(hidden: np.ndarray) -> np.ndarray:
            # All rows are the first tokens of requests, whose attention adds nothing; many share
            # a slot, since more slots would have tiles measured.
            rows, zeros = np.array(hidden, np.float32), np.zeros(len(hidden), np.int32)
            ends = np.arange(len(rows) + 1, dtype=np.int32)
            slots = ends[:-1] % SLOTS
            batch = ForwardBatch(zeros, zeros, slots, ends, ends, slots, zeros[:0])
            return runner.run_layers(batch, rows, 0, 1)

        return mix

    yield make
    for runner in runners:
        runner.close()


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("experts", MIXTURES.values(), ids=MIXTURES)
def test_it_is_the_mixture_of_a_plain_one(experts: Experts, mixes: Callable[..., Mix]) -> None:
    model, hidden = MadeModel(experts), rows(70)
    np.testing.assert_allclose(mixes(model)(hidden), naive(model, hidden), atol=1e-4)


@pytest.mark.parametrize("kind", ["q4_0", "q4_k", "q6_k", "q8_0", "mxfp4"])
def test_quantised_experts_are_those_of_their_exact_weights(
    kind: str, mixes: Callable[..., Mix]
) -> None:
    model, hidden = MadeModel(EXPERTS, kind), rows(70)
    mixed, expected = mixes(model)(hidden) - hidden, naive(model, hidden) - hidden
    # What is left is the rounding of activations to int8; the router's are exact.
    errors = np.linalg.norm(mixed - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < 0.03


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("f32", replace(EXPERTS, shared_ffn=64)),
        ("q4_k", replace(EXPERTS, shared_ffn=64)),
        ("mxfp4", replace(EXPERTS, router_bias=True)),
    ],
)
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    kind: str, experts: Experts, mixes: Callable[..., Mix]
) -> None:
    model, hidden = MadeModel(experts, kind), rows(MAX_MIXED_ROWS + 90)
    alone, together = mixes(model, threads=1), mixes(model, threads=2)
    expected = together(hidden)
    np.testing.assert_array_equal(alone(hidden), expected)
    for first, end in ((0, 1), (3, 5), (7, 57), (510, 515), (40, 400)):
        np.testing.assert_array_equal(together(hidden[first:end]), expected[first:end])
        np.testing.assert_array_equal(alone(hidden[first:end]), expected[first:end])
    order = np.random.default_rng(1).permutation(len(hidden))
    np.testing.assert_array_equal(together(hidden[order]), expected[order])


def test_the_first_of_equal_experts_are_chosen(mixes: Callable[..., Mix]) -> None:
    model, hidden = MadeModel(EXPERTS, router=np.zeros((10, HIDDEN))), rows(6)
    np.testing.assert_allclose(mixes(model)(hidden), naive(model, hidden), atol=1e-4)
    # That the reference chose those, too, is seen by the others not mattering.
    for expert in range(EXPERTS.per_token, EXPERTS.count):
        model.tensor(f"layers.0.experts.{expert}.down.weight").data[:] = np.nan
    np.testing.assert_allclose(mixes(model)(hidden), naive(model, hidden), atol=1e-4)


def test_all_rows_go_to_the_same_experts_and_others_have_none(mixes: Callable[..., Mix]) -> None:
    router = np.zeros((10, HIDDEN))
    router[[9, 4, 6], 0] = 3.0, 2.0, 1.0
    model, hidden = MadeModel(EXPERTS, router=router), rows(130)
    hidden[:, 0] = 5.0
    np.testing.assert_allclose(mixes(model)(hidden), naive(model, hidden), atol=1e-4)


def test_a_row_that_is_no_number_leaves_the_others_alone(mixes: Callable[..., Mix]) -> None:
    mix, hidden = mixes(MadeModel(EXPERTS)), rows(9)
    expected = mix(hidden)
    hidden[4] = np.nan
    hidden[7, 3] = np.inf
    got = mix(hidden)
    others = [0, 1, 2, 3, 5, 6, 8]
    np.testing.assert_array_equal(got[others], expected[others])
    assert not np.isfinite(got[[4, 7]]).any()
