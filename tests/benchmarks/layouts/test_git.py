"""Histories are typed as they were committed."""

import re
import subprocess
from pathlib import Path

import pytest
from editing import SOURCE, needs_git

from benchmarks.layouts.git import History, HistoryError, git_session


@needs_git
class TestHistories:
    def test_a_history_ends_where_its_last_commit_did(self, repository: Path) -> None:
        rounds = git_session(History.find(str(repository)), rounds=10_000)
        last = rounds[-1]
        assert last.prefix + last.suffix == (repository / "module.py").read_text(encoding="utf-8")
        assert {one.document for one in rounds} == {"module.py"}

    def test_commits_come_in_order_and_short_replays_take_the_newest(
        self, repository: Path
    ) -> None:
        texts = [
            one.prefix + one.suffix
            for one in git_session(History.find(str(repository)), rounds=10_000)
        ]
        first = SOURCE.replace("total", "amount")
        assert texts.index(first) < next(n for n, text in enumerate(texts) if "last" in text)
        newest = git_session(History.find(str(repository)), rounds=20)
        assert len(newest) == 20
        assert "größer"[:2] in newest[-1].prefix

    def test_the_same_seed_types_the_same(self, repository: Path) -> None:
        once = git_session(History.find(str(repository)), rounds=300, seed=5)
        assert git_session(History.find(str(repository)), rounds=300, seed=5) == once
        assert git_session(History.find(str(repository)), rounds=300, seed=6) != once

    def test_paths_without_a_history_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(HistoryError, match=re.escape(str(tmp_path / "none"))):
            git_session(History.find(str(tmp_path / "none")), rounds=10)
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        with pytest.raises(HistoryError, match=re.escape(str(tmp_path))):
            git_session(History.find(str(tmp_path)), rounds=10)


def test_a_machine_without_git_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HistoryError, match="git is not installed"):
        git_session(History.find(str(tmp_path)), rounds=10)
