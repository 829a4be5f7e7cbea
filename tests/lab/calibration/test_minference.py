"""MInference's search: its settings, its texts, and which patterns it chooses."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_tiny

from midfill.errors import InvalidRequestError
from midfill.methods.sparse_prefill.minference import (
    CANDIDATES,
    Pattern,
    Shape,
    pattern_mask,
)
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.forward.attention import SpanLists
from midfill.runners.torch.part_attention import TorchProbe
from midfill_lab.calibration.minference import SIZES, KnownLayer, PatternSearch, choose, pairs_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(
        "llama", tmp_path_factory.mktemp("tiny") / "long", max_position_embeddings=2048
    )


@pytest.mark.parametrize(
    ("settings", "error"), [({"tokens": 100}, "tokens"), ({"texts": 0}, "texts"),
                            ({"budget": 0.0}, "budget")]
)  # fmt: skip
def test_settings_out_of_range_are_named(settings: dict[str, float], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        PatternSearch(**settings)  # type: ignore[arg-type]


def test_a_text_of_pairs_asks_for_one_of_them(folder: Path) -> None:
    tokenizer = open_checkpoint(folder).tokenizer
    tokens = pairs_text(tokenizer, 900, [0, 1])
    assert len(tokens) == 900
    np.testing.assert_array_equal(tokens, pairs_text(tokenizer, 900, [0, 1]))
    assert (tokens != pairs_text(tokenizer, 900, [0, 2])).any()
    text = tokenizer.decode(tokens.tolist())
    asked = text.rsplit('# The value of "', 1)[1].split('"')[0]
    assert f'"{asked}": "' in text


def test_the_search_takes_what_holds_most_attention_within_the_budget() -> None:
    sizes = len(SIZES)
    cost = np.linspace(0.05, 0.5, sizes) * np.ones((1, 2, len(CANDIDATES), 1))
    mass = np.linspace(0.1, 0.9, sizes) * np.ones_like(cost)
    mass[0, 0, 4] += 0.05
    mass[0, 1, 7] += 0.05
    found = choose({"mass": mass, "cost": cost}, 0.2)
    assert found["pattern"].tolist() == [[4, 7]]
    assert (found["cost"] <= 0.2).all()
    place = SIZES.index(found["size"][0, 0])
    assert cost[0, 0, 4, place] == found["cost"][0, 0]
    assert cost[0, 0, 4, place + 1] > 0.2
    assert found["mass"][0, 0] == pytest.approx(mass[0, 0, 4, place])


def planted_heads(rows: int) -> TorchProbe:
    """A head with a window, one with far columns, and one whose blocks look at one block each."""
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(rows, 64)).astype(np.float32)
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    place = np.arange(rows)
    topics = rng.normal(size=(rows // 64, 64)).astype(np.float32)
    topics /= np.linalg.norm(topics, axis=1, keepdims=True)
    by_block = topics[place // 64]
    column = codes[rng.integers(0, rows // 2, 12)]
    targets = [codes[np.maximum(place - 3, 0)], column[place % 12]]
    targets.append(topics[rng.permutation(rows // 64)[place // 64] % (place // 64 + 1)])
    keys = np.stack((codes, codes, by_block), axis=1)
    queries = 30 * np.stack(targets, axis=1)
    return TorchProbe(0, torch.from_numpy(queries), torch.from_numpy(keys), 1.0)


def test_the_search_holds_more_attention_than_any_one_pattern_for_all_heads() -> None:
    known = KnownLayer.of(planted_heads(1024))
    shape = (1, 3, len(CANDIDATES), len(SIZES))
    tables = {"mass": np.zeros(shape), "cost": np.zeros(shape)}
    for number, candidate in enumerate(CANDIDATES):
        for place, size in enumerate(SIZES):
            sized = Pattern(candidate.shape, size * candidate.columns, size * candidate.diagonals)
            mass, cost = known.evaluate(pattern_mask(known, (sized,) * 3))
            tables["mass"][0, :, number, place], tables["cost"][0, :, number, place] = mass, cost
    found = choose(tables, 0.2)
    shapes = [CANDIDATES[int(number)].shape for number in found["pattern"][0]]
    assert shapes[2] is Shape.BLOCKS
    assert Shape.VERTICAL_SLASH in shapes
    for number in range(len(CANDIDATES)):
        alone = {name: table[:, :, number : number + 1] for name, table in tables.items()}
        assert found["mass"].mean() > choose(alone, 0.2)["mass"].mean() + 0.1


def test_what_the_search_knows_of_a_layer_is_what_a_probe_shows() -> None:
    first, rows = 128, 200
    rng = np.random.default_rng(0)
    queries = rng.normal(size=(rows, 4, 16)).astype(np.float32)
    keys = rng.normal(size=(first + rows, 2, 16)).astype(np.float32)
    probe = TorchProbe(0, torch.from_numpy(queries), torch.from_numpy(keys), 0.25)
    known = KnownLayer.of(probe)
    patterns = tuple(Pattern(shape, 0.2, 0.3) for shape in (*Shape, Shape.A))
    mask = pattern_mask(probe, patterns)
    np.testing.assert_array_equal(pattern_mask(known, patterns), mask)
    mass, cost = known.evaluate(mask)
    weights = probe.scores(rows).softmax(dim=-1).numpy()
    listed = SpanLists.from_mask(mask).mask(rows, first + rows)
    np.testing.assert_allclose(mass, (weights * listed).sum(axis=(1, 2)) / rows, rtol=1e-4)
    assert (cost > 0).all()
    everything = known.evaluate(np.ones_like(mask))[0]
    np.testing.assert_allclose(everything, 1, rtol=1e-4)
