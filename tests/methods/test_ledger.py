"""The ledger: every method is in it, its tests are there, and the documentation shows all of it."""

from pathlib import Path

import pytest
from method_ledger import PAGE, SECTION, Check, find_test, load, render, titles

from midfill.engine.scheduling.registry import POLICIES
from midfill.methods.registry import METHODS

LEDGER = load()
TESTS = sorted({one.test for checks in LEDGER.values() for one in checks if one.test})


def test_every_method_and_policy_has_checks() -> None:
    missing = [name for name in (*METHODS, *POLICIES) if not LEDGER.get(name)]
    assert not missing, "add [[NAME]] to tests/methods/ledger.toml"


def test_each_is_of_something_that_has_a_name() -> None:
    assert set(LEDGER) <= set(titles())
    assert not (set(METHODS) & set(POLICIES)), "a name would stand for both"


def test_tests_that_are_named_are_there_and_run() -> None:
    found = {test: find_test(test) for test in TESTS}
    assert not [test for test, one in found.items() if one is None]
    assert not [test for test, one in found.items() if one is not None and one.never_runs]


def test_no_check_is_said_twice_of_a_method() -> None:
    for name, checks in LEDGER.items():
        said = [one.says for one in checks]
        assert len(said) == len(set(said)), name


def test_the_documentation_shows_the_ledger() -> None:
    text = PAGE.read_text("utf-8")
    shown = text.partition(f"<!-- {SECTION} -->\n")[2].partition(f"\n<!-- /{SECTION} -->")[0]
    assert shown == render(), "run python tests/helpers/method_ledger.py"


@pytest.mark.parametrize(
    "entry",
    [
        {"check": "It works."},
        {"check": "It works.", "test": "tests/a.py::test_b", "reason": "none"},
        {"check": "It works.", "reason": " "},
        {"check": "It works.", "tests": ["tests/a.py::test_b"]},
        {"test": "tests/a.py::test_b"},
    ],
)
def test_an_entry_has_a_check_and_one_of_test_and_reason(entry: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a-method"):
        Check.parse("a-method", entry)


def test_tests_are_found_with_their_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("method_ledger.ROOT", tmp_path)
    (tmp_path / "test_made.py").write_text(
        "import pytest\n"
        "pytestmark = [pytest.mark.real_model]\n"
        "def test_plain(): ...\n"
        "@pytest.mark.skip(reason='later')\n"
        "def test_skipped(): ...\n"
        "@pytest.mark.skipif(True, reason='here')\n"
        "class TestIt:\n"
        "    @pytest.mark.slow\n"
        "    def test_inside(self): ...\n"
        "    def helper(self): ...\n"
    )
    found = {
        name: find_test(f"test_made.py::{name}")
        for name in ("test_plain", "test_skipped", "TestIt::test_inside")
    }
    assert {name: sorted(one.marks) for name, one in found.items() if one} == {
        "test_plain": ["real_model"],
        "test_skipped": ["real_model", "skip"],
        "TestIt::test_inside": ["real_model", "skipif", "slow"],
    }
    assert [name for name, one in found.items() if one and one.never_runs] == ["test_skipped"]
    for missing in ("test_inside", "TestIt", "TestIt::helper", "test_other"):
        assert find_test(f"test_made.py::{missing}") is None
    assert find_test("test_elsewhere.py::test_plain") is None
