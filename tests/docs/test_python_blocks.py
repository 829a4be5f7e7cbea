"""The documentation's Python runs as it stands there."""

import subprocess
import sys
from pathlib import Path

import pytest
from doc_blocks import Block, all_blocks


@pytest.mark.real_model
@pytest.mark.parametrize("block", all_blocks("python"), ids=str)
def test_it_runs(block: Block, tmp_path: Path) -> None:
    assert not block.not_run
    assert "127.0.0.1" not in block.text, "blocks that ask a server are not run here"
    result = subprocess.run(
        [sys.executable, "-c", block.text], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), "an example shows something"
