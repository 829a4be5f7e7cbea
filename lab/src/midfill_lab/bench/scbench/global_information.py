"""Tasks of global information: the whole context has to be taken into account, or much of it."""

import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from midfill_lab.bench.scbench.packages import PackageTexts, Passage
from midfill_lab.bench.scbench.samples import Draft, Turn, take_items
from midfill_lab.bench.scbench.string_retrieval import ADJECTIVES

_STATISTICS: Mapping[str, Callable[[Sequence[int]], int]] = {
    "largest number": max,
    "smallest number": min,
    "median": lambda numbers: int(median(numbers)),
    "second largest number": lambda numbers: sorted(numbers)[-2],
    "second smallest number": lambda numbers: sorted(numbers)[1],
}
_NUMBERS_PER_LINE = 10


def math_find(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft a list of numbers from 100 to 999; statistics of it are asked for."""
    numbers = [
        rng.randrange(100, 1000) for _ in range(items + 1 - items % 2)
    ]  # odd: the median is one
    rows = [
        numbers[at : at + _NUMBERS_PER_LINE] for at in range(0, len(numbers), _NUMBERS_PER_LINE)
    ]
    text = "".join(f"{', '.join(map(str, row))},\n" for row in rows)
    asked = rng.sample(sorted(_STATISTICS), len(_STATISTICS))
    questions = []
    for number in range(turns):
        name = asked[number % len(asked)]
        value = str(_STATISTICS[name](numbers))
        questions.append(
            Turn(f"\nThe {name} in the list is", f" {value}", "number", (value,), tokens=6)
        )
    return Draft(f"numbers = [\n{text}]\n", tuple(questions))


_CATEGORIES = {
    "dax": ("fox", "owl", "bear", "wolf", "hare", "crow", "seal", "toad", "goat", "mole"),
    "wug": ("oak", "pine", "elm", "fern", "moss", "reed", "palm", "ivy", "rose", "lily"),
    "fep": ("hammer", "saw", "drill", "file", "wrench", "pliers", "axe", "chisel", "rake", "hoe"),
    "blick": ("bread", "rice", "soup", "cheese", "honey", "butter", "salt", "sugar", "tea", "milk"),
}


def many_shot(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft examples of things with made-up names of their classes; new things are asked for."""
    every = [
        (f"{adjective} {thing}", label)
        for label, things in _CATEGORIES.items()
        for thing in things
        for adjective in ADJECTIVES
    ]
    rng.shuffle(every)
    asked, shown = every[:turns], every[turns:]
    lines = [shown[number % len(shown)] for number in range(items)]
    return Draft(
        "".join(f"{thing} -> {label}\n" for thing, label in lines),
        tuple(
            Turn(f"\n{thing} ->", f" {label}", "label", (label,), tokens=8)
            for thing, label in asked
        ),
    )


PASSAGES_PER_PART = 4


def summary(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft parts of documentation; what a part's passages say first is the summary of the part."""
    parts = draw_parts(rng, items, texts)
    asked = sorted(rng.sample(range(len(parts)), turns))
    return Draft(
        "".join(part_text(number, part) for number, part in enumerate(parts)),
        tuple(ask_summary(number, parts[number]) for number in asked),
    )


def draw_parts(rng: random.Random, count: int, texts: PackageTexts) -> list[list[Passage]]:
    """Return parts of so many passages each."""
    wanted = PASSAGES_PER_PART * count
    passages = take_items(rng, texts.passages, wanted, "passages of documentation")
    return [passages[at : at + PASSAGES_PER_PART] for at in range(0, wanted, PASSAGES_PER_PART)]


def part_text(number: int, part: Sequence[Passage]) -> str:
    """Return a part as it stands in the context."""
    paragraphs = "".join(f"{each.lead} {each.body}\n\n" for each in part)
    return f"Part {number + 1}\n\n{paragraphs}"


def ask_summary(number: int, part: Sequence[Passage]) -> Turn:
    """Return the question for a part's summary."""
    gold = "".join(f"- {each.lead}\n" for each in part)
    return Turn(
        f"\nSummary of part {number + 1}, a line for each of its paragraphs:\n",
        gold,
        "rouge",
        (gold,),
        tokens=96,
        paragraph=True,
    )
