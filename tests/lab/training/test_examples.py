"""Examples: the document's text byte for byte, in the server's layouts, with loss weights."""

import dataclasses
import random
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midfill.infill.formats import FimFormat, custom_format
from midfill.infill.layout import PromptLayout, lay_out
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.tokens.layout_encoder import encode_layout
from midfill.models.tokens.tokenizer import Tokenizer
from midfill_lab.training.examples import (
    Example,
    ExampleMaker,
    PackedRow,
    Packer,
    aligned_tokens,
    broken_token_mask,
    draw_cuts,
    split_at,
    token_starts,
)
from midfill_lab.training.holes import Hole
from midfill_lab.training.recipe import DataRecipe

FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
TEXT = (
    "def total(values):\n"
    "    # été, 漢字 and 😀; <fim_middle> is text\n"
    "    return sum(values)\n"
    "\n"
    "print(total([1, 2, 3]))\n"
)
END = 0
ONLY_THE_CARET = DataRecipe(fragment_share=0.0, typed_share=0.0)
MANY = DataRecipe(fragment_share=1.0, typed_share=1.0, fragment_cuts=20)


@pytest.fixture(scope="module")
def tokenizer(tiny: Checkpoint) -> Tokenizer:
    return tiny.tokenizer


def make(
    tokenizer: Tokenizer,
    hole: Hole,
    recipe: DataRecipe = MANY,
    *,
    fragments: bool = True,
    seed: int = 0,
    format: FimFormat | None = None,
) -> Example:
    format = format or custom_format(*FIM, tokenizer.special_tokens)
    maker = ExampleMaker(tokenizer, format, END, recipe)
    return maker.make(TEXT, hole, random.Random(seed), fragments=fragments)


@st.composite
def holes(draw: st.DrawFn) -> Hole:
    start, caret, end, stop = sorted(
        draw(st.lists(st.integers(0, len(TEXT)), min_size=4, max_size=4))
    )
    if caret == end:
        caret, end = (caret - 1, end) if caret else (caret, end + 1)
    start, stop = min(start, caret), max(stop, end)
    return Hole("span", start, caret, end, stop, draw(st.integers(0, caret - start)), "efim")


def texts_of(example: Example, tokenizer: Tokenizer) -> tuple[str, str, str]:
    """Return the texts after PRE, SUF and MID."""
    at = [example.ids.tolist().index(tokenizer.special_tokens[name]) for name in FIM]
    bounds = [*at, len(example.ids) - 1]
    parts = [
        b"".join(map(tokenizer.token_bytes, example.ids[a + 1 : b])) for a, b in pairwise(bounds)
    ]
    head, suffix, written = (part.decode() for part in parts)
    return head, suffix, written


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hole=holes(), seed=st.integers(0, 1000), fragments=st.booleans())
def test_the_text_is_the_documents_byte_for_byte(
    tokenizer: Tokenizer, hole: Hole, seed: int, fragments: bool
) -> None:
    example = make(tokenizer, hole, fragments=fragments, seed=seed)
    k = hole.start + hole.cut
    assert texts_of(example, tokenizer) == (
        TEXT[hole.start : k],
        TEXT[hole.end : hole.stop],
        TEXT[k : hole.end],
    )
    assert example.ids[-1] == END
    assert example.characters == hole.stop - hole.start


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hole=holes())
def test_a_prompt_is_what_the_server_sends(tokenizer: Tokenizer, hole: Hole) -> None:
    format = custom_format(*FIM, tokenizer.special_tokens)
    prefix, suffix = TEXT[hole.start : hole.caret], TEXT[hole.end : hole.stop]
    segments, layout = lay_out(format, prefix, suffix, hole.cut)
    prompt = encode_layout(PromptLayout(segments=segments, layout=layout), tokenizer)
    middle = tokenizer.encode_continuation(TEXT[hole.caret : hole.end])
    assert make(tokenizer, hole, ONLY_THE_CARET).ids.tolist() == [*prompt, *middle, END]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hole=holes(), seed=st.integers(0, 1000))
