"""SCBench's twelve tasks by name.

Source: Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods", ICLR 2025,
arXiv 2412.10319. Its data aren't used: contexts of the same kinds are generated at any length.
"""

from dataclasses import dataclass
from typing import Literal

from midfill.errors import OptionError
from midfill_lab.bench.scbench.global_information import many_shot, math_find, summary
from midfill_lab.bench.scbench.mixed import repository_and_key_value, summary_with_needles
from midfill_lab.bench.scbench.samples import DraftMaker
from midfill_lab.bench.scbench.semantic_retrieval import (
    chinese_questions,
    english_questions,
    multiple_choice,
    repository,
)
from midfill_lab.bench.scbench.string_retrieval import key_value, multi_hop, prefix_suffix

Capability = Literal["string retrieval", "semantic retrieval", "global information", "multi-task"]


@dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
        name: as SCBench's data call it.
        capability: what it is said to need.
        measure: how answers are scored, in words.
        draft: makes its contexts.
    """

    name: str
    capability: Capability
    measure: str
    draft: DraftMaker


TASKS = {
    task.name: task
    for task in (
        Task("kv", "string retrieval", "value in the answer", key_value),
        Task("prefix_suffix", "string retrieval", "string in the answer", prefix_suffix),
        Task("vt", "string retrieval", "share of the variables", multi_hop),
        Task("repoqa", "semantic retrieval", "function reproduced", repository),
        Task("qa_eng", "semantic retrieval", "answer contained", english_questions),
        Task("qa_chn", "semantic retrieval", "F1 of characters", chinese_questions),
        Task("choice_eng", "semantic retrieval", "right letter", multiple_choice),
        Task("many_shot", "global information", "right label", many_shot),
        Task("mf", "global information", "first number right", math_find),
        Task("summary", "global information", "ROUGE-Lsum", summary),
        Task("summary_with_needles", "multi-task", "ROUGE-Lsum; number", summary_with_needles),
        Task("repoqa_and_kv", "multi-task", "function; value", repository_and_key_value),
    )
}


def choose_tasks(names: str | None) -> list[Task]:
    """Return the tasks that names separated by commas stand for; None takes all.

    Raises:
        OptionError: there is no such task, or none is named.
    """
    if names is None:
        return list(TASKS.values())
    wanted = list(dict.fromkeys(filter(None, (name.strip() for name in names.split(",")))))
    unknown = [name for name in wanted if name not in TASKS]
    if unknown or not wanted:
        what = f"there is no task {unknown[0]!r}" if unknown else "--tasks names nothing"
        raise OptionError(f"{what}; there are {', '.join(TASKS)}")
    return [TASKS[name] for name in wanted]
