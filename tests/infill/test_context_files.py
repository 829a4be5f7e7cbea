"""Context: a change costs little, and families get their own repository format."""

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.infill.context_files import ContextFile, ContextOrder, FittingFiles, context_segments
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import TextSegment

PRE, SUF, MID = Sentinel("<PRE>", 1), Sentinel("<SUF>", 2), Sentinel("<MID>", 3)
QWEN = FimFormat(
    "qwen", PRE, SUF, MID, repository=Sentinel("<REPO>", 4), file_separator=Sentinel("<SEP>", 5)
)
PLAIN = FimFormat("plain", PRE, SUF, MID)


def file(name: str, version: int = 0) -> ContextFile:
    return ContextFile(f"{name} = {version}\n", f"{name}.py")


def names(files: list[ContextFile]) -> str:
    return "".join(one.path[0] for one in files)


def test_unchanged_files_keep_their_places_whatever_order_they_come_in() -> None:
    order = ContextOrder()
    assert names(order.order_and_record([file("b"), file("a"), file("c")])) == "bac"
    assert names(order.order_and_record([file("a"), file("b"), file("c")])) == "bac"


def test_a_changed_file_moves_to_the_end_and_then_costs_only_itself() -> None:
    order = ContextOrder()
    order.order_and_record([file("a"), file("b"), file("c")])
    assert names(order.order_and_record([file("a", 1), file("b"), file("c")])) == "bca"
    assert names(order.order_and_record([file("a", 2), file("b"), file("c")])) == "bca"


def test_new_files_come_before_those_that_keep_changing() -> None:
    order = ContextOrder()
    for version in range(3):
        order.order_and_record([file("a", version), file("b")])
    assert names(order.order_and_record([file("a", 3), file("b"), file("n")])) == "bna"


def test_a_missing_file_leaves_what_is_before_it_in_place() -> None:
    order = ContextOrder()
    order.order_and_record([file("a"), file("b"), file("c"), file("d")])
    assert names(order.order_and_record([file("d"), file("c"), file("a")])) == "acd"


def test_snippets_without_a_path_are_told_apart_by_their_text() -> None:
    order = ContextOrder()
    one, two = ContextFile("x = 1"), ContextFile("y = 2")
    assert order.order_and_record([one, two, one]) == [one, two]
    assert order.order_and_record([two, one]) == [one, two]


def test_a_request_without_context_does_not_forget_the_order() -> None:
    order = ContextOrder()
    order.order_and_record([file("b"), file("a")])
    assert order.order_and_record([]) == []
    assert names(order.order_and_record([file("a"), file("b")])) == "ba"


def chunk(number: int) -> ContextFile:
    return ContextFile(f"chunk {number}\n", f"{number % 2}.py")  # several from each file


def test_a_growing_ring_of_chunks_keeps_its_order() -> None:
    order = ContextOrder()
    for size in range(1, 8):
        chunks = [chunk(number) for number in range(size)]
        assert order.order_and_record(chunks) == chunks


def test_a_full_ring_that_drops_the_oldest_chunk_recomputes_half_of_it_on_average() -> None:
    order, size, turns = ContextOrder(), 8, 80
    before = order.order_and_record([chunk(number) for number in range(size)])
    recomputed = 0
    for first in range(1, turns + 1):
        sent = [chunk(number) for number in range(first, first + size)]
        after = order.order_and_record(sent)
        assert order.order_and_record(sent) == after
        assert set(after) == set(sent)
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=True))
        )
        recomputed += size - same
        before = after
    assert recomputed / turns <= (size + 1) / 2


def test_two_clients_of_a_tenant_keep_an_order_each() -> None:
    order = ContextOrder()
    one, two = [chunk(number) for number in range(6)], [chunk(number) for number in range(9, 15)]
    order.order_and_record(one)
    turned = order.order_and_record([*one[1:], chunk(20)])
    assert turned != [*one[1:], chunk(20)]
    for _ in range(3):
        assert order.order_and_record(two) == two
        assert order.order_and_record([*one[1:], chunk(20)]) == turned


def test_an_evicted_chunk_costs_only_those_after_it() -> None:
    order = ContextOrder()
    order.order_and_record([chunk(number) for number in range(6)])
    left = [chunk(number) for number in (0, 1, 2, 4, 5)]
    assert order.order_and_record(left) == left


files = st.builds(file, st.sampled_from("abcdef"), st.integers(0, 2))


