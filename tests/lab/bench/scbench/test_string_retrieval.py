"""Answers of string retrieval stand in the context, once."""

import json
import random
import re

from midfill_lab.bench.scbench.packages import PackageTexts
from midfill_lab.bench.scbench.string_retrieval import (
    draw_codes,
    draw_names,
    hide_lines,
    key_value,
    multi_hop,
    prefix_suffix,
)


def test_values_are_found_by_their_keys(texts: PackageTexts) -> None:
    draft = key_value(random.Random(1), 300, 5, texts)
    pairs = json.loads(re.sub(r",\n}", "}", draft.context))
    assert len(pairs) == 300
    for turn in draft.turns:
        (key,) = re.findall(r'"(.+)": "$', turn.question)
        assert turn.accepted == (pairs[key],)
        assert turn.gold == f'{pairs[key]}"'


def test_one_string_begins_and_ends_as_asked_and_others_with_either(texts: PackageTexts) -> None:
    draft = prefix_suffix(random.Random(2), 60, 5, texts)
    strings = draft.context.splitlines()
    assert len(set(strings)) == 60
    shared = 0
    for turn in draft.turns:
        start, end = re.findall(r'"(.+?)"', turn.question)[:2]
        found = [one for one in strings if one.startswith(f"{start}-") and one.endswith(f"-{end}")]
        assert tuple(found) == turn.accepted
        shared += sum(one.startswith(f"{start}-") or one.endswith(f"-{end}") for one in strings) - 1
    assert shared >= 5, "distractors share an end"


def test_chains_lead_to_their_values(texts: PackageTexts) -> None:
    draft = multi_hop(random.Random(3), 40, 4, texts)
    variables: dict[str, str] = {}
    for line in draft.context.splitlines():
        if match := re.fullmatch(r"VAR (\w+) = (?:VAR )?(\w+)", line):
            variables[match[1]] = variables.get(match[2], match[2])
    for turn in draft.turns:
        (value,) = re.findall(r"value (\d+):", turn.question)
        holders = [name for name, found in variables.items() if found == value]
        assert holders == list(turn.accepted)
        assert len(holders) == 3


def test_names_and_codes_differ_as_long_as_there_are_enough() -> None:
    names = draw_names(random.Random(0), 1000, "-")
    assert len(set(names)) == 1000
    assert len(set(draw_codes(random.Random(0), 9000))) == 9000
    assert len(draw_codes(random.Random(0), 9500)) == 9500


def test_lines_of_equal_place_stay_in_order() -> None:
    assert hide_lines(["a", "b"], [(0.5, "x"), (0.5, "y"), (1.0, "z")]) == "a\nx\ny\nb\nz\n"