def test_a_fragmented_increment_is_what_the_server_sends_after_some_keystrokes(
    tokenizer: Tokenizer, hole: Hole, seed: int
) -> None:
    recipe = dataclasses.replace(ONLY_THE_CARET, typed_share=1.0)
    example = make(tokenizer, hole, recipe, seed=seed)
    format = custom_format(*FIM, tokenizer.special_tokens)
    after_mid = example.ids.tolist().index(format.middle.token_id) + 1  # type: ignore[union-attr]
    bounds = [
        after_mid,
        *(at for at in example.fragment_starts if at > after_mid),
        len(example.ids) - 1,
    ]
    *fragments, middle = [tokenizer.decode(example.ids[a:b].tolist()) for a, b in pairwise(bounds)]
    assert middle == TEXT[hole.caret : hole.end]
    prefix, suffix = TEXT[hole.start : hole.caret], TEXT[hole.end : hole.stop]
    segments, layout = lay_out(format, prefix, suffix, hole.cut, fragments=fragments)
    prompt = encode_layout(PromptLayout(segments=segments, layout=layout), tokenizer)
    assert example.ids.tolist()[: len(prompt)] == prompt


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hole=holes(), seed=st.integers(0, 1000), fragments=st.booleans())
def test_loss_weights_follow_the_recipe(
    tokenizer: Tokenizer, hole: Hole, seed: int, fragments: bool
) -> None:
    recipe = dataclasses.replace(MANY, increment_weight=0.25)
    example = make(tokenizer, hole, recipe, fragments=fragments, seed=seed)
    after_mid = example.ids.tolist().index(tokenizer.special_tokens["<fim_middle>"]) + 1
    increment = len(TEXT[hole.start + hole.cut : hole.caret].encode())
    assert not example.weights[:after_mid].any()
    assert not example.without_end[:after_mid].any()
    assert example.weights[-1] == 1.0
    assert not example.without_end[-1]
    at = 0
    for token_id, weight, typed in zip(
        *(each[after_mid:-1] for each in (example.ids, example.weights, example.without_end)),
        strict=True,
    ):
        at += len(tokenizer.token_bytes(int(token_id)))
        assert typed == (at <= increment)
        assert weight in ({0.25, 0.0} if at <= increment else {1.0, 0.0})
        assert fragments or weight
    assert example.weights.dtype == np.float32
    assert example.ids.dtype == np.int32


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hole=holes(), seed=st.integers(0, 1000))
def test_the_prompts_text_is_learned_with_the_weight_of_contexts(
    tokenizer: Tokenizer, hole: Hole, seed: int
) -> None:
    recipe = dataclasses.replace(MANY, context_weight=0.25)
    plain, example = (make(tokenizer, hole, each, seed=seed) for each in (MANY, recipe))
    assert example.ids.tolist() == plain.ids.tolist()
    sentinels = [example.ids.tolist().index(tokenizer.special_tokens[name]) for name in FIM]
    after_mid = sentinels[2] + 1
    assert example.weights[after_mid:].tolist() == plain.weights[after_mid:].tolist()
    assert not example.weights[sentinels].any()
    context = np.delete(np.arange(after_mid), sentinels)
    assert set(example.weights[context].tolist()) <= {0.0, 0.25}
    assert (example.without_end[context] == (example.weights[context] > 0)).all()
    # Tokens that a cut broke are input only: what is learned is what stands before no cut.
    starts = [at for at in example.fragment_starts if at < after_mid]
    unlearned = context[example.weights[context] == 0]
    assert len(starts) > 0 or not len(unlearned)


def test_a_token_cut_by_the_caret_is_learned_after_it_only(
    tokenizer: Tokenizer,
) -> None:
    start, end = TEXT.index("    return"), TEXT.index("\n\nprint")
    caret = TEXT.index("alues)\n\nprint") + 1
    assert b"al" in map(tokenizer.token_bytes, tokenizer.encode_continuation(TEXT[start:end]))
    example = make(tokenizer, Hole("span", start, caret, end, end, 0, "spm"), ONLY_THE_CARET)
    after_mid = example.ids.tolist().index(tokenizer.special_tokens["<fim_middle>"]) + 1
    before = tokenizer.encode_continuation(TEXT[start:caret])
    assert example.ids[after_mid : after_mid + len(before)].tolist() == before
    weights = example.weights[after_mid:].tolist()
    assert weights[: len(before)] == [0.5] * (len(before) - 1) + [0.0]
    assert set(weights[len(before) :]) == {1.0}


def test_examples_with_and_without_fragments_differ_in_nothing_else(tokenizer: Tokenizer) -> None:
    hole = Hole("span", 0, 40, 60, 90, 20, "efim")
    with_them, without = (make(tokenizer, hole, fragments=each) for each in (True, False))
    assert texts_of(with_them, tokenizer) == texts_of(without, tokenizer)
    assert with_them.hole == without.hole
    assert with_them.fragment_starts
    assert not without.fragment_starts


