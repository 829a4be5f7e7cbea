"""Two kinds of questions take turns."""

import random
import re

from midfill_lab.bench.scbench.mixed import repository_and_key_value, summary_with_needles
from midfill_lab.bench.scbench.packages import PackageTexts


def test_summaries_and_pass_codes(texts: PackageTexts) -> None:
    draft = summary_with_needles(random.Random(0), 8, 5, texts)
    assert [turn.metric for turn in draft.turns] == ["rouge", "number"] * 2 + ["rouge"]
    codes = dict(re.findall(r"^(The pass code .+ is) (\d+)\.$", draft.context, re.MULTILINE))
    assert len(codes) == 8
    for turn in draft.turns[1::2]:
        assert turn.accepted == (codes[turn.question.strip()],)
    for turn in draft.turns[::2]:
        for line in turn.gold.splitlines():
            assert line.removeprefix("- ") in draft.context


def test_functions_and_values(texts: PackageTexts) -> None:
    draft = repository_and_key_value(random.Random(0), 20, 5, texts)
    assert [turn.metric for turn in draft.turns] == ["function", "substring"] * 2 + ["function"]
    pairs = dict(re.findall(r'^# "(.+)": "(\d+)"$', draft.context, re.MULTILINE))
    for turn in draft.turns[1::2]:
        (key,) = re.findall(r'"(.+)": "$', turn.question)
        assert turn.accepted == (pairs[key],)
    for turn in draft.turns[::2]:
        assert draft.context.count(turn.gold) == 1