@settings(deadline=None)
@given(st.lists(st.lists(files, max_size=8), max_size=8))
def test_every_file_is_sent_exactly_once_and_stays_where_it_is(requests) -> None:
    order = ContextOrder()
    for request in requests:
        arranged = order.order_and_record(request)
        assert set(arranged) == set(request)
        assert len(arranged) == len(set(request))
        assert order.order_and_record(request[::-1]) == arranged
        kept = arranged[: len(arranged) // 2 + 1]
        assert order.order_and_record(kept) == kept


def shape(*arguments, **fields) -> list[str]:
    return [segment.text for segment in context_segments(*arguments, **fields)]


def test_families_with_file_tokens_get_repository_files_and_the_documents_path() -> None:
    files = [ContextFile("x = 1", "a.py"), ContextFile("", "e.py")]
    assert shape(QWEN, files, path="b.py", repository="demo") == [
        "<REPO>", "demo\n", "<SEP>", "a.py\nx = 1\n", "<SEP>", "e.py\n", "<SEP>", "b.py\n",
    ]  # fmt: skip
    assert shape(QWEN, files[:1]) == ["<SEP>", "a.py\nx = 1\n", "<SEP>"]
    assert shape(QWEN, [], path="b.py") == ["<SEP>", "b.py\n"]


def test_other_families_get_paths_in_comments() -> None:
    files = [ContextFile("x = 1\n", "a.py"), ContextFile("int y;", "b.c"), ContextFile("z")]
    assert shape(PLAIN, files, path="m.rs") == ["# a.py\nx = 1\n// b.c\nint y;\nz\n// m.rs\n"]


def test_no_context_is_no_segment() -> None:
    assert shape(QWEN, []) == shape(PLAIN, []) == shape(QWEN, [], repository="demo") == []


def test_context_is_text_even_if_it_spells_sentinels() -> None:
    segments = context_segments(QWEN, [ContextFile("<SEP><PRE>", "a")])
    assert [s.role for s in segments if isinstance(s, TextSegment)] == ["context"]


def numbered(number: int) -> ContextFile:
    return ContextFile(f"{number}", f"{number}.py")


def fitting(size: int = 10) -> FittingFiles:
    """A context of 160 tokens, of which files of one size may take 90, or 70 after a choice."""
    return FittingFiles(160, lambda _: size)


def test_what_fits_is_kept_whole() -> None:
    files = [numbered(number) for number in range(9)]
    assert fitting().choose_and_record(files, "") == tuple(files)
    assert fitting().choose_and_record([], "") == ()


def test_a_growing_list_loses_its_first_files_a_few_at_a_time() -> None:
    one, kept, firsts = fitting(), 0, []
    for count in range(1, 40):
        chosen = one.choose_and_record([numbered(number) for number in range(count)], "")
        assert chosen[-1] == numbered(count - 1)
        firsts.append(chosen[0].path)
        kept = len(chosen)
        assert min(count, 7) <= kept <= 9
    assert len(set(firsts)) <= 1 + 40 // 3


def test_a_choice_stands_while_files_come_and_go() -> None:
    one = fitting()
    files = [numbered(number) for number in range(20)]
    first = one.choose_and_record(files, "")
    assert first == tuple(files[-7:])
    assert one.choose_and_record([*files, numbered(20)], "") == (*first, numbered(20))
    assert one.choose_and_record([*files, numbered(20), numbered(21)], "") == (
        *first,
        numbered(20),
        numbered(21),
    )
    assert len(one.choose_and_record([*files, numbered(20), numbered(21), numbered(22)], "")) == 7


def test_tenants_choose_for_themselves() -> None:
    one = fitting()
    files = [numbered(number) for number in range(20)]
    one.choose_and_record(files, "a")
    assert len(one.choose_and_record([*files, numbered(20)], "a")) == 8
    assert len(one.choose_and_record([*files, numbered(20)], "b")) == 7


def test_a_file_that_never_fits_is_left_out() -> None:
    assert fitting(200).choose_and_record([numbered(1)], "") == ()


@given(st.lists(st.lists(st.integers(1, 80), max_size=20), max_size=6))
def test_the_last_files_are_kept_and_never_too_many(requests: list[list[int]]) -> None:
    one = FittingFiles(160, lambda file: int(file.text))
    for sizes in requests:
        files = [ContextFile(f"{size}", f"{place}") for place, size in enumerate(sizes)]
        kept = one.choose_and_record(files, "")
        assert kept == tuple(files[len(files) - len(kept) :])
        total = sum(int(file.text) for file in kept)
        assert total <= 90
        assert len(kept) == len(files) or total + sizes[len(files) - len(kept) - 1] > 70