def test_suffix_first_formats_have_no_increment(tokenizer: Tokenizer) -> None:
    format = custom_format(*FIM, tokenizer.special_tokens, order="spm")
    hole = Hole("span", 0, 20, 30, 50, 7, "efim")
    example = make(tokenizer, hole, ONLY_THE_CARET, format=format)
    segments, layout = lay_out(format, TEXT[:20], TEXT[30:50], 20)
    prompt = encode_layout(PromptLayout(segments=segments, layout=layout), tokenizer)
    middle = tokenizer.encode_continuation(TEXT[20:30])
    assert example.ids.tolist() == [*prompt, *middle, END]
    assert example.weights.tolist() == [0.0] * len(prompt) + [1.0] * (len(middle) + 1)


def test_bos_comes_first_if_the_server_sends_it(tokenizer: Tokenizer) -> None:
    with_bos = Tokenizer(tokenizer._parsing, bos_token_id=0, add_bos=True)
    example = make(with_bos, Hole("span", 0, 20, 30, 50, 7, "efim"), ONLY_THE_CARET)
    format = custom_format(*FIM, tokenizer.special_tokens)
    segments, layout = lay_out(format, TEXT[:20], TEXT[30:50], 7)
    prompt = encode_layout(PromptLayout(segments=segments, layout=layout), with_bos)
    assert prompt[0] == 0
    assert example.ids.tolist()[: len(prompt)] == prompt


def test_fragment_starts_are_where_fragments_start(tokenizer: Tokenizer) -> None:
    example = make(tokenizer, Hole("span", 0, 40, 60, 90, 40, "psm"), MANY, seed=3)
    sentinels = [at for at, each in enumerate(example.ids) if not tokenizer.token_bytes(int(each))]
    assert not set(sentinels) & set(example.fragment_starts)
    begins = sorted({*(at + 1 for at in sentinels), *example.fragment_starts})
    for start, stop in pairwise(begins):
        ids = example.ids[start:stop].tolist()
        fragment = [each for each in ids if tokenizer.token_bytes(each)]
        assert tokenizer.encode_continuation(tokenizer.decode(fragment)) == fragment


def test_some_line_ends_of_the_increment_might_be_the_answers_end(tokenizer: Tokenizer) -> None:
    hole = Hole("span", 0, len(TEXT) - 5, len(TEXT), len(TEXT), 0, "spm")
    ends: set[str] = set()
    for seed in range(20):
        example = make(
            tokenizer,
            hole,
            dataclasses.replace(ONLY_THE_CARET, unfinished_lines=2, increment_weight=0.3),
            seed=seed,
        )
        after_mid = example.ids.tolist().index(tokenizer.special_tokens["<fim_middle>"]) + 1
        last = int(np.flatnonzero(example.without_end)[-1])
        drawn = [at for at in range(after_mid, last) if not example.without_end[at]]
        assert len(drawn) <= 2
        for at in drawn:
            assert example.weights[at] in (1.0, 0.0)  # 0.0 where a cut has broken the token
            before, token = (tokenizer.decode([int(example.ids[i])]) for i in (at - 1, at))
            assert before.endswith("\n") or token.startswith("\n")
            ends.add(tokenizer.decode(example.ids[after_mid:at].tolist()).split("\n")[-1])
    assert len(ends) > 2


def test_without_a_cut_at_the_caret_the_model_writes_the_token_across_it(
    tokenizer: Tokenizer,
) -> None:
    start, end = TEXT.index("    return"), TEXT.index("\n\nprint")
    caret = TEXT.index("alues)\n\nprint") + 1
    recipe = dataclasses.replace(ONLY_THE_CARET, caret_share=0.0)
    example = make(tokenizer, Hole("span", start, caret, end, end, 0, "spm"), recipe)
    after_mid = example.ids.tolist().index(tokenizer.special_tokens["<fim_middle>"]) + 1
    whole = tokenizer.encode_continuation(TEXT[start:end])
    assert example.ids[after_mid:-1].tolist() == whole
    written = b"".join(
        tokenizer.token_bytes(int(each))
        for each, weight in zip(example.ids[:-1], example.weights[:-1], strict=True)
        if weight == 1.0
    )
    assert written.startswith(b"al")  # the token that the caret is in


LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=40)


@given(LENGTHS, LENGTHS, st.integers(0, 20))
def test_all_pairs_of_tokens_with_one_start_are_found(
    first: list[int], second: list[int], begin: int
) -> None:
    starts = [begin, *accumulate(first, initial=begin)][1:-1]
    others = [0, *accumulate(second)][:-1]
    naive = [(i, j) for i, a in enumerate(starts) for j, b in enumerate(others) if a == b]
    found = aligned_tokens(token_starts(first, begin), token_starts(second))
    assert [tuple(pair) for pair in found.tolist()] == naive
    assert found.dtype == np.int32


