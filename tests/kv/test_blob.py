"""KvBlob: what is written is read; what is damaged, foreign or no blob is refused in one line."""

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.kv.blob import (
    RAW,
    BlobError,
    KvBlob,
    KvIdentity,
    bind_tenant,
    chain,
    decode_blob,
)

IDENTITY = KvIdentity("a" * 64, "f16 2x1x32")
TENANT = bind_tenant("alice")
TOKENS = np.arange(7, 19, dtype=np.int32)


def blob(data: bytes = b"\x01\x02" * 100, **fields: object) -> KvBlob:
    given = {
        "identity": IDENTITY,
        "tenant": TENANT,
        "parent": IDENTITY.root(TENANT),
        "start": 0,
        "tokens": TOKENS,
        "codec": RAW,
        "data": data,
    }
    return KvBlob(**(given | fields))  # type: ignore[arg-type]


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40),
    start=st.integers(0, 2**40),
    data=st.binary(max_size=300),
    codec=st.text(max_size=10),
)
def test_what_is_encoded_is_decoded(tokens: list[int], start: int, data: bytes, codec: str) -> None:
    written = blob(data, tokens=np.array(tokens, np.int32), start=start, codec=codec)
    read = decode_blob(written.encode())
    assert read.identity == IDENTITY
    assert (read.tenant, read.parent, read.start) == (TENANT, written.parent, start)
    assert read.tokens.tolist() == tokens
    assert (read.codec, bytes(read.data)) == (codec, data)
    assert read.key == written.key


@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    content = bytearray(blob().encode())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BlobError):
        decode_blob(bytes(content))


@given(st.data())
def test_any_lost_or_added_byte_is_noticed(data: st.DataObject) -> None:
    content = blob().encode()
    length = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(BlobError):
        decode_blob(content[:length])
    with pytest.raises(BlobError):
        decode_blob(content + data.draw(st.binary(min_size=1, max_size=50)))


@given(st.binary(max_size=200))
def test_what_is_no_blob_is_refused(content: bytes) -> None:
    with pytest.raises(BlobError):
        decode_blob(content)


# The checksum is no signature: whoever writes a file can make it right.


def signed(header: bytes, data: bytes = b"", *, claimed: int | None = None) -> bytes:
    length = len(header) if claimed is None else claimed
    body = b"midfill\x00" + (1).to_bytes(4, "little") + length.to_bytes(4, "little")
    body += header + data
    return body + hashlib.sha256(body).digest()


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_a_header_that_makes_no_sense_is_refused(header: bytes, length: int) -> None:
    for content in (signed(header), signed(header, claimed=length)):
        with pytest.raises(BlobError):
            decode_blob(content)


VALID = {
    "model": "m", "layout": "l", "variant": "", "tenant": TENANT, "parent": bytes(32), "start": 0,
    "tokens": bytes(8), "codec": RAW, "data_bytes": 4,
}  # fmt: skip


def test_a_signed_header_is_read() -> None:
    assert len(decode_blob(signed(msgspec.msgpack.encode(VALID), bytes(4))).tokens) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("start", -1),
        ("start", "0"),
        ("tokens", b""),
        ("tokens", b"123"),
        ("tenant", b"alice"),
        ("parent", b""),
        ("data_bytes", 5),
        ("data_bytes", -4),
        ("model", 7),
        ("surprise", 1),
    ],
)
def test_a_field_out_of_range_is_refused(field: str, value: object) -> None:
    header = msgspec.msgpack.encode(VALID | {field: value})
    with pytest.raises(BlobError) as refused:
        decode_blob(signed(header, bytes(4)))
    assert "\n" not in str(refused.value)


def test_another_version_is_named() -> None:
    content = bytearray(blob().encode())
    content[8] = 9
    with pytest.raises(BlobError, match="version 9"):
        decode_blob(bytes(content))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"identity": KvIdentity("b" * 64, IDENTITY.layout)}, "another model"),
        ({"identity": KvIdentity(IDENTITY.model, "f32 2x1x32")}, "'f32 2x1x32'"),
        ({"identity": KvIdentity(IDENTITY.model, IDENTITY.layout, "lossy")}, "variant 'lossy'"),
        ({"tenant": bind_tenant("bob")}, "another tenant"),
        ({"parent": bytes(32)}, "begins with something else"),
    ],
)
def test_foreign_kv_is_told_apart(other: dict[str, object], reason: str) -> None:
    blob().require(IDENTITY, TENANT)
    with pytest.raises(BlobError, match=reason):
        blob(**other).require(IDENTITY, TENANT)


def test_a_chunk_is_named_by_all_tokens_up_to_its_end() -> None:
    root = IDENTITY.root(TENANT)
    changed = TOKENS.copy()
    changed[0] += 1
    keys = {
        chain(chain(root, tokens[:5]), tokens[5:end])
        for tokens in (TOKENS, changed)
        for end in (5, 9, 10)
    }
    assert len(keys) == 6


def test_tenants_models_and_scopes_have_no_chunk_in_common() -> None:
    roots = [
        IDENTITY.root(TENANT),
        IDENTITY.root(bind_tenant("alice", "other keys")),
        IDENTITY.root(bind_tenant("bob")),
        KvIdentity("b" * 64, IDENTITY.layout).root(TENANT),
        KvIdentity(IDENTITY.model, IDENTITY.layout, "lossy").root(TENANT),
    ]
    assert len({chain(root, TOKENS) for root in roots}) == len(roots)
