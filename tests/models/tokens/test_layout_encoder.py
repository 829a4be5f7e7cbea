"""Planned prompts as token ids: sentinels are ids, segments stand apart, user text stays text."""

import gc
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from midfill.infill.context_files import ContextFile, context_segments
from midfill.infill.formats import FimFormat, Sentinel, custom_format
from midfill.infill.layout import PromptLayout, TextSegment, lay_out
from midfill.models.tokens.layout_encoder import LayoutEncoder, count_file_tokens, encode_layout
from midfill.models.tokens.tokenizer import Tokenizer

SENTINELS = ("<PRE>", "<SUF>", "<MID>")
CORPUS = [Path(__file__).read_text(encoding="utf-8")]


def byte_level(*, add_bos: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", *SENTINELS)])
    return Tokenizer(backend, bos_token_id=backend.token_to_id("<s>"), add_bos=add_bos)


def sentencepiece_like() -> Tokenizer:
    """Puts a space before a text's first word and falls back to bytes, as CodeLlama's does."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=["▁"])
    )
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=_merges(trained),
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in SENTINELS])
    return Tokenizer(backend)


def _merges(trained: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    merges = json.loads(trained.to_str())["model"]["merges"]
    return [
        tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in merges
    ]


@pytest.fixture(scope="module", params=[byte_level, sentencepiece_like])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


def format_of(tokenizer: Tokenizer, order="psm") -> FimFormat:
    return custom_format(*SENTINELS, tokenizer.special_tokens, order=order)


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The ids' bytes, sentinels by name."""
    names = {number: text.encode() for text, number in tokenizer.special_tokens.items()}
    return b"".join(names.get(one) or tokenizer.token_bytes(one) for one in ids)


code = st.text(alphabet=st.sampled_from("ab_ (\n\té字🙂<>|PRESUFMID"), max_size=30)


@settings(deadline=None)
@given(code, code, st.integers(0, 30), st.sampled_from(["psm", "spm"]))
def test_the_ids_spell_the_layout_byte_for_byte(
    tokenizer: Tokenizer, prefix: str, suffix: str, cut: int, order
) -> None:
    cut = min(cut, len(prefix))
    segments, name = lay_out(format_of(tokenizer, order), prefix, suffix, cut)
    ids = encode_layout(PromptLayout(segments=segments, layout=name, cut=cut), tokenizer)
    head, increment = prefix[:cut], prefix[cut:]
    expected = (
        f"<PRE>{head}<SUF>{suffix}<MID>{increment}"
        if order == "psm"
        else f"<SUF>{suffix}<PRE>{prefix}<MID>"
    )
    bos = "<s>" if tokenizer.add_bos else ""
    assert spelled(tokenizer, ids) == (bos + expected).encode()
    sentinel_ids = [one for one in ids if one in tokenizer.special_tokens.values()]
    assert len(sentinel_ids) == 3 + tokenizer.add_bos  # none of them from the user's text


def test_a_growing_increment_leaves_every_earlier_id_in_place(tokenizer: Tokenizer) -> None:
    format = format_of(tokenizer)

    def ids(prefix: str) -> list[int]:
        segments, name = lay_out(format, prefix, "\nreturn x\n", 8)
        return encode_layout(PromptLayout(segments=segments, layout=name, cut=8), tokenizer)

    first = ids("def f(x)")
    for typed in ("def f(x):", "def f(x):\n  y", "def f(x):\n  y = x"):
        assert ids(typed)[: len(first)] == first


def test_special_tokens_are_parsed_in_raw_text_and_nowhere_else(tokenizer: Tokenizer) -> None:
    raw = PromptLayout(segments=(TextSegment("<PRE>a", "raw"),), layout="verbatim")
    assert tokenizer.special_tokens["<PRE>"] in encode_layout(raw, tokenizer)
    for role in ("prefix", "suffix", "increment", "context"):
        text = PromptLayout(segments=(TextSegment("<PRE>a", role),), layout="psm")
        assert tokenizer.special_tokens["<PRE>"] not in encode_layout(text, tokenizer)


def test_bos_comes_first_and_once() -> None:
    tokenizer = byte_level()
    bos = tokenizer.bos_token_id
    spelled_out = PromptLayout(segments=(TextSegment("<s>a", "raw"),), layout="verbatim")
    left_out = PromptLayout(segments=(TextSegment("a", "raw"),), layout="verbatim")
    assert encode_layout(spelled_out, tokenizer) == encode_layout(left_out, tokenizer)
    assert encode_layout(left_out, tokenizer)[0] == bos
    assert encode_layout(PromptLayout(segments=(), layout="verbatim"), tokenizer) == [bos]


def test_raw_prompts_alone_begin_with_the_token_that_a_model_names() -> None:
    tokenizer = byte_level(add_bos=False)
    end = tokenizer.special_tokens["<MID>"]
    encoder = LayoutEncoder(tokenizer, raw_bos=end)

    def ids(text: str, role: str, layout: str) -> list[int]:
        return encoder.encode(PromptLayout(segments=(TextSegment(text, role),), layout=layout))

    text = tokenizer.encode("a")
    assert ids("a", "raw", "verbatim") == [end, *text]
    assert encoder.encode(PromptLayout(segments=(), layout="verbatim")) == [end]
    for begun in ("<s>", "<PRE>"):
        assert ids(begun + "a", "raw", "verbatim") == [tokenizer.special_tokens[begun], *text]
    assert ids("a", "prefix", "psm") == ids("a", "prefix", "prefix-only") == text


def test_a_prompt_without_sentinels_is_a_text_of_its_own() -> None:
    tokenizer = sentencepiece_like()
    layout = PromptLayout(segments=(TextSegment("def", "prefix"),), layout="prefix-only")
    assert encode_layout(layout, tokenizer) == tokenizer.encode("def")
    assert spelled(tokenizer, encode_layout(layout, tokenizer)) == b" def"


class CountingTokenizer(Tokenizer):
    """Counts the characters it had to tokenise."""

    characters = 0

    def encode_continuation(self, text: str) -> list[int]:
        self.characters += len(text)
        return super().encode_continuation(text)


def test_unchanged_segments_are_tokenised_once_and_memory_is_bounded() -> None:
    plain = byte_level()
    tokenizer = CountingTokenizer(plain._parsing, bos_token_id=plain.bos_token_id, add_bos=True)
    encoder = LayoutEncoder(tokenizer, max_bytes=1200)
    sentinel = Sentinel("<MID>", plain.special_tokens["<MID>"])

    def ask(suffix: str, increment: str) -> list[int]:
        segments = (TextSegment(suffix, "suffix"), sentinel, TextSegment(increment, "increment"))
        layout = PromptLayout(segments=segments, layout="efim")
        ids = encoder.encode(layout)
        assert ids == encode_layout(layout, plain)
        return ids

    ask("x" * 80, "a")
    ask("x" * 80, "ab")
    assert tokenizer.characters == 80 + 1 + 2
    ask("y" * 90, "ab")  # pushes the old suffix out
    ask("x" * 80, "ab")
    assert tokenizer.characters == 80 + 1 + 2 + 90 + 80
    ask("z" * 200, "ab")  # longer than the memory: tokenised, not kept
    assert 0 < encoder.held_bytes <= 1200


def test_cached_segments_take_no_more_bytes_than_their_bound() -> None:
    tokenizer = byte_level()
    limit = 200_000
    encoder = LayoutEncoder(tokenizer, max_bytes=limit)
    texts = [f"{number} + " * (1 + number % 40) for number in range(2000)]
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for text in texts:
            copied = "".join(text)  # the segment's own text counts, too
            encoder.encode(PromptLayout(segments=(TextSegment(copied, "prefix"),), layout="psm"))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.3 * limit < after - before <= limit


def test_a_file_begins_after_one_separator_and_ends_with_the_next() -> None:
    pre, suf, mid, repository, separator = (
        Sentinel(name, number) for number, name in enumerate("PSMRF")
    )
    format = FimFormat("made up", pre, suf, mid, repository=repository, file_separator=separator)
    files = [ContextFile("A = 1\n", "a.py"), ContextFile("B = 2\n", "b.py")]
    context = context_segments(format, files, path="d.py", repository="here")
    segments, name = lay_out(format, "p = ", "\n", 0, context_segments=context)
    layout = PromptLayout(segments=segments, layout=name, context_segments=context)
    assert [one.text for one in segments[:8]] == [
        "R", "here\n", "F", "a.py\nA = 1\n", "F", "b.py\nB = 2\n", "F", "d.py\n",
    ]  # fmt: skip
    counts = [0, *(10 if isinstance(one, TextSegment) else 1 for one in segments)]
    parts = [[7] * count for count in counts]
    assert LayoutEncoder(byte_level()).file_bounds(layout, parts, format) == (12, 23, 34)
    assert count_file_tokens(layout, parts) == 40  # names of repository and document included
