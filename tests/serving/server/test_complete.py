"""``midfill complete`` in front of a real server."""

import sys
from pathlib import Path

import pytest
from running_server import RunningServer

from midfill.cli import main


def test_a_server_is_asked_as_a_model_that_is_loaded_here(
    server: RunningServer,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "code.py"
    file.write_text("import os\n\ndef f(x):\n    return \n\nprint(f(1))\n")
    shown = []
    for where in (["--url", server.url], ["--model", str(tiny_folder), "--threads", "1"]):
        arguments = ["midfill", "complete", f"{file}:4", "-n", "8", "--lines", "all", *where]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (None, 0)
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1]
    assert shown[0].err == ""
