"""Tasks of string retrieval: what is asked for stands in the context, among others like it.

Names are short words and values four digits where SCBench has UUIDs, which small models can't copy.
"""

import itertools
import random

from midfill_lab.bench.scbench.packages import PackageTexts
from midfill_lab.bench.scbench.samples import Draft, Turn, take_items

ADJECTIVES = ("amber", "brisk", "calm", "dusty", "early", "faint", "grand", "hollow", "ivory",
    "jolly", "keen", "lucky", "mellow", "noble", "olive", "proud")  # fmt: skip
NOUNS = ("anchor", "beacon", "candle", "dragon", "engine", "falcon", "garden", "harbor", "island",
    "jacket", "kettle", "ladder", "magnet", "needle", "orchard", "pillow")  # fmt: skip


def draw_names(rng: random.Random, count: int, separator: str) -> list[str]:
    """Return different names of two words; where these don't suffice, of two and a number."""
    names = [f"{first}{separator}{second}" for first in ADJECTIVES for second in NOUNS]
    rng.shuffle(names)
    rounds = range(-(-count // len(names)))
    return [f"{name}{separator}{i}" if i else name for i in rounds for name in names][:count]


def draw_codes(rng: random.Random, count: int) -> list[str]:
    """Return numbers of four digits; different ones where there are that many."""
    codes = range(1000, 10_000)
    drawn = rng.sample(codes, min(count, len(codes)))
    return [f"{code}" for code in drawn + rng.choices(codes, k=count - len(drawn))]


def key_value(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft pairs of keys and values in JSON; values are asked for by their keys."""
    pairs = dict(zip(draw_names(rng, items, "-"), draw_codes(rng, items), strict=True))
    lines = "".join(f'    "{key}": "{value}",\n' for key, value in pairs.items())
    asked = rng.sample(sorted(pairs), turns)
    return Draft(f"{{\n{lines}}}\n", tuple(ask_value(key, pairs[key]) for key in asked))


def ask_value(key: str, value: str) -> Turn:
    """Return the question for a pair's value."""
    return Turn(f'\nThe value of "{key}": "', f'{value}"', "substring", (value,))


def prefix_suffix(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft strings of which many begin or end alike; one is asked for by both of its ends."""
    side = int((2 * items) ** 0.5) + 2
    starts, ends = draw_names(rng, side, "-"), draw_names(rng, side, "-")
    every = [(start, end) for start in starts for end in ends]
    codes = draw_codes(rng, items)
    strings = {
        (start, end): f"{start}-{code}-{end}"
        for (start, end), code in zip(rng.sample(every, items), codes, strict=True)
    }
    questions = tuple(
        Turn(
            f'\nThe string that begins with "{start}" and ends with "{end}": "',
            f'{strings[start, end]}"',
            "substring",
            (strings[start, end],),
            tokens=24,
        )
        for start, end in rng.sample(sorted(strings), turns)
    )
    return Draft("".join(f"{string}\n" for string in strings.values()), questions)


_CHAIN = 3


def multi_hop(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft chains of three variables among sentences; all with a chain's value are asked for."""
    names = iter(draw_names(rng, _CHAIN * turns, "_"))
    hidden: list[tuple[float, str]] = []
    questions = []
    for value in draw_codes(rng, turns):
        chain = [next(names) for _ in range(_CHAIN)]
        links = [f"VAR {chain[0]} = {value}"]
        links += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(chain)]
        hidden += zip(sorted(rng.random() for _ in links), links, strict=True)
        questions.append(
            Turn(
                f"\nThe variables with the value {value}:",
                f" {', '.join(chain)}",
                "share",
                tuple(chain),
                tokens=30,
            )
        )
    lines = take_items(rng, texts.sentences, items, "sentences of documentation")
    return Draft(hide_lines(lines, hidden), tuple(questions))


def hide_lines(lines: list[str], hidden: list[tuple[float, str]]) -> str:
    """Return lines with others between them; those of equal place stay in order.

    Args:
        lines: without line breaks.
        hidden: (depth from 0 to 1, line) of each.
    """
    count = len(lines)
    placed = ((depth, number, line) for number, (depth, line) in enumerate(hidden))
    for depth, _, line in sorted(placed, reverse=True):
        lines.insert(round(depth * count), line)
    return "".join(f"{line}\n" for line in lines)
