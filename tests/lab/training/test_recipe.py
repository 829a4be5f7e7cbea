"""Recipes: read from TOML and checked; the learning rate schedule."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from midfill.errors import MidfillError
from midfill_lab.training.recipe import DataRecipe, TrainingRecipe, build


def test_a_recipe_is_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'method = "full"\nlearning_rate = 1\n\n[data]\nsuffixes = [".js", ".ts"]\n'
        "prefix_characters = [10, 20]\nfragments = false\n"
    )
    assert TrainingRecipe.from_toml(path) == TrainingRecipe(
        method="full",
        learning_rate=1.0,
        data=DataRecipe(suffixes=(".js", ".ts"), prefix_characters=(10, 20), fragments=False),
    )


def test_a_recipe_survives_json() -> None:
    recipe = TrainingRecipe(rank=3, data=DataRecipe(documents=7))
    assert TrainingRecipe.from_dict(json.loads(json.dumps(recipe.as_dict()))) == recipe


def test_old_names_of_settings_are_understood() -> None:
    old = {"tokens_a_step": 7, "grid_from": 0.5, "grid_steps": 3}
    expected = TrainingRecipe(tokens_per_step=7, qat_start=0.5, qat_interval=3)
    assert TrainingRecipe.from_dict(old) == expected
    with pytest.raises(MidfillError, match="grid_steps is the old name of qat_interval; set"):
        TrainingRecipe.from_dict(old | {"qat_interval": 3})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rank = ", "recipe.toml: "),
        (b"rnak = 3", "recipe.toml: unknown name rnak; known: method, rank"),
        (b"[data]\nline = 'x'", "recipe.toml: data.line must be a number, not 'x'"),
        (b"data = 3", "recipe.toml: data must be a table"),
        (b"method = 'fast'", "recipe.toml: method must be one of lora, full"),
        (b"rank = 0", "recipe.toml: rank must be at least 1, not 0"),
        (b"# caf\xe9", "recipe.toml: "),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(content)
    with pytest.raises(MidfillError, match=message):
        TrainingRecipe.from_toml(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match=r"none.toml: can't be read: No such file"):
        TrainingRecipe.from_toml(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", 0),
        ("row_tokens", 0),
        ("learning_rate", -1.0),
        ("warmup", 1.5),
        ("decay", -0.1),
        ("data.windows", 0),
        ("data.documents", 0),
        ("data.empty_suffix", 2.0),
        ("data.line", -1.0),
        ("data.prefix_characters", (20, 10)),
        ("data.suffix_characters", (0, 10)),
        ("data.fragment_cuts", -1),
    ],
)
def test_values_out_of_their_range_are_named(field: str, value: object) -> None:
    table, _, name = field.rpartition(".")
    with pytest.raises(MidfillError, match=f"^{name} "):
        TrainingRecipe.from_dict({table: {name: value}} if table else {name: value})


def test_some_kind_of_hole_must_have_a_weight() -> None:
    with pytest.raises(MidfillError, match="one of line, block, span must be above 0"):
        DataRecipe(line=0.0, block=0.0, span=0.0)


class TestLearningRate:
    RECIPE = TrainingRecipe(
        tokens=100_000, tokens_per_step=1000, learning_rate=0.5, warmup=0.1, decay=0.4
    )

    def test_it_rises_linearly_stays_and_falls_linearly(self) -> None:
        rates = [self.RECIPE.learning_rate_at(step) for step in range(self.RECIPE.steps)]
        assert len(rates) == 100
        assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
        assert rates[10:60] == [0.5] * 50
        assert rates[60:] == pytest.approx([0.5 * (100 - step) / 40 for step in range(60, 100)])

    def test_it_is_never_0_within_a_run(self) -> None:
        for tokens in (1, 1500, 5000):
            recipe = dataclasses.replace(self.RECIPE, tokens=tokens)
            assert all(recipe.learning_rate_at(step) > 0 for step in range(recipe.steps))

    def test_without_warmup_and_decay_it_stays(self) -> None:
        recipe = dataclasses.replace(self.RECIPE, warmup=0.0, decay=0.0)
        assert {recipe.learning_rate_at(step) for step in range(recipe.steps)} == {0.5}


@dataclass(frozen=True)
class Inner:
    share: float = 0.5
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    count: int = 1
    most: int | None = None
    on: bool = False
    way: Literal["a", "b"] = "a"
    pair: tuple[int, int] = (1, 2)
    inner: Inner = field(default_factory=Inner)


def test_missing_values_have_their_defaults() -> None:
    assert build(Outer, {}) == Outer()
    assert build(Outer, {"inner": {"share": 1}}) == Outer(inner=Inner(share=1.0))


def test_values_of_every_type_are_accepted() -> None:
    values = {
        "count": 3,
        "most": 4,
        "on": True,
        "way": "b",
        "pair": [5, 6],
        "inner": {"share": 0.25, "names": [".py", ".pyi"]},
    }
    expected = Outer(3, 4, True, "b", (5, 6), Inner(0.25, (".py", ".pyi")))
    assert build(Outer, values) == expected
    assert build(Outer, {"most": None}) == Outer()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"counts": 1}, "unknown name counts; known: count, most"),
        ({"inner": {"part": 1}}, "unknown name inner.part; known: share, names"),
        ({"count": 1.0}, "count must be a whole number, not 1.0"),
        ({"count": True}, "count must be a whole number, not True"),
        ({"count": "1"}, "count must be a whole number, not '1'"),
        ({"most": "many"}, "most must be a whole number, not 'many'"),
        ({"on": 1}, "on must be true or false, not 1"),
        ({"way": "c"}, "way must be one of a, b, not 'c'"),
        ({"way": ["a"]}, r"way must be one of a, b, not \['a'\]"),
        ({"pair": [1, 2, 3]}, "pair must be a list of 2, not"),
        ({"pair": [1, "x"]}, "pair must be a whole number, not 'x'"),
        ({"pair": 1}, "pair must be a list of 2, not 1"),
        ({"inner": 3}, "inner must be a table of names and values, not 3"),
        ({"inner": {"share": "half"}}, "inner.share must be a number, not 'half'"),
        ({"inner": {"share": float("nan")}}, "inner.share must be a number, not nan"),
        ({"inner": {"names": ".py"}}, "inner.names must be a list, not '.py'"),
    ],
)
def test_errors_name_the_field(values: dict[str, object], message: str) -> None:
    with pytest.raises(MidfillError, match=message):
        build(Outer, values)


@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.0), (1.0, 1.0, 1.0)])
def test_every_suffix_has_a_share_or_none_has(shares: tuple[float, ...]) -> None:
    assert DataRecipe(suffixes=(".py", ".go"), suffix_shares=(1.0, 2.0)).suffix_shares == (1.0, 2.0)
    with pytest.raises(MidfillError, match=r"suffix_shares must have a number above 0 for each"):
        DataRecipe(suffixes=(".py", ".go"), suffix_shares=shares)
