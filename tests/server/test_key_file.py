"""Files of API keys: digests only, one clear error for whatever is wrong with them."""

import hashlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midfill.cli.app import app
from midfill.errors import MidfillError
from midfill.server.key_file import add_key, read_keys, remove_keys

DIGEST = "a" * 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_new_key_is_valid_and_the_file_does_not_hold_it(file: Path) -> None:
    key = add_key(file, "alice")
    assert len(key) > 40
    assert key not in file.read_text()
    (stored,) = read_keys(file)
    assert stored.name == "alice"
    assert stored.digest == hashlib.sha256(key.encode()).digest()
    assert file.stat().st_mode & 0o777 == 0o600


def test_keys_are_added_and_removed_one_by_one_and_comments_stay(file: Path) -> None:
    file.write_text(f"# the team\n\nbob:sha256:{DIGEST}\n")
    file.chmod(0o640)
    first, second = add_key(file, "alice"), add_key(file, "alice")
    assert first != second
    assert [key.name for key in read_keys(file)] == ["bob", "alice", "alice"]
    assert remove_keys(file, "alice", keep_newest=True) == 1
    digests = [key.digest for key in read_keys(file)]
    assert digests == [bytes.fromhex(DIGEST), hashlib.sha256(second.encode()).digest()]
    assert remove_keys(file, "bob", keep_newest=False) == 1
    assert remove_keys(file, "bob", keep_newest=False) == 0
    assert file.read_text().startswith("# the team\n\nalice:")
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "has no key; 'midfill keys add"),
        ("# nobody\n", "has no key"),
        (f"alice:sha256:{DIGEST}\nalice", "line 2 is not NAME:sha256:DIGEST"),
        (f"alice:sha256:{DIGEST[:-1]}", "line 1 is not"),
        (f"alice:md5:{DIGEST}", "line 1 is not"),
        (f"a b:sha256:{DIGEST}", "line 1: 'a b' can't name a key"),
        (f":sha256:{DIGEST}", "line 1: '' can't"),
        (f"key-1:sha256:{DIGEST}", "line 1: 'key-1' can't"),
        (f"other:sha256:{DIGEST}", "line 1: 'other' can't"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(file: Path, text: str, error: str) -> None:
    file.write_text(text)
    with pytest.raises(MidfillError) as raised:
        read_keys(file)
    assert error in str(raised.value)
    assert str(file) in str(raised.value)


def test_files_that_cant_be_read(file: Path) -> None:
    with pytest.raises(MidfillError, match="can't be read: No such file"):
        read_keys(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(MidfillError, match="is no text in UTF-8"):
        add_key(file, "alice")
    assert file.read_bytes() == b"\xff\xfe"


def test_a_wrong_file_is_not_written_to(file: Path) -> None:
    file.write_text("alice\n")
    for change in (lambda: add_key(file, "bob"), lambda: remove_keys(file, "x", keep_newest=False)):
        with pytest.raises(MidfillError, match="line 1 is not"):
            change()
    assert file.read_text() == "alice\n"


def test_the_commands(file: Path) -> None:
    def run(*arguments: str) -> str:
        return CliRunner().invoke(app, ["keys", *arguments], catch_exceptions=False).stdout

    key = run("add", str(file), "alice").strip()
    assert key.startswith("mf-")
    run("add", str(file), "alice")
    run("add", str(file), "bob")
    assert run("list", str(file)) == "alice  2 keys\nbob  1 key\n"
    run("remove", str(file), "alice", "--keep-newest")
    assert run("list", str(file)) == "alice  1 key\nbob  1 key\n"
    with pytest.raises(MidfillError, match="only one key of alice"):
        run("remove", str(file), "alice", "--keep-newest")
    with pytest.raises(MidfillError, match="no key of carol"):
        run("remove", str(file), "carol")
