"""Multi-task: questions of two kinds about one context take turns."""

import random

from midfill_lab.bench.scbench.global_information import ask_summary, draw_parts, part_text
from midfill_lab.bench.scbench.packages import PackageTexts
from midfill_lab.bench.scbench.samples import Draft, Turn, take_items
from midfill_lab.bench.scbench.semantic_retrieval import ask_function
from midfill_lab.bench.scbench.string_retrieval import ask_value, draw_codes, draw_names


def summary_with_needles(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft parts of documentation with a pass code in each; summaries and codes are asked for."""
    parts = draw_parts(rng, items, texts)
    codes = dict(zip(draw_names(rng, items, " "), draw_codes(rng, items), strict=True))
    names = list(codes)
    context = "".join(
        f"{part_text(number, part)}The pass code of the {name} is {codes[name]}.\n\n"
        for number, (name, part) in enumerate(zip(names, parts, strict=True))
    )
    asked = rng.sample(range(items), turns)
    questions = tuple(
        _ask_code(names[number], codes[names[number]])
        if turn % 2
        else ask_summary(number, parts[number])
        for turn, number in enumerate(asked)
    )
    return Draft(context, questions)


def _ask_code(name: str, code: str) -> Turn:
    return Turn(f"\nThe pass code of the {name} is", f" {code}", "number", (code,), tokens=12)


def repository_and_key_value(
    rng: random.Random, items: int, turns: int, texts: PackageTexts
) -> Draft:
    """Draft functions with a pair of key and value before each; both kinds are asked for."""
    functions = take_items(rng, texts.functions, items, "short functions with a docstring")
    pairs = dict(zip(draw_names(rng, items, "-"), draw_codes(rng, items), strict=True))
    keys = list(pairs)
    context = "".join(
        f'# "{key}": "{pairs[key]}"\n\n{each.code}\n\n'
        for key, each in zip(keys, functions, strict=True)
    )
    asked = rng.sample(range(items), turns)
    questions = tuple(
        ask_value(keys[number], pairs[keys[number]])
        if turn % 2
        else ask_function(functions[number], functions)
        for turn, number in enumerate(asked)
    )
    return Draft(context, questions)
