"""Rows of a batch: what is one, where it is, and what is wrong with others."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.errors import MidfillError
from midfill.serving.server.batch.rows import InvalidRowError, RowFile, parse_row


def line(**fields: object) -> bytes:
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    return json.dumps(row | fields).encode()


def test_a_row_is_read_with_its_body_as_it_is() -> None:
    row = parse_row(b'{"custom_id":"a","url":"/v1/chat/completions","body":{"x":[1, 2]}}', 1)
    assert (row.custom_id, row.url, bytes(row.body)) == (
        "a", "/v1/chat/completions", b'{"x":[1, 2]}',
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code", "custom_id"),
    [
        (b"", "invalid_json_line", None),
        (b"{", "invalid_json_line", None),
        (b'{"custom_id":"\xff"}', "invalid_json_line", None),
        (b'{"x":' + b"[" * 100_000, "invalid_json_line", None),
        (b"[1]", "invalid_row", None),
        (b'{"custom_id":"a"}', "invalid_row", "a"),
        (line(custom_id=7), "invalid_row", None),
        (line(method="GET"), "invalid_method", "a"),
        (line(url="/v1/embeddings"), "invalid_url", "a"),
        (line(url="x" * 10_000), "invalid_url", "a"),
    ],
    ids=range(10),
)
def test_other_lines_are_refused_with_a_code(text: bytes, code: str, custom_id: str | None) -> None:
    with pytest.raises(InvalidRowError) as caught:
        parse_row(text, 3)
    assert (caught.value.code, caught.value.custom_id) == (code, custom_id)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200))
def test_no_line_ends_in_another_error(text: bytes) -> None:
    try:
        parse_row(text, 1)
    except InvalidRowError as error:
        str(error).encode()


def test_places_are_those_of_lines_that_are_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line(custom_id="a") + b"\n\n \r\n" + line(custom_id="b") + b"\r\n{")
    rows = RowFile(path, 1000)
    places = list(rows.places())
    assert [place.number for place in places] == [1, 4, 5]
    assert [rows.request(place).custom_id for place in places[:2]] == ["a", "b"]
    with pytest.raises(InvalidRowError):
        rows.request(places[2])
    rows.close()


def test_rows_may_be_read_while_places_are_found(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(line(custom_id=str(number)) for number in range(20)))
    rows = RowFile(path, 1000)
    found = [rows.request(place).custom_id for place in rows.places()]
    assert found == [str(number) for number in range(20)]
    rows.close()


def test_an_id_names_a_row_and_its_content(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"

    def ids(content: bytes) -> list[str]:
        path.write_bytes(content)
        rows = RowFile(path, 1000)
        found = [place.id for place in rows.places()]
        rows.close()
        return found

    first, second = ids(b"a\na\n")
    assert first != second
    assert ids(b"a\r\na") == [first, second]
    assert ids(b"a\nb\n")[1] != second


def test_a_row_that_is_too_long_is_never_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 200_000 + b"\n" + line() + b"\n")
    rows = RowFile(path, 1000)
    long, short = rows.places()
    with pytest.raises(InvalidRowError) as caught:
        rows.request(long)
    assert caught.value.code == "row_too_large"
    assert rows.request(short).custom_id == "a"
    rows.close()


def test_a_row_that_has_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line(custom_id="a"))
    rows = RowFile(path, 1000)
    (place,) = rows.places()
    path.write_bytes(line(custom_id="b"))
    with pytest.raises(MidfillError, match="has changed"):
        rows.request(place)
    rows.close()


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match=r"none\.jsonl: No such file or directory"):
        RowFile(tmp_path / "none.jsonl", 1000)
