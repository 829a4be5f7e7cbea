"""KvBlob: KV of consecutive tokens as bytes, for files and for other machines.

A blob says what its KV belongs to: the model and how it is run, the tenant, the tokens and all that
came before them. Its bytes may come from anywhere, so reading them trusts nothing: a blob that is
truncated, damaged, of another version or of something else is refused with a BlobError.

    magic, version   12 bytes
    header length    4 bytes, little-endian
    header           msgpack, a map
    data             as many bytes as the header says
    checksum         SHA-256 of everything before
"""

import hashlib
import struct
from dataclasses import dataclass

import msgspec
import numpy as np

from midfill.arrays import Int32Array

VERSION = 1
RAW = "raw"
"""The codec that stores KV unchanged."""

_MAGIC = b"midfill\x00"
_PREFIX = struct.Struct("<8sII")
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_MAX_HEADER_BYTES = 64 * 2**20  # 16 million tokens
_DIGEST_BYTES = 32


class BlobError(ValueError):
    """Bytes that are no blob, or one that can't be used here; says why in one line."""


@dataclass(frozen=True)
class KvIdentity:
    """What KV has in common wherever it may be used.

    Attributes:
        model: digest of the model and of all that its KV depends on beside the tokens.
        layout: how cells are stored, such as "f16 30x3x64": dtype, layers, KV heads, head_dim.
        variant: "" for KV as it was computed; otherwise what was done to it.
    """

    model: str
    layout: str
    variant: str = ""

    @property
    def name(self) -> str:
        """A name for files of such KV."""
        fields = (self.model, self.layout, self.variant)
        return hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()[:32]

    def root(self, tenant: bytes) -> bytes:
        """Return the digest that a tenant's chains of tokens begin with, see ``chain``."""
        fields = (self.model, self.layout, self.variant)
        return hashlib.sha256(msgspec.msgpack.encode((fields, tenant))).digest()


def bind_tenant(tenant: str, scope: str = "") -> bytes:
    """Return 32 bytes that name a tenant in blobs and tell nothing else of it.

    Args:
        tenant: its name.
        scope: among whose tenants the name is unique.
    """
    return hashlib.sha256(msgspec.msgpack.encode(("tenant", scope, tenant))).digest()


def chain(parent: bytes, tokens: Int32Array) -> bytes:
    """Return the digest of [n] int32 ``tokens`` after those that ``parent`` stands for."""
    return hashlib.sha256(parent + _token_bytes(tokens)).digest()


@dataclass(frozen=True, eq=False)
class KvBlob:
    """KV of consecutive tokens.

    Attributes:
        identity: what it belongs to.
        tenant: whose it is, ``bind_tenant``.
        parent: digest of the tokens before, ``chain``; of none, ``KvIdentity.root``.
        start: position of the first token.
        tokens: [n] int32, at least one.
        codec: how ``data`` is to be read; RAW is the runner's cells, array by array (keys, values,
            then scales if there are any), each [layers * kv_heads, n] cells.
        data: the KV.
    """

    identity: KvIdentity
    tenant: bytes
    parent: bytes
    start: int
    tokens: Int32Array
    codec: str
    data: bytes | memoryview

    @property
    def key(self) -> bytes:
        """Digest of all tokens up to the last one."""
        return chain(self.parent, self.tokens)

    def encode(self) -> bytes:
        """Return the blob as bytes."""
        header = msgspec.msgpack.encode(
            _Header(
                model=self.identity.model,
                layout=self.identity.layout,
                variant=self.identity.variant,
                tenant=self.tenant,
                parent=self.parent,
                start=self.start,
                tokens=_token_bytes(self.tokens),
                codec=self.codec,
                data_bytes=len(self.data),
            )
        )
        prefix = _PREFIX.pack(_MAGIC, VERSION, len(header))
        checksum = hashlib.sha256(prefix)
        checksum.update(header)
        checksum.update(self.data)
        return b"".join((prefix, header, self.data, checksum.digest()))

    def require(self, identity: KvIdentity, tenant: bytes) -> None:
        """Check what the KV belongs to.

        Raises:
            BlobError: it belongs to something else.
        """
        if self.identity.model != identity.model:
            raise BlobError("the KV is of another model, or of this one run differently")
        if self.identity.layout != identity.layout:
            raise BlobError(
                f"the KV is stored as {self.identity.layout!r}, here it is {identity.layout!r}"
            )
        if self.identity.variant != identity.variant:
            raise BlobError(f"the KV is of variant {self.identity.variant!r}, which isn't used")
        if self.tenant != tenant:
            raise BlobError("the KV belongs to another tenant")
        if self.start == 0 and self.parent != identity.root(tenant):
            raise BlobError("the KV's chain of tokens begins with something else")


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The header as msgpack; ``KvBlob`` documents the fields."""

    model: str
    layout: str
    variant: str
    tenant: bytes
    parent: bytes
    start: int
    tokens: bytes
    codec: str
    data_bytes: int


_decoder = msgspec.msgpack.Decoder(_Header)


def decode_blob(content: bytes | memoryview) -> KvBlob:
    """Read a blob; its data is a view of ``content``.

    Raises:
        BlobError: the bytes are no whole and undamaged blob of this version.
    """
    view = memoryview(content).cast("B")
    if len(view) < _PREFIX.size + _CHECKSUM_BYTES:
        raise BlobError("truncated: shorter than any blob")
    magic, version, header_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise BlobError("no KV: the first bytes are those of something else")
    if version != VERSION:
        raise BlobError(f"version {version} can't be read here, only version {VERSION}")
    end = len(view) - _CHECKSUM_BYTES
    data_at = _PREFIX.size + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or data_at > end:
        raise BlobError("truncated or damaged: the header's length is wrong")
    if hashlib.sha256(view[:end]).digest() != view[end:]:
        raise BlobError("truncated or damaged: the checksum is wrong")
    try:
        header = _decoder.decode(view[_PREFIX.size : data_at])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())  # it may quote a field's name
        raise BlobError(f"the header makes no sense: {reason}") from None
    _check(header, end - data_at)
    return KvBlob(
        identity=KvIdentity(header.model, header.layout, header.variant),
        tenant=header.tenant,
        parent=header.parent,
        start=header.start,
        tokens=np.frombuffer(header.tokens, "<i4").astype(np.int32),
        codec=header.codec,
        data=view[data_at:end],
    )


def _check(header: _Header, data_bytes: int) -> None:
    """Check what the header's types don't say.

    Raises:
        BlobError: something is out of range.
    """
    if header.data_bytes != data_bytes:
        raise BlobError(f"{data_bytes} bytes of KV, not the header's {header.data_bytes}")
    if not header.tokens or len(header.tokens) % 4:
        raise BlobError(f"{len(header.tokens)} bytes are no list of tokens")
    if header.start < 0 or len(header.tenant) != _DIGEST_BYTES:
        raise BlobError("the header's start or tenant is out of range")
    if len(header.parent) != _DIGEST_BYTES:
        raise BlobError("the header's parent is no digest")


def _token_bytes(tokens: Int32Array) -> bytes:
    return tokens.astype("<i4").tobytes()
