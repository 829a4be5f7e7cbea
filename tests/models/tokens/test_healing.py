"""Token healing: the constraint is exact, and real text cut anywhere is written again."""

import random
import re
import sysconfig
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from midfill.models.tokens.healing import HealingConstraint, TokenTrie
from midfill.models.tokens.tokenizer import Tokenizer

SMALL = [b"a", b"b", b"ab", b"ba", b"abc", b"", b"aa", b"b", b"\xc3", b"\xc3\xa9", b"bab"]


def writable(vocabulary: Sequence[bytes], required: bytes, first: int | None = None) -> bool:
    """By trying everything: can tokens (beginning with one of them) write what is required?"""
    if first is not None:
        token = vocabulary[first]
        if not token or not (token.startswith(required) or required.startswith(token)):
            return False
        return len(token) >= len(required) or writable(vocabulary, required[len(token) :])
    if not required:
        return True
    return any(writable(vocabulary, required, token) for token in range(len(vocabulary)))


@pytest.mark.parametrize("missing", [None, 0, 1, 3, 8])
def test_the_constraint_is_exact_over_a_small_vocabulary(missing: int | None) -> None:
    vocabulary = [b"" if number == missing else token for number, token in enumerate(SMALL)]
    trie = TokenTrie(vocabulary)
    texts = [bytes(text) for n in range(1, 6) for text in product(b"ab\xc3\xa9", repeat=n)]
    for required in texts:
        constraint = HealingConstraint(trie, required)
        exact = {token for token in range(len(SMALL)) if writable(vocabulary, required, token)}
        allowed = constraint.allowed()
        assert allowed is not None
        assert len(allowed) == len(set(allowed))
        assert set(allowed) == exact
        assert constraint.possible == bool(exact)


@pytest.mark.parametrize("forbidden", [frozenset(), frozenset({2}), frozenset({0, 8})])
def test_exact_tokens_write_nothing_beyond_what_is_required(forbidden: frozenset[int]) -> None:
    trie = TokenTrie(SMALL)
    for text in (bytes(text) for n in range(1, 6) for text in product(b"ab\xc3\xa9", repeat=n)):
        constraint, left = HealingConstraint(trie, text, forbidden), text
        while allowed := constraint.allowed():
            exact = constraint.exact()
            assert len(exact) == len(set(exact))
            assert set(exact) == {one for one in allowed if len(SMALL[one]) <= len(left)}
            if not exact:
                break
            constraint.advance_by(exact[0])
            left = left[len(SMALL[exact[0]]) :]


@pytest.mark.parametrize("forbidden", [frozenset(), frozenset({2}), frozenset({0, 8})])
def test_the_likely_spelling_is_allowed_and_certain_where_it_says_so(
    forbidden: frozenset[int],
) -> None:
    trie = TokenTrie(SMALL)
    texts = [bytes(text) for n in range(1, 6) for text in product(b"ab\xc3\xa9", repeat=n)]
    for required in texts:
        constraint = HealingConstraint(trie, required, forbidden)
        written = b""
        for token, certain in constraint.spelling():
            allowed = constraint.allowed()
            assert allowed is not None
            assert token in allowed
            assert certain == (len(allowed) == 1)
            if not certain:
                rest = required[len(written) :]
                assert rest.startswith(SMALL[token])
                longer = [SMALL[one] for one in allowed if rest.startswith(SMALL[one])]
                assert max(map(len, longer)) == len(SMALL[token])
            constraint.advance(SMALL[token])
            written += SMALL[token]
        # It ends where no token that is allowed writes only what is required.
        allowed = constraint.allowed()
        if allowed is not None:
            rest = required[len(written) :]
            assert not any(rest.startswith(SMALL[token]) for token in allowed)


def test_every_allowed_path_begins_with_what_is_required() -> None:
    trie = TokenTrie(SMALL)

    def walk(required: bytes, written: list[int]) -> int:
        constraint = HealingConstraint(trie, required)
        for token in written:
            constraint.advance(SMALL[token])
        allowed = constraint.allowed()
        if allowed is None:
            assert b"".join(SMALL[token] for token in written).startswith(required)
            return 1
        return sum(walk(required, [*written, token]) for token in allowed)

    assert walk(b"abab", []) > 5
    assert walk(b"ab\xc3\xa9b", []) > 2


