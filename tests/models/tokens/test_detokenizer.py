"""The detokenizer against decoding everything at once."""

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from midfill.models.tokens.detokenizer import Detokenizer
from midfill.models.tokens.tokenizer import Tokenizer

END = "<|endoftext|>"


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that any bytes can be spelled; and one control token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(backend)


TOKENIZER = byte_tokenizer()
ID_OF = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(256)}


def ids_of(data: bytes) -> list[int]:
    return [ID_OF[bytes([byte])] for byte in data]


def any_bytes() -> st.SearchStrategy[bytes]:
    """Bytes that are nearly UTF-8: text, cut characters, stray and forbidden bytes."""
    characters = st.text(max_size=3).map(str.encode)
    cut = st.characters(min_codepoint=0x80, codec="utf-8").map(lambda c: c.encode()[:-1])
    stray = st.sampled_from([b"\x80", b"\xc0", b"\xe2\x28", b"\xed\xa0\x80", b"\xf5", b"\xff"])
    return st.lists(st.one_of(characters, cut, stray, st.binary(max_size=3))).map(b"".join)


@given(any_bytes(), st.lists(st.integers(0, 5)))
@example(b"\xf0\x9f\x99", [1, 1, 1])
@example("\U0001f642".encode(), [1, 1, 1, 1])
def test_pieces_add_up_to_decoding_all_at_once(data: bytes, sizes: list[int]) -> None:
    ids = ids_of(data)
    detokenizer, pieces = Detokenizer(TOKENIZER), []
    for size in [*sizes, len(ids)]:
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    pieces.append(detokenizer.flush())
    whole = data.decode("utf-8", errors="replace")
    assert "".join(pieces) == whole == TOKENIZER.decode(ids_of(data))


@given(st.text())
def test_a_character_is_returned_with_its_last_byte(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for character in text:
        *first, last = ids_of(character.encode())
        assert detokenizer.push(first) == ""
        assert detokenizer.push([last]) == character
    assert detokenizer.flush() == ""


def test_control_tokens_write_nothing_and_do_not_split_a_character() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    end = TOKENIZER.special_tokens[END]
    first, second = ids_of("\u00e9".encode())
    assert detokenizer.push([end, first, end]) == ""
    assert detokenizer.push([end, second, end]) == "\u00e9"