def test_no_tokens_have_no_pairs() -> None:
    assert aligned_tokens(token_starts([]), token_starts([1, 2])).shape == (0, 2)


SEEDS = st.integers(0, 10**6)
RECIPE = DataRecipe()


@given(st.integers(0, 200), st.none() | st.integers(0, 200), SEEDS)
def test_cuts_are_sorted_and_inside_the_text(length: int, caret: int | None, seed: int) -> None:
    cuts = draw_cuts(length, caret, RECIPE, random.Random(seed))
    assert cuts == sorted(set(cuts))
    assert all(0 < cut < length for cut in cuts)
    if caret is not None and 0 < caret < length:
        assert caret in cuts


@given(st.integers(2, 200), SEEDS)
def test_without_further_cuts_only_the_caret_is_one(length: int, seed: int) -> None:
    recipe = dataclasses.replace(RECIPE, fragment_share=0.0, typed_share=0.0)
    assert draw_cuts(length, 1, recipe, random.Random(seed)) == [1]
    assert draw_cuts(length, None, recipe, random.Random(seed)) == []


@given(SEEDS)
def test_typed_text_is_cut_every_few_characters_before_the_caret_only(seed: int) -> None:
    recipe = dataclasses.replace(RECIPE, fragment_share=0.0, typed_share=1.0, typed_characters=60)
    cuts = draw_cuts(500, 300, recipe, random.Random(seed))
    assert cuts[-1] == 300
    assert cuts[0] > 240
    assert all(1 <= after - before <= 8 for before, after in pairwise(cuts))
    assert 300 - cuts[0] >= 60 - 8


def test_how_often_and_how_much_is_cut_follows_the_recipe() -> None:
    recipe = dataclasses.replace(RECIPE, fragment_share=0.6, fragment_cuts=8)
    counts = [len(draw_cuts(10**6, None, recipe, random.Random(seed))) for seed in range(2000)]
    assert 0.55 < sum(count > 0 for count in counts) / len(counts) < 0.65
    assert max(counts) == 8
    assert sum(count == 1 for count in counts) > sum(count == 4 for count in counts)


@given(st.text(), st.sets(st.integers(0, 50)))
def test_fragments_join_to_the_text(text: str, cuts: set[int]) -> None:
    inside = sorted(cut for cut in cuts if 0 < cut < len(text))
    fragments = split_at(text, inside)
    assert "".join(fragments) == text
    assert all(fragments)
    assert len(fragments) == len(inside) + (text != "")


