"""A small git repository to replay."""

import subprocess
from pathlib import Path

import pytest
from editing import SOURCE


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(
            ["git", *identity, "-c", "commit.gpgsign=false", *arguments],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip

    git("init", "-q")
    texts = [
        SOURCE,
        SOURCE.replace("total", "amount"),
        SOURCE.replace("total", "amount") + "def last():\n    return None\n",
        SOURCE[600:] + "def last():\n    return 'größer'\n",
    ]
    for number, text in enumerate(texts):
        (tmp_path / "module.py").write_text(text, encoding="utf-8")
        (tmp_path / "image.png").write_bytes(b"\0\x01" + bytes([number]))
        git("add", ".")
        git("commit", "-q", "-m", f"state {number}")
    return tmp_path
