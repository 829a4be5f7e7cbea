"""EpiCache on the default model: what a dialogue's facts are worth in a fifth of its KV.

Dialogues of four topics with five facts each, and two sessions per topic; questions repeat the
words of facts. Each fact is asked for, and scored by the mean log probability of its answer. -s
shows all numbers; differences are paired, question by question. DIALOGUES=4 asks about four.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from default_model import DefaultModel

from benchmarks.conversations.dialogues import Dialogue, draw_dialogue
from midfill.methods.episodes.clustering import Episodes
from midfill.methods.episodes.method import EpisodicMethod
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.registry import resolve_method

pytestmark = [
    pytest.mark.slow, pytest.mark.quality, pytest.mark.real_model, pytest.mark.timeout(900),
]  # fmt: skip

DIALOGUES, BLOCK = int(os.environ.get("DIALOGUES", "1")), 256


class Asking:
    """Asks the default model about the dialogues, under any method."""

    def __init__(self, model: DefaultModel, stack: ExitStack) -> None:
        self._model, tokenizer = model, model.checkpoint.tokenizer
        self._methods: dict[str, Method | None] = {"": None}
        self._answers = stack.enter_context(model.forced_answers(8000, self._methods))
        self._found: dict[str, np.ndarray] = {}
        self.routed: list[bool] = []
        self.dialogues = [draw_dialogue("repeated", seed) for seed in range(DIALOGUES)]
        self.prompts: list[tuple[Dialogue, int, list[int], list[int]]] = []
        for dialogue in self.dialogues:
            text = tokenizer.encode(dialogue.text)
            for asked in dialogue.asked:
                end = tokenizer.encode_continuation(asked.question)
                answer = tokenizer.encode_continuation(asked.answer)
                self.prompts.append((dialogue, asked.line, [*text, *end], answer))
        self.history = len(text)

    def use(self, name: str, options: str, **changes: object) -> str:
        """Make a method one that can be asked; return its name."""
        budget = f"budget=0.2,block={BLOCK}"
        found = resolve_method(f"epicache:{budget}{options}")
        assert isinstance(found, ModelSpecific)
        method = cast("EpisodicMethod", found.for_model(self._model.served))
        self._methods[name] = replace(method, **changes)
        return name

    def scores(self, name: str) -> np.ndarray:
        """Return each answer's mean log probability per token."""
        if name not in self._found:
            found = []
            for dialogue, line, prompt, answer in self.prompts:
                rows = self._answers.logprobs(name, prompt, answer)
                found.append(rows[np.arange(len(rows)), answer].mean())
                if name == "epicache":
                    self.routed.append(self._is_right(line, len(dialogue.lines)))
            self._found[name] = np.array(found)
            mean, first = self._found[name].mean(), np.exp(self._found[name]).mean()
            print(f"\n{name or 'all keys':12} {mean:7.3f}  probability {first:.3f}", end="")
        return self._found[name]

    def _is_right(self, line: int, lines: int) -> bool:
        """Whether the last question went to the episode that a line is in."""
        held = self._answers.engine._methods._episodes._state.store(256)._held
        (conversation, number) = next(key for key in reversed(held) if isinstance(key[1], int))  # type: ignore[index]
        episodes = held[conversation]
        assert isinstance(episodes, Episodes)
        return bool(episodes.labels[line // 4] == number)


def check_better(better: np.ndarray, worse: np.ndarray) -> None:
    """Check that the mean difference of pairs is above 0 with all of its 95% interval."""
    difference = better - worse
    radius = 2.09 * difference.std(ddof=1) / np.sqrt(len(difference))
    print(f"\n  difference {difference.mean():.3f} ±{radius:.3f}", end="")
    assert difference.mean() > radius


@pytest.fixture(scope="module")
def asking(default_model: DefaultModel) -> Iterator[Asking]:
    with ExitStack() as stack:
        asking = Asking(default_model, stack)
        asking.scores("")
        asking.scores(asking.use("epicache", ""))
        yield asking


def test_the_nearest_episode_s_cache_answers_better_than_another_one_s(asking: Asking) -> None:
    wrong = asking.scores(asking.use("wrong", "", route="next"))
    check_better(asking.scores("epicache"), wrong)


@pytest.mark.parametrize("scorer", ["summary", "window", "random"])
def test_episodes_answer_better_than_one_cache(asking: Asking, scorer: str) -> None:
    one = asking.scores(asking.use(scorer, f",scorer={scorer}"))
    check_better(asking.scores("epicache"), one)


def test_questions_go_to_the_episode_that_has_the_answer(asking: Asking) -> None:
    print(f"\nrouted {np.mean(asking.routed):.2f}, {asking.history} tokens", end="")
    assert np.mean(asking.routed) > 0.9