@settings(deadline=None)
@given(st.lists(st.binary(max_size=3), max_size=30), st.binary(max_size=2))
def test_slices_of_the_sorted_vocabulary_are_subtrees(
    vocabulary: list[bytes], start: bytes
) -> None:
    trie = TokenTrie(vocabulary)
    beginning = {n for n, token in enumerate(vocabulary) if token and token.startswith(start)}
    assert set(trie.beginning_with(start)) == beginning
    assert set(trie.spelling(start)) == {n for n in beginning if vocabulary[n] == start}


def test_tokens_without_text_are_never_allowed() -> None:
    trie = TokenTrie([b"", b"print", b"pri", b""])
    assert set(HealingConstraint(trie, b"pri").allowed() or []) == {1, 2}


def test_a_token_that_was_not_allowed_is_refused() -> None:
    constraint = HealingConstraint(TokenTrie([b"print", b"x", b""]), b"pri")
    for wrong in (b"x", b""):
        with pytest.raises(ValueError, match="does not continue"):
            constraint.advance(wrong)
    constraint.advance(b"print")
    assert constraint.satisfied
    constraint.advance(b"anything")


def test_backing_off_removes_the_tokens_that_a_longer_one_could_contain() -> None:
    vocabulary = [b"pr", b"i", b"print", b"(", b" = ", b"in", b"q"]
    trie = TokenTrie(vocabulary)
    assert trie.back_off([4, 0, 1]).required == b"pri"  # print begins with pr + i
    assert trie.back_off([4, 0, 1]).removed == 2
    assert trie.back_off([4, 0, 1], fixed=2).required == b"i"  # only i may go: in begins with it
    assert trie.back_off([0, 3]).removed == 0  # nothing longer begins with (
    assert trie.back_off([], 0).removed == 0
    assert trie.back_off([0, 6]).removed == 0


def test_sentinels_are_never_removed() -> None:
    trie = TokenTrie([b"", b"pri", b"print"])
    assert trie.back_off([1, 0]).removed == 0
    assert trie.back_off([1, 0, 1]).removed == 1


@pytest.fixture(scope="module")
def code() -> str:
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("textwrap.py", "bisect.py", "colorsys.py")
    extra = "größe = 'naïve — 字符 🙂'\n"
    return extra + "".join((library / name).read_text(encoding="utf-8") for name in names)


@pytest.fixture(scope="module")
def tokenizer(code: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, initial_alphabet=alphabet, show_progress=False, special_tokens=["<eos>"]
    )
    backend.train_from_iterator([code], trainer)
    return Tokenizer(backend)


def test_five_hundred_cuts_inside_identifiers_are_written_again(
    code: str, tokenizer: Tokenizer
) -> None:
    """Whatever the model prefers, the answer begins with the characters that were taken back."""
    chance = random.Random(0)
    vocabulary = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    trie = TokenTrie(vocabulary)
    identifiers = [match.span() for match in re.finditer(r"\w{3,}", code)]
    healed = 0
    for _ in range(500):
        start, end = chance.choice(identifiers)
        caret = chance.randint(start + 1, end - 1)
        ids = tokenizer.encode(code[max(0, caret - 60) : caret])
        healing = trie.back_off(ids)
        kept = ids[: len(ids) - healing.removed]
        assert b"".join(vocabulary[token] for token in ids).endswith(healing.required)
        healed += healing.removed > 0
        constraint = HealingConstraint(trie, healing.required)
        answer = b""
        while (allowed := constraint.allowed()) is not None:
            token = chance.choice(allowed)
            constraint.advance(vocabulary[token])
            answer += vocabulary[token]
        assert answer.startswith(healing.required)
        spelled = b"".join(vocabulary[token] for token in kept) + answer
        assert spelled.startswith(code[max(0, caret - 60) : caret].encode())
    assert healed > 400


def test_a_cut_inside_a_multi_byte_character_is_healed_byte_by_byte() -> None:
    smile = "🙂".encode()
    vocabulary = [bytes([byte]) for byte in range(256)] + [smile, smile[:2]]
    trie = TokenTrie(vocabulary)
    healing = trie.back_off([257])
    assert healing.required == smile[:2]
    assert set(HealingConstraint(trie, healing.required).allowed() or []) == {256, 257, smile[0]}
