"""Files of API keys: digests only, one clear error for whatever is wrong with them."""

import hashlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midfill.cli.app import app
from midfill.errors import MidfillError
from midfill.serving.server.key_file import add_key, read_key_file, remove_keys, set_limits
from midfill.serving.server.limits import TenantLimits

DIGEST = "a" * 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_new_key_is_valid_and_the_file_does_not_hold_it(file: Path) -> None:
    key = add_key(file, "alice")
    assert len(key) > 40
    assert key not in file.read_text()
    (stored,) = read_key_file(file).keys
    assert stored.name == "alice"
    assert stored.digest == hashlib.sha256(key.encode()).digest()
    assert file.stat().st_mode & 0o777 == 0o600


def test_keys_are_added_and_removed_one_by_one_and_comments_stay(file: Path) -> None:
    file.write_text(f"# the team\n\nbob:sha256:{DIGEST}\n")
    file.chmod(0o640)
    first, second = add_key(file, "alice"), add_key(file, "alice")
    assert first != second
    assert [key.name for key in read_key_file(file).keys] == ["bob", "alice", "alice"]
    assert remove_keys(file, "alice", keep_newest=True) == 1
    digests = [key.digest for key in read_key_file(file).keys]
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
        (f"alice:sha256:{DIGEST}\nalice", "line 2 is not NAME:sha256:DIGEST, NAME:limits"),
        (f"alice:sha256:{DIGEST[:-1]}", "line 1 is not"),
        (f"alice:md5:{DIGEST}", "line 1 is not"),
        (f"a b:sha256:{DIGEST}", "line 1: 'a b' can't name a key"),
        (f":sha256:{DIGEST}", "line 1: '' can't"),
        (f"key-1:sha256:{DIGEST}", "line 1: 'key-1' can't"),
        (f"other:sha256:{DIGEST}", "line 1: 'other' can't"),
        (f"*:sha256:{DIGEST}", "line 1: '*' can't"),
        ("*:monitor", "line 1: '*' can't"),
        ("alice:admin", "line 1 is not"),
        ("alice:limits:", "line 1: there is no limit behind"),
        ("alice:limits:requests", "line 1: 'requests' is no limit; there are requests=NUMBER"),
        ("alice:limits:requests=-1", "line 1: 'requests=-1' is no limit"),
        ("alice:limits:words=1", "line 1: 'words=1' is no limit"),
        ("alice:limits:tokens=1 tokens=2", "line 1: 'tokens=2' is no limit"),
        ("alice:limits:requests=0", "line 1: 'requests=0' allows nothing"),
        ("a:limits:tokens=1\na:limits:tokens=2", "line 2: the limits of a are there twice"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(file: Path, text: str, error: str) -> None:
    file.write_text(text)
    with pytest.raises(MidfillError) as raised:
        read_key_file(file)
    assert error in str(raised.value)
    assert str(file) in str(raised.value)


def test_files_that_cant_be_read(file: Path) -> None:
    with pytest.raises(MidfillError, match="can't be read: No such file"):
        read_key_file(file)
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


def test_limits_stay_with_a_name_as_long_as_it_has_keys(file: Path) -> None:
    add_key(file, "alice")
    add_key(file, "bob")
    limits = TenantLimits(requests=60, tokens=10**6, running=4)
    set_limits(file, "alice", TenantLimits(requests=1))
    set_limits(file, "alice", limits)
    set_limits(file, "*", TenantLimits(running=2))
    add_key(file, "alice")
    remove_keys(file, "alice", keep_newest=True)
    assert read_key_file(file).limits == {"alice": limits, "*": TenantLimits(running=2)}
    assert file.read_text().count("alice:limits:requests=60 tokens=1000000 running=4\n") == 1
    set_limits(file, "*", TenantLimits())
    remove_keys(file, "alice", keep_newest=False)
    assert read_key_file(file).limits == {}
    with pytest.raises(MidfillError, match="has no key of alice"):
        set_limits(file, "alice", limits)


def test_a_name_is_a_clients_or_a_monitors(file: Path) -> None:
    add_key(file, "alice")
    add_key(file, "prometheus", monitor=True)
    add_key(file, "prometheus", monitor=True)
    found = read_key_file(file)
    assert found.monitors == {"prometheus"}
    assert len(found.keys) == 3
    with pytest.raises(MidfillError, match="alice is the name of clients"):
        add_key(file, "alice", monitor=True)
    with pytest.raises(MidfillError, match="prometheus is the name of a monitor"):
        add_key(file, "prometheus")
    assert remove_keys(file, "prometheus", keep_newest=False) == 2
    assert not read_key_file(file).monitors


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
    run("add", str(file), "prometheus", "--monitor")
    run("limit", str(file), "alice", "--requests-per-minute", "60", "--max-running", "4")
    run("limit", str(file), "*", "--tokens-per-minute", "1000")
    assert run("list", str(file)) == (
        "alice  1 key  requests=60 running=4\nbob  1 key\nprometheus  1 key  monitor\n"
        "*  tokens=1000\n"
    )
    with pytest.raises(MidfillError, match="only one key of alice"):
        run("remove", str(file), "alice", "--keep-newest")
    with pytest.raises(MidfillError, match="no key of carol"):
        run("remove", str(file), "carol")
