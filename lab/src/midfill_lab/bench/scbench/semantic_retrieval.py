"""Tasks of semantic retrieval: what is asked for is described in other words than it stands there.

The people and their lives are made up, so that no model knows the answers by heart.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from midfill.errors import MidfillError
from midfill_lab.bench.scbench.packages import Function, PackageTexts
from midfill_lab.bench.scbench.samples import Draft, Turn, take_items
from midfill_lab.bench.scbench.string_retrieval import hide_lines


def repository(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft functions of packages; one is to be written once more by what it does (RepoQA)."""
    functions = take_items(rng, texts.functions, items, "short functions with a docstring")
    asked = rng.sample(functions, turns)
    return Draft(
        "".join(f"{each.code}\n\n" for each in functions),
        tuple(ask_function(each, functions) for each in asked),
    )


def ask_function(function: Function, functions: Sequence[Function]) -> Turn:
    """Return the question for a function by its description."""
    others = tuple(each.code for each in functions if each != function)
    return Turn(
        f"\n# The function from above that does this: {function.description}\n",
        f"{function.code}\n",
        "function",
        (function.code,),
        others,
        tokens=96,
        paragraph=True,
    )


class _Relation(NamedTuple):
    """What is told of people: with a name and a value, and how it is asked."""

    statement: str
    question: str
    values: tuple[str, ...]


_FIRST = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas",
    "Karin", "Louis", "Maria", "Nadia", "Oscar", "Paula")  # fmt: skip
_LAST = ("Abbott", "Becker", "Castro", "Dalton", "Ellis", "Fischer", "Garner", "Hansen", "Ingram",
    "Jensen", "Keller", "Larsen", "Moreau", "Novak", "Olsen", "Porter")  # fmt: skip
_RELATIONS = (
    _Relation("{} has had a flat in {} since last spring.", "In which city does {} live?",
        ("Lisbon", "Oslo", "Vienna", "Dublin", "Athens", "Prague", "Madrid", "Warsaw", "Rome")),
    _Relation("{} earns a living as a {}.", "What is the profession of {}?",
        ("baker", "pilot", "nurse", "lawyer", "farmer", "painter", "teacher", "plumber", "tailor")),
    _Relation("{} practises the {} every evening.", "Which instrument does {} play?",
        ("violin", "piano", "flute", "guitar", "cello", "trumpet", "drums", "harp", "organ")),
    _Relation("{} goes to work by {}.", "How does {} get to the office?",
        ("tram", "bicycle", "train", "boat", "bus", "car", "scooter", "taxi", "ferry")),
)  # fmt: skip

_SENTENCES_PER_FACT = 2


class _Fact(NamedTuple):
    name: str
    relation: _Relation
    value: str


def _facts(rng: random.Random, count: int) -> list[_Fact]:
    """Return facts about people, of whom each has one of a kind, at most."""
    every = [
        (f"{first} {last}", relation)
        for first in _FIRST
        for last in _LAST
        for relation in _RELATIONS
    ]
    if count > len(every):
        raise MidfillError(
            f"{count} facts are needed, there are {len(every)}: choose a shorter --length"
        )
    return [
        _Fact(name, relation, rng.choice(relation.values))
        for name, relation in rng.sample(every, count)
    ]


def _fact_text(rng: random.Random, facts: Sequence[_Fact], items: int, texts: PackageTexts) -> str:
    """Return the facts among sentences of documentation."""
    sentences = take_items(rng, texts.sentences, items, "sentences of documentation")
    hidden = [
        (rng.random(), each.relation.statement.format(each.name, each.value)) for each in facts
    ]
    return hide_lines(sentences, hidden)


def english_questions(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft facts about people among other sentences, with questions about them."""
    facts = _facts(rng, turns + items // _SENTENCES_PER_FACT)
    asked = facts[:turns]
    questions = tuple(
        Turn(
            f"\nQuestion: {each.relation.question.format(each.name)}\nAnswer:",
            f" {each.value}",
            "substring",
            (each.value,),
        )
        for each in asked
    )
    return Draft(_fact_text(rng, facts, items, texts), questions)


def multiple_choice(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft the same with four answers to choose from."""
    facts = _facts(rng, turns + items // _SENTENCES_PER_FACT)
    questions = []
    for each in facts[:turns]:
        wrong = [value for value in each.relation.values if value != each.value]
        options = [each.value, *rng.sample(wrong, 3)]
        rng.shuffle(options)
        listed = "".join(
            f"{letter}. {option}\n" for letter, option in zip("ABCD", options, strict=True)
        )
        letter = "ABCD"[options.index(each.value)]
        question = each.relation.question.format(each.name)
        questions.append(
            Turn(
                f"\nQuestion: {question}\n{listed}Answer:",
                f" {letter}",
                "choice",
                (letter,),
                tokens=8,
            )
        )
    return Draft(_fact_text(rng, facts, items, texts), tuple(questions))


_SURNAMES, _GIVEN = (
    "王李张刘陈杨赵黄周吴",
    ("小明", "建国", "丽华", "志强", "秀英", "海燕", "文静", "国栋"),
)
_PLACES = ("北京", "上海", "广州", "成都", "武汉", "西安", "杭州", "南京", "天津", "重庆")
_JOBS = ("医生", "教师", "司机", "厨师", "律师", "画家", "农民", "记者", "护士", "木匠")
_THINGS = ("公园", "图书馆", "火车站", "市场", "博物馆", "饭店", "大学", "机场", "剧院", "医院")
_QUALITIES = ("大", "漂亮", "安静", "热闹", "有名", "干净", "古老", "远", "新", "拥挤")
_CHINESE_RELATIONS = (
    _Relation("{}去年搬到了{}。", "{}现在住在哪里", _PLACES),
    _Relation("{}的工作是{}。", "{}是做什么的", _JOBS),
)


def chinese_questions(rng: random.Random, items: int, turns: int, texts: PackageTexts) -> Draft:
    """Draft facts in Chinese among Chinese sentences, with questions about them."""
    people = [(f"{last}{first}", each) for last in _SURNAMES for first in _GIVEN
        for each in _CHINESE_RELATIONS]  # fmt: skip
    count = turns + min(items // 3, len(people) - turns)
    facts = [_Fact(name, each, rng.choice(each.values)) for name, each in rng.sample(people, count)]
    lines = [
        f"{rng.choice(_PLACES)}的{rng.choice(_THINGS)}很{rng.choice(_QUALITIES)}。"
        for _ in range(items)
    ]
    hidden = [
        (rng.random(), each.relation.statement.format(each.name, each.value)) for each in facts
    ]
    questions = tuple(
        Turn(
            f"\n问题: {each.relation.question.format(each.name)}\n答案:",
            f"{each.value}",
            "characters",
            (each.value,),
        )
        for each in facts[:turns]
    )
    return Draft(hide_lines(lines, hidden), questions)
