"""Target: KV that a server stored, as it may lie on a disk or come from another machine."""

import hashlib

import numpy as np

from fuzzing.target import Target
from midfill.errors import MidfillError
from midfill.kv.blob import BlobError, KvBlob, KvIdentity, bind_tenant, decode_blob

_TENANT = bind_tenant("alice")
_CHECKSUM = 32


def _parse_blob(data: bytes) -> None:
    """A blob without its checksum, which is right: else nothing behind it would be reached."""
    content = data + hashlib.sha256(data).digest()
    try:
        blob = decode_blob(content)
        again = decode_blob(blob.encode())
        assert (again.key, bytes(again.data)) == (blob.key, bytes(blob.data))
        blob.require(_IDENTITY, _TENANT)
    except BlobError as error:
        raise MidfillError(str(error)) from None


_IDENTITY = KvIdentity("model", "f16 2x1x4")


def _seeds() -> list[bytes]:
    tokens = np.array([1, 2, 3], np.int32)
    root = _IDENTITY.root(_TENANT)
    whole = KvBlob(_IDENTITY, _TENANT, root, 0, tokens, "raw", bytes(96))
    later = KvBlob(_IDENTITY, _TENANT, whole.key, 3, tokens, "cachegen:shallow=64", b"code")
    return [blob.encode()[:-_CHECKSUM] for blob in (whole, later)]


TARGETS = {"kv-blob": Target(_parse_blob, _seeds, 512, (b"\xc0", b"\xdf\xff\xff\xff\xff", b"\xff"))}
