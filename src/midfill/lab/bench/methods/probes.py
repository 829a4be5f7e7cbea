"""Probe: a text with known answers, and how much of them a method leaves the model.

The known answers are in the text itself (teacher forcing), so one pass scores all of them: a
greedy answer would be the known one exactly where each of its tokens is the likeliest. SCBench
appends the known answers between turns in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from midfill.lab.bench.methods.session import MethodSession

Task = Literal["needle", "multi-key", "turns", "requests", "code"]


@dataclass(frozen=True)
class Probe:
    """A text for the model.

    Attributes:
        name: unique in a run.
        task: what it measures.
        label: of rows that belong together: a needle's depth, a shared context's kind.
        tokens: the text.
        compress_after: how many of its first tokens the method sees and compresses.
        answers: start and end of each known answer in ``tokens``.
    """

    name: str
    task: Task
    label: str
    tokens: tuple[int, ...]
    compress_after: int
    answers: tuple[tuple[int, int], ...]


class Score(msgspec.Struct, frozen=True):
    """How a known answer fared.

    Attributes:
        tokens: of the answer.
        likeliest: whether each was the likeliest, so that a greedy answer would be this one.
        logprob: mean log-probability of its tokens, in nats.
        divergence: mean Kullback-Leibler divergence from full KV's distributions, in nats.
        agreement: share of its tokens at which full KV has the same likeliest token.
    """

    tokens: int
    likeliest: bool
    logprob: float
    divergence: float
    agreement: float


def score_probe(
    session: MethodSession, probe: Probe, method: str, full: torch.Tensor
) -> list[Score]:
    """Return the score of each of a probe's answers under a method.

    Args:
        session: the model.
        probe: the text.
        method: its specification.
        full: what ``read_probe`` returns for full KV.
    """
    return _scores(probe, read_probe(session, probe, method), full)


def read_probe(session: MethodSession, probe: Probe, method: str) -> torch.Tensor:
    """Return the distributions of all tokens from the first answer's first one on."""
    first = probe.answers[0][0]
    return session.log_likelihoods(probe.tokens, method, probe.compress_after, first)


def _scores(probe: Probe, found: torch.Tensor, full: torch.Tensor) -> list[Score]:
    first = probe.answers[0][0]
    scores = []
    for start, end in probe.answers:
        rows, expected = found[start - first : end - first], full[start - first : end - first]
        answer = torch.tensor(probe.tokens[start:end])
        top = rows.argmax(dim=-1)
        divergence = (expected.exp() * (expected - rows)).sum(dim=-1)
        scores.append(
            Score(
                tokens=end - start,
                likeliest=bool((top == answer).all()),
                logprob=float(rows.gather(1, answer[:, None]).mean()),
                divergence=max(float(divergence.mean()), 0.0),
                agreement=float((top == expected.argmax(dim=-1)).float().mean()),
            )
        )
    return scores


@dataclass(frozen=True)
class Question:
    """What is asked about a context, and what is known to be right."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]


def served_probe(
    name: str, task: Task, label: str, context: Sequence[int], question: Question
) -> Probe:
    """Return the probe of a prompt as it is served: the method sees the question, too."""
    asked = (*context, *question.tokens)
    answer = (len(asked), len(asked) + len(question.answer))
    return Probe(name, task, label, (*asked, *question.answer), len(asked), (answer,))


def turns_probe(
    name: str, label: str, context: Sequence[int], questions: Sequence[Question]
) -> Probe:
    """Return SCBench's multi-turn mode: the method sees the first question, the others follow."""
    tokens = [*context]
    answers = []
    for question in questions:
        tokens += question.tokens
        answers.append((len(tokens), len(tokens) + len(question.answer)))
        tokens += question.answer
    return Probe(name, "turns", label, tuple(tokens), answers[0][0], tuple(answers))


def request_probes(
    name: str, label: str, context: Sequence[int], questions: Sequence[Question]
) -> list[Probe]:
    """Return SCBench's multi-request mode: the method sees the context alone."""
    return [
        Probe(
            f"{name}/{number}",
            "requests",
            label,
            (*context, *question.tokens, *question.answer),
            len(context),
            (
                (
                    len(context) + len(question.tokens),
                    len(context) + len(question.tokens) + len(question.answer),
                ),
            ),
        )
        for number, question in enumerate(questions)
    ]
