"""The bound on remembered documents holds for real bytes: texts, objects and search keys."""

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest

from midfill.infill.answer_history import GivenAnswer
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.request import InfillRequest, RequestedLayout
from midfill.infill.window import WindowRule

FORMAT = FimFormat("psm", Sentinel("<PRE>", 1), Sentinel("<SUF>", 2), Sentinel("<MID>", 3))
LIMIT = 400_000


def source(seed: int, lines: int, letter: str = "x") -> str:
    chance = random.Random(seed)
    return "".join(
        f"{letter}{chance.randrange(10**6)} = {chance.randrange(10**9)}\n" for _ in range(lines)
    )


def ask(
    planner: Planner, prefix: str, suffix: str, number: int, layout: RequestedLayout = "auto"
) -> None:
    request = InfillRequest(
        prefix=prefix,
        suffix=suffix,
        layout=layout,
        tenant=str(number % 7),
        document=f"{number}.py",
    )
    planner.plan_and_record(request)


def open_small(planner: Planner, number: int) -> None:
    ask(planner, source(number, 2), "", number)


def open_empty(planner: Planner, number: int) -> None:
    ask(planner, "", "", number)


def open_wide_characters(planner: Planner, number: int) -> None:
    text = source(number, 20, "漢")
    ask(planner, text, text[:100], number)


def answer_at_length(planner: Planner, number: int) -> None:
    text = source(number, 20)
    ask(planner, text, "", number)
    (last,) = list(planner._documents._recent)[-1:]
    for place in range(6):
        answer = source(number + place, 40)
        planner.record_answer(last, GivenAnswer.at(text + str(place), answer, 1))


def keep_a_fixed_head(planner: Planner, number: int) -> None:
    text = source(number, 60)
    ask(planner, text, "end", number, "efim")
    ask(planner, text + "typed", "end", number, "efim")


def type_and_move(planner: Planner, number: int) -> None:
    text = source(number, 40)
    for step in range(12):
        caret = 50 * step % len(text)
        text = f"{text[:caret]}typed{text[caret:]}"
        ask(planner, text[:caret], text[caret:], number)


def follow_a_long_source(planner: Planner, number: int) -> None:
    text = source(number, 400)
    ask(planner, text[:4000], text[4000:], number)


def jump_in_a_long_source(planner: Planner, number: int) -> None:
    text = source(number, 900)
    for caret in range(2000, len(text), 1500):
        ask(planner, text[:caret], text[caret:], number)


@pytest.mark.parametrize(
    ("use", "documents"),
    [
        (open_small, 300),
        (open_empty, 300),
        (open_wide_characters, 300),
        (answer_at_length, 100),
        (keep_a_fixed_head, 300),
        (type_and_move, 100),
        (follow_a_long_source, 60),
        (jump_in_a_long_source, 40),
    ],
)
def test_documents_take_no_more_bytes_than_their_bound(
    use: Callable[[Planner, int], None], documents: int
) -> None:
    """Without it, that many documents would take more: 1.3 times as much, most many times."""
    rule = WindowRule(before=1000, after=300)
    options = PlannerOptions(fragments=True, max_document_bytes=LIMIT, window=rule)
    planner = Planner(FORMAT, options)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(documents):
            use(planner, number)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.3 * LIMIT < after - before <= LIMIT
    assert 5 <= len(planner._documents) < documents
