"""Files that a client shortens anew with each keystroke keep their ends."""

import pytest

from midfill.infill.context import ContextFile
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import TextSegment
from midfill.infill.planner import Planner
from midfill.infill.request import InfillRequest
from midfill.infill.shortened_files import ShortenedFiles

TEXT = "".join(f"def function_{number}(x):\n    return x * {number}\n" for number in range(40))
INSIDE = TEXT.index("return x * 20") + 8  # inside a line
LINE_END = TEXT.index("    return x * 20")


def shown(files: ShortenedFiles, length: int, text: str = TEXT) -> str:
    """Show the beginning of a file, as templates hold it."""
    (file,) = files.keep_and_record([ContextFile(text[:length].rstrip() + "\n", "a.py")])
    assert file.path == "a.py"
    return file.text


def test_a_file_whose_end_moves_is_shown_as_it_was() -> None:
    files = ShortenedFiles()
    first = shown(files, INSIDE)
    assert first == TEXT[:INSIDE].rstrip() + "\n"
    for length in (INSIDE - 3, INSIDE - 20, INSIDE + 9, LINE_END, INSIDE + 100, INSIDE):
        assert shown(files, length) == first


def test_what_has_won_or_lost_much_is_shown_as_it_comes() -> None:
    for length in (INSIDE // 2, 2 * INSIDE):
        files = ShortenedFiles()
        shown(files, INSIDE)
        assert shown(files, length) == TEXT[:length].rstrip() + "\n"
        assert shown(files, length - 7) == TEXT[:length].rstrip() + "\n"


def test_lines_that_were_written_or_deleted_at_the_end_are_seen_at_once() -> None:
    for length in (LINE_END + 60, LINE_END - 25):
        start = TEXT.rfind("\n", 0, length) + 1
        files = ShortenedFiles()
        shown(files, LINE_END)
        assert shown(files, start) == TEXT[:start]


def test_a_change_anywhere_else_is_seen_at_once() -> None:
    files = ShortenedFiles()
    shown(files, INSIDE)
    changed = TEXT.replace("function_3", "other")
    assert shown(files, INSIDE - 2, changed) == changed[: INSIDE - 2].rstrip() + "\n"


def test_files_are_told_apart_by_their_paths() -> None:
    files = ShortenedFiles()
    one, two = ContextFile(TEXT[:INSIDE], "a.py"), ContextFile(TEXT[: INSIDE - 5], "b.py")
    assert files.keep_and_record([one]) == (one,)
    assert files.keep_and_record([two]) == (two,)
    nameless = [ContextFile(TEXT[:length]) for length in (INSIDE, INSIDE - 5)]
    assert [files.keep_and_record([file])[0] for file in nameless] == nameless


@pytest.mark.parametrize("template", [True, False])
def test_only_files_in_templates_are_shortened_by_clients(template: bool) -> None:
    format = FimFormat("plain", *(Sentinel(f"<{name}>", i) for i, name in enumerate("PSM")))
    planner = Planner(format)

    def context(length: int) -> str:
        text = TEXT[:length]
        if template:
            commented = "".join(f"# {line}\n" for line in text.split("\n"))
            prompt = f"<P># Path: a.py\n{commented}# main.py\nx = <S>\n<M>"
            layout = planner.plan_and_record(InfillRequest(prefix=prompt, raw=True))
        else:
            files = (ContextFile(text, "a.py"),)
            layout = planner.plan_and_record(InfillRequest(prefix="x = ", context=files))
        texts = [one for one in layout.segments if isinstance(one, TextSegment)]
        (shown,) = (one.text for one in texts if one.role == "context")
        return shown

    assert (context(INSIDE) == context(INSIDE - 5)) == template
