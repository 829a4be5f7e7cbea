"""Files and folders appear complete or not at all."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.system.atomic import replacing_file, write_file, write_folder


def fill(folder: Path) -> None:
    (folder / "a").write_text("new")


def fail(folder: Path) -> None:
    (folder / "a").write_text("half")
    raise OSError(28, "No space left on device")


def below(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_and_those_above_it_are_made(tmp_path: Path) -> None:
    write_folder(tmp_path / "deep" / "x", fill)
    assert below(tmp_path) == {"deep/x/a": "new"}


def test_files_get_the_mode_of_new_ones(tmp_path: Path) -> None:
    def fill_in_secret(folder: Path) -> None:
        fill(folder)
        (folder / "a").chmod(0o600)

    (tmp_path / "new").touch()
    write_folder(tmp_path / "x", fill_in_secret)
    assert (tmp_path / "x" / "a").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_a_folder_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").write_text("old")
    write_folder(tmp_path / "x", fill)
    assert below(tmp_path) == {"x/a": "new"}


def test_leftovers_of_a_killed_process_are_replaced(tmp_path: Path) -> None:
    for name in (".x.writing", ".x.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "left").write_text("left")
    (tmp_path / "x").mkdir()
    write_folder(tmp_path / "x", fill)
    assert below(tmp_path) == {"x/a": "new"}


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    write_folder(tmp_path / "x", fill)
    with pytest.raises(MidfillError, match=r"x: can't be written: No space left on device; what"):
        write_folder(tmp_path / "x", fail)
    assert below(tmp_path) == {"x/a": "new"}
    assert os.listdir(tmp_path) == ["x"]


def test_other_errors_leave_nothing_behind_either(tmp_path: Path) -> None:
    def stop(folder: Path) -> None:
        fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "x", stop)
    assert os.listdir(tmp_path) == []


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MidfillError, match="can't be written"):
        write_folder(tmp_path / "file" / "x", fill)
    with pytest.raises(MidfillError, match="can't be written"):
        write_file(tmp_path / "file" / "x", "text")


def test_a_text_file(tmp_path: Path) -> None:
    write_file(tmp_path / "deep" / "a", "old")
    write_file(tmp_path / "deep" / "a", "é\n")
    assert below(tmp_path) == {"deep/a": "é\n"}


def test_a_file_that_fails_is_not_replaced(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "old")

    def fail_halfway() -> None:
        with replacing_file(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_halfway()
    assert below(tmp_path) == {"a": "old"}


def test_files_of_killed_writers_are_removed_after_an_hour(tmp_path: Path) -> None:
    hour_ago = time.time() - 3601
    for name, age in (("." + "b.txt." + "0" * 32 + ".partial", hour_ago), (".c.partial", hour_ago)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (age, age))
    recent = tmp_path / ("." + "a." + "1" * 32 + ".partial")
    recent.touch()
    write_file(tmp_path / "a", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == [recent.name, ".c.partial", "a"]


FULL_DISK = """
    import resource, signal, sys
    from pathlib import Path

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from midfill.errors import MidfillError
    from midfill.system.atomic import write_file, write_folder

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    big = {"weights": torch.zeros(100_000)}
    writers = {
        "torch": lambda folder: torch.save(big, folder / "a"),
        "safetensors": lambda folder: save_file(big, folder / "a"),
        "text": lambda folder: (folder / "a").write_text("x" * 100_000),
    }
    for name, write in writers.items():
        try:
            write_folder(Path(name), write, errors=(RuntimeError, SafetensorError))
        except MidfillError as error:
            print(error)
    try:
        write_file(Path("file"), "x" * 100_000)
    except MidfillError as error:
        print(error)
"""


def test_when_no_more_can_be_written_one_line_says_so_and_the_old_stays(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name in ("torch", "safetensors", "text"):
        write_folder(tmp_path / name, fill)
    write_file(tmp_path / "file", "new")
    script = textwrap.dedent(FULL_DISK)
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert [line.partition(": can't be written: ")[0] for line in lines] == [
        "torch",
        "safetensors",
        "text",
        "file",
    ]
    assert below(tmp_path) == {
        "torch/a": "new",
        "safetensors/a": "new",
        "text/a": "new",
        "file": "new",
    }
