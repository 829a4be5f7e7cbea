"""KeyRing: which keys are valid, before and after their file has changed."""

from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.serving.server.key_file import add_key, key_digest, remove_keys, set_limits
from midfill.serving.server.key_ring import KeyRing
from midfill.serving.server.limits import NO_LIMITS, TenantLimits


def test_without_keys_none_is_needed() -> None:
    ring = KeyRing()
    assert not ring
    assert ring.tenants == ("",)
    assert ring.find_name(b"") is None


def test_keys_without_a_file_are_numbered() -> None:
    ring = KeyRing(["first", "Schlüssel"])
    assert ring.tenants == ("key-1", "key-2")
    assert ring.find_name("Schlüssel".encode()) == "key-2"
    assert ring.find_name(b"") is None
    assert ring.find_name(b"third") is None


def test_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    keys = [add_key(tmp_path / "keys", "alice").encode() for _ in range(2)]
    ring = KeyRing(["own"], tmp_path / "keys")
    assert ring.tenants == ("key-1", "alice")
    assert [ring.find_name(key) for key in (*keys, b"own")] == ["alice", "alice", "key-1"]


def test_a_changed_file_counts_once_it_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    old = add_key(file, "alice").encode()
    ring = KeyRing(path=file)
    new = add_key(file, "bob").encode()
    remove_keys(file, "alice", keep_newest=False)
    assert [ring.find_name(key) for key in (old, new)] == ["alice", None]
    ring.reload()
    assert [ring.find_name(key) for key in (old, new)] == [None, "bob"]


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
    assert ring.find_name(key) == "alice"
    assert "stay as they were" in caplog.text
    with pytest.raises(MidfillError):
        KeyRing(path=file)


def test_a_line_of_a_file_stands_for_its_key() -> None:
    """So an environment need not hold keys either."""
    ring = KeyRing(["plain", f"alice:sha256:{key_digest(b'secret').hex()}"])
    assert ring.tenants == ("key-1", "alice")
    assert ring.find_name(b"secret") == "alice"
    assert ring.find_name(f"alice:sha256:{key_digest(b'secret').hex()}".encode()) is None
    with pytest.raises(MidfillError, match="'key-7' can't name a key"):
        KeyRing([f"key-7:sha256:{'a' * 64}"])


def test_limits_are_a_names_or_everyones_and_change_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    add_key(file, "alice")
    add_key(file, "bob")
    ring = KeyRing(["own"], file)
    assert ring.limits_of("alice") == NO_LIMITS
    set_limits(file, "alice", TenantLimits(requests=5))
    set_limits(file, "*", TenantLimits(tokens=7, running=1))
    ring.reload()
    assert ring.limits_of("alice") == TenantLimits(requests=5)
    assert ring.limits_of("bob") == ring.limits_of("key-1") == TenantLimits(tokens=7, running=1)


def test_a_monitor_is_no_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    add_key(file, "alice")
    ring = KeyRing(path=file)
    assert not ring.has_monitors
    key = add_key(file, "prometheus", monitor=True)
    ring.reload()
    assert ring.has_monitors
    assert ring.find_name(key.encode()) == "prometheus"
    assert ring.is_monitor("prometheus")
    assert not ring.is_monitor("alice")
    assert ring.tenants == ("alice",)
    with pytest.raises(MidfillError, match="prometheus is a monitor, but --api-key"):
        KeyRing([f"prometheus:sha256:{'a' * 64}"], file)
    remove_keys(file, "alice", keep_newest=False)
    with pytest.raises(MidfillError, match="keys of monitors only"):
        KeyRing(path=file)
