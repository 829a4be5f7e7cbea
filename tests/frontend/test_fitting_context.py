"""Files that don't fit are left out in rare, larger portions."""

from hypothesis import given
from hypothesis import strategies as st

from midfill.frontend.fitting_context import FittingContext
from midfill.infill.context_files import ContextFile


def file(number: int) -> ContextFile:
    return ContextFile(f"{number}", f"{number}.py")


def fitting(size: int = 10) -> FittingContext:
    """A context of 160 tokens, of which files of one size may take 90, or 70 after a choice."""
    return FittingContext(160, lambda _: size)


def test_what_fits_is_kept_whole() -> None:
    files = [file(number) for number in range(9)]
    assert fitting().choose_and_record(files, "") == tuple(files)
    assert fitting().choose_and_record([], "") == ()


def test_a_growing_list_loses_its_first_files_a_few_at_a_time() -> None:
    one, kept, firsts = fitting(), 0, []
    for count in range(1, 40):
        chosen = one.choose_and_record([file(number) for number in range(count)], "")
        assert chosen[-1] == file(count - 1)
        firsts.append(chosen[0].path)
        kept = len(chosen)
        assert min(count, 7) <= kept <= 9
    assert len(set(firsts)) <= 1 + 40 // 3


def test_a_choice_stands_while_files_come_and_go() -> None:
    one = fitting()
    files = [file(number) for number in range(20)]
    first = one.choose_and_record(files, "")
    assert first == tuple(files[-7:])
    assert one.choose_and_record([*files, file(20)], "") == (*first, file(20))
    assert one.choose_and_record([*files, file(20), file(21)], "") == (*first, file(20), file(21))
    assert len(one.choose_and_record([*files, file(20), file(21), file(22)], "")) == 7


def test_tenants_choose_for_themselves() -> None:
    one = fitting()
    files = [file(number) for number in range(20)]
    one.choose_and_record(files, "a")
    assert len(one.choose_and_record([*files, file(20)], "a")) == 8
    assert len(one.choose_and_record([*files, file(20)], "b")) == 7


def test_a_file_that_never_fits_is_left_out() -> None:
    assert fitting(200).choose_and_record([file(1)], "") == ()


@given(st.lists(st.lists(st.integers(1, 80), max_size=20), max_size=6))
def test_the_last_files_are_kept_and_never_too_many(requests: list[list[int]]) -> None:
    one = FittingContext(160, lambda file: int(file.text))
    for sizes in requests:
        files = [ContextFile(f"{size}", f"{place}") for place, size in enumerate(sizes)]
        kept = one.choose_and_record(files, "")
        assert kept == tuple(files[len(files) - len(kept) :])
        total = sum(int(file.text) for file in kept)
        assert total <= 90
        assert len(kept) == len(files) or total + sizes[len(files) - len(kept) - 1] > 70
