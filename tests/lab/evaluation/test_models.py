"""Several copies of a model: the same answers as from one, each prompt answered once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.infill.request import InfillRequest
from midfill_lab.evaluation.models import (
    Model,
    ModelChoice,
    ModelPrompt,
    load_model,
    split_by_group,
)


@pytest.fixture
def choice(tiny_folder: Path) -> ModelChoice:
    return ModelChoice(model=str(tiny_folder), threads=1)


@pytest.fixture
def pool(choice: ModelChoice) -> Iterator[Model]:
    with load_model(replace(choice, processes=2)) as model:
        yield model


def prompts(*lengths: int) -> list[ModelPrompt]:
    return [
        ModelPrompt(
            InfillRequest(prefix="x = 1\n" * length, suffix="\n", window="as-sent"),
            group=f"{length % 3}",
        )
        for length in lengths
    ]


def test_copies_give_the_answers_of_one_model(choice: ModelChoice, pool: Model) -> None:
    asked = prompts(1, 2, 3, 4, 5, 6, 7)
    heard: list[tuple[int, int]] = []
    found = pool.answer(asked, 5, lambda done, total: heard.append((done, total)))
    with load_model(choice) as one:
        assert found == one.answer(asked, 5, lambda *_: None)
        assert (pool.fingerprint, pool.description) == (one.fingerprint, one.description)
        assert pool.fingerprint == choice.fingerprint()
    assert heard[-1] == (7, 7)
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert len(pool.answer(asked[:1], 5, lambda *_: None)) == 1


@pytest.mark.parametrize("lengths", [(10**4, 1, 4, 2), (10**4, 2, 5, 8)], ids=["first", "second"])
def test_an_error_in_either_copy_is_reported(pool: Model, lengths: tuple[int, ...]) -> None:
    with pytest.raises(MidfillError, match="context"):
        pool.answer(prompts(*lengths), 5, lambda *_: None)


def test_a_copy_that_ends_is_reported(pool: Model) -> None:
    (process,) = pool._processes  # type: ignore[attr-defined]
    process.kill()
    process.join()
    with pytest.raises(MidfillError, match="a copy of the model ended"):
        pool.answer(prompts(1, 2, 3), 5, lambda *_: None)


def test_groups_are_not_divided() -> None:
    asked = prompts(*range(40))
    split = split_by_group(asked, 2)
    assert sorted(place for share in split for place in share) == list(range(40))
    groups = [{asked[place].group for place in share} for share in split]
    assert not groups[0] & groups[1]
    assert split_by_group(prompts(1), 3) == [[0], [], []]