@st.composite
def tokenisations(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Draw token lengths of a text tokenised whole, and of its fragments."""
    length = draw(st.integers(1, 30))

    def split(size: int) -> list[int]:
        ends = draw(st.sets(st.integers(1, size)))
        bounds = sorted({0, size, *ends})
        return [after - before for before, after in pairwise(bounds)]

    return split(length), [split(size) for size in split(length)]


def naive(whole: list[int], fragments: list[list[int]]) -> list[bool]:
    """Find, byte by byte, what is inside a token that a cut breaks, and before that cut."""
    owner = [number for number, length in enumerate(whole) for _ in range(length)]
    broken = [False] * len(owner)
    cut = 0
    for fragment in fragments[:-1]:
        start, cut = cut, cut + sum(fragment)
        if owner[cut - 1] == owner[cut]:
            for at in range(start, cut):
                broken[at] |= owner[at] == owner[cut]
    marks, at = [], 0
    for length in (each for fragment in fragments for each in fragment):
        marks.append(any(broken[at : at + length]))
        at += length
    return marks


@given(tokenisations())
def test_broken_tokens_are_those_of_a_naive_reference(
    lengths: tuple[list[int], list[list[int]]],
) -> None:
    whole, fragments = lengths
    assert broken_token_mask(whole, fragments) == naive(whole, fragments)


def test_half_a_word_before_a_cut_is_broken_and_the_rest_is_not() -> None:
    # "x = return" as "x", " =", " return"; cut inside "return": "x", " =", " ret" | "urn"
    assert broken_token_mask([1, 2, 7], [[1, 2, 4], [3]]) == [False, False, True, False]


def test_a_token_across_the_last_boundary_before_a_cut_is_broken() -> None:
    # line break and indent, then "self"; the cut inside "self" joins it all: "\n   s" | "elf"
    assert broken_token_mask([4, 4], [[5], [3]]) == [True, False]


def test_a_cut_between_two_tokens_breaks_none() -> None:
    assert broken_token_mask([1, 2, 7], [[1, 2], [7]]) == [False, False, False]


def test_text_without_cuts_has_no_broken_tokens() -> None:
    assert broken_token_mask([3, 4], [[3, 4]]) == [False, False]
    assert broken_token_mask([], []) == []


def example(number: int, length: int) -> Example:
    ids = np.full(length, number, np.int32)
    hole = Hole("line", 0, 1, 2, 3 + number, 0, "psm")
    typed = np.arange(length) % 3 == number % 3
    return Example(ids, np.linspace(0, 1, length, dtype=np.float32), typed, hole)


def parts(row: PackedRow) -> list[tuple[list[int], list[float], list[bool]]]:
    """Return ids, weights and increment masks of each example of a row."""
    fields = (
        np.split(each, row.cu_seqlens[1:-1]) for each in (row.ids, row.weights, row.without_end)
    )
    return [(a.tolist(), b.tolist(), c.tolist()) for a, b, c in zip(*fields, strict=True)]


@given(st.lists(st.integers(1, 70), max_size=80))
def test_every_example_that_fits_a_row_is_packed_whole_and_once(lengths: list[int]) -> None:
    packer = Packer(50)
    examples = [example(number, length) for number, length in enumerate(lengths)]
    rows = [row for each in examples if (row := packer.add(each)) is not None]
    rows += [PackedRow.pack(each) for each in packer.rows]
    fitting = [each for each in examples if len(each.ids) <= 50]
    assert packer.dropped == len(examples) - len(fitting)
    assert all(len(row.ids) <= 50 for row in rows)
    assert sorted(part for row in rows for part in parts(row)) == sorted(
        (each.ids.tolist(), each.weights.tolist(), each.without_end.tolist()) for each in fitting
    )
    assert sum(row.characters for row in rows) == sum(each.characters for each in fitting)


def test_positions_start_anew_with_each_example() -> None:
    packer = Packer(10)
    for number, length in enumerate((3, 1, 4)):
        assert packer.add(example(number, length)) is None
    (row,) = (PackedRow.pack(each) for each in packer.rows)
    assert row.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert row.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert row.positions.dtype == np.int32


def test_rows_are_well_filled() -> None:
    packer = Packer(1000)
    lengths = np.random.default_rng(0).integers(20, 600, 400)
    examples = [example(number, int(length)) for number, length in enumerate(lengths)]
    rows = [row for each in examples if (row := packer.add(each)) is not None]
    assert np.mean([len(row.ids) for row in rows]) > 900


def packed(*lengths: int) -> PackedRow:
    return PackedRow.pack([example(number, length) for number, length in enumerate(lengths)])


def test_joined_rows_are_those_of_all_their_examples() -> None:
    first, second = packed(3, 5), packed(4)
    joined = PackedRow.join([first, second])
    assert parts(joined) == parts(first) + parts(second)
    assert joined.characters == first.characters + second.characters
    assert joined.positions.tolist() == [*range(3), *range(5), *range(4)]


def test_a_joined_row_keeps_what_is_aligned() -> None:
    def aligned(number: int) -> Example:
        plain = np.full(4, number, np.int32)
        pairs = np.array([[1, 0], [2, 3]], np.int32)
        return dataclasses.replace(example(number, 3), plain_ids=plain, aligned=pairs)

    rows = [PackedRow.pack([aligned(0), aligned(1)]), PackedRow.pack([aligned(2)])]
    joined, whole = PackedRow.join(rows), PackedRow.pack([aligned(n) for n in range(3)])
    assert joined.plain_ids.tolist() == whole.plain_ids.tolist()
    assert joined.plain_cu_seqlens.tolist() == whole.plain_cu_seqlens.tolist()
    assert joined.aligned.tolist() == whole.aligned.tolist()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(0, 40))
def test_padding_adds_examples_of_which_nothing_is_learned(
    lengths: list[int], missing: int
) -> None:
    row = packed(*lengths)
    tokens = len(row.ids) + missing
    padded = row.padded(tokens, examples=20, length=9)
    assert len(padded.ids) == tokens
    assert len(padded.cu_seqlens) == 21
    assert padded.cu_seqlens.dtype == np.int32
    assert padded.cu_seqlens[-1] == tokens
    assert np.diff(padded.cu_seqlens).max() <= 9
    assert parts(padded)[: len(lengths)] == parts(row)
    assert not padded.weights[len(row.ids) :].any()


def test_a_row_that_is_longer_than_the_padded_one_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for 5"):
        packed(5).padded(4, examples=9, length=9)
    with pytest.raises(ValueError, match="no room for 5"):
        packed(2, 3).padded(9, examples=2, length=9)
