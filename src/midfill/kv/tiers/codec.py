"""ChunkCodec: how the warm tier writes KV, where it is not to be as it was computed."""

from typing import Protocol


class ChunkCodec(Protocol):
    """Codes the KV of chunks; any thread may call it.

    Attributes:
        name: written into each blob; KV of another codec isn't read. It says what the codec does
            and all that its codes depend on.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    def encode(self, data: bytes, tokens: int) -> bytes:
        """Return the code of the KV of some tokens, laid out as ``kv.blob.RAW``.

        Raises:
            ValueError: it can't be coded.
        """
        ...

    def decode(self, code: bytes | memoryview, tokens: int) -> bytes:
        """Return KV like that of which ``code`` is.

        Raises:
            BlobError: the code makes no sense.
        """
        ...
