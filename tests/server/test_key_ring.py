"""KeyRing: which keys are valid, before and after their file has changed."""

from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.server.key_file import add_key, remove_keys
from midfill.server.key_ring import KeyRing


def test_without_keys_none_is_needed() -> None:
    ring = KeyRing()
    assert not ring
    assert ring.tenants == ("",)
    assert ring.find_tenant(b"") is None


def test_keys_without_a_file_are_numbered() -> None:
    ring = KeyRing(["first", "Schlüssel"])
    assert ring.tenants == ("key-1", "key-2")
    assert ring.find_tenant("Schlüssel".encode()) == "key-2"
    assert ring.find_tenant(b"") is None
    assert ring.find_tenant(b"third") is None


def test_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    keys = [add_key(tmp_path / "keys", "alice").encode() for _ in range(2)]
    ring = KeyRing(["own"], tmp_path / "keys")
    assert ring.tenants == ("key-1", "alice")
    assert [ring.find_tenant(key) for key in (*keys, b"own")] == ["alice", "alice", "key-1"]


def test_a_changed_file_counts_once_it_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    old = add_key(file, "alice").encode()
    ring = KeyRing(path=file)
    new = add_key(file, "bob").encode()
    remove_keys(file, "alice", keep_newest=False)
    assert [ring.find_tenant(key) for key in (old, new)] == ["alice", None]
    ring.reload()
    assert [ring.find_tenant(key) for key in (old, new)] == [None, "bob"]


@pytest.mark.parametrize("text", ["", "alice", None])
def test_a_file_that_became_unusable_changes_nothing(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    key = add_key(file, "alice").encode()
    ring = KeyRing(path=file)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    ring.reload()
    assert ring.find_tenant(key) == "alice"
    assert "stay as they were" in caplog.text
    with pytest.raises(MidfillError):
        KeyRing(path=file)
