"""API keys from the command line and from files, and the names of their tenants."""

from pathlib import Path

import pytest

from midfill.config import ApiKey
from midfill.errors import MidfillError
from midfill.server.api_keys import named_keys


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_keys_without_names_are_numbered() -> None:
    assert named_keys(["a b", "c"]) == (ApiKey("a b", "key-1"), ApiKey("c", "key-2"))
    assert named_keys([]) == ()


def test_a_file_may_name_its_keys(tmp_path: Path) -> None:
    text = "# who\tkey\n\nann  k1\n  k2  \nann@home k3==\nann k4\n"
    assert named_keys(["k0"], [write(tmp_path / "keys", text)]) == (
        ApiKey("k0", "key-1"),
        ApiKey("k1", "ann"),
        ApiKey("k2", "key-3"),
        ApiKey("k3==", "ann@home"),
        ApiKey("k4", "ann"),  # a second key of the same tenant
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ok secret\na b secret\n", "line 2: expected a key, or a name and a key"),
        ('a"b secret', "line 1: a name is up to 64 letters"),
        (f"{'x' * 65} secret", "line 1: a name is up to 64 letters"),
        ("key-7 secret", "line 1: the name is one that midfill gives itself"),
        ("other secret", "line 1: the name is one that midfill gives itself"),
        ("# none\n", "holds no key"),
    ],
)
def test_a_line_that_is_no_good_is_named_but_not_shown(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with pytest.raises(MidfillError, match=complaint) as raised:
        named_keys([], [write(tmp_path / "keys", text)])
    assert "secret" not in str(raised.value)


def test_a_file_that_cant_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match="none can't be read: No such file"):
        named_keys([], [tmp_path / "none"])
    (tmp_path / "latin").write_bytes(b"ann \xe9")
    with pytest.raises(MidfillError, match="latin can't be read: it is not UTF-8"):
        named_keys([], [tmp_path / "latin"])
