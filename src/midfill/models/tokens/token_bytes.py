"""Pieces to bytes: the bytes that the entries of a vocabulary stand for.

Two spellings of pieces are in use. *Byte-level* BPE (Radford et al., 2019, GPT-2) writes every byte
as one printable character. *SentencePiece* (Kudo and Richardson, 2018) writes text as it is, a
space as U+2581, and a byte that no piece covers as ``<0xNN>``.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers

_SPACE = "\u2581"
_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")


def piece_decoder(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """Return the function from piece to bytes for a tokenizer's vocabulary."""
    kinds = {step["type"] for part in _parts(backend) for step in _steps(part)}
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return sentencepiece_bytes
    return str.encode


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; any other added token stands for its text."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece."""
    byte = _BYTE_PIECE.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return piece.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte. Printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _parts(backend: tokenizers.Tokenizer) -> Iterator[dict[str, Any]]:
    # A decoder decides; a tokenizer without one is judged by how it splits.
    for part in (backend.decoder, backend.pre_tokenizer, backend.normalizer):
        if part is not None:
            yield json.loads(part.__getstate__())
            return


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder, pre-tokenizer or normalizer, with sequences flattened."""
    if part["type"] != "Sequence":
        yield part
        return
    for inner in ("decoders", "pretokenizers", "normalizers"):
        for step in part.get(inner, ()):
            yield from _steps(step)
