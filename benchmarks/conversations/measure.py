"""EpiCache on long conversations: where questions go, and what a small cache answers.

A question's answer is known, and generated token by token whatever is most likely; its score is
the mean log probability of its tokens. All variants keep as many keys, but for full KV. Each is
asked the same questions, so that differences are paired.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import msgspec
import numpy as np
import typer

from benchmarks.conversations.dialogues import KINDS, Dialogue, draw_dialogue
from benchmarks.conversations.routing import Router, Routing, shares
from benchmarks.report import difference_cell, publish
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.methods.episodes.method import EpisodicMethod
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.registry import OFF, resolve_method
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.models.sentence_encoder import SentenceEncoder
from midfill.system.files import write_file
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.methods.session import MethodSession
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.evaluation.summary import estimate_mean, estimate_share
from midfill_lab.reporting import ResultTable

FULL, OWN, TOKENS = "all keys", "epicache", "corrected means route"
ALPHA = "layers by sensitivity (alpha=1.1)"
BOUNDED = "epicache:budget=512,block=512"
VARIANTS: dict[str, tuple[str, Callable[[EpisodicMethod], EpisodicMethod]]] = {
    OWN: ("", lambda method: method),
    "another topic's cache": ("", lambda method: replace(method, route="next")),
    ALPHA: (",alpha=1.1", lambda method: method),
    "one cache, by the instruction alone": (",scorer=summary", lambda method: method),
    "one cache, by each block's last rows": (",scorer=window", lambda method: method),
    "one cache, at random": (",scorer=random", lambda method: method),
    TOKENS: ("", lambda method: replace(method, encode=None)),
}
"""Beside full KV: more options, and what changes in the method that is ready for a model."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What one variant made of one dialogue.

    Attributes:
        kind, seed: of the dialogue.
        variant: its name.
        logprobs: of each question's answer, per token.
    """

    kind: str
    seed: int
    variant: str
    logprobs: list[float]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a question about a long history held, in tokens of KV.

    Attributes:
        history: its tokens.
        variant: its name.
        peak: the most that were neither free nor evictable after any step.
        kept: once the answer's first token was there.
        kept_bytes: of the caches in host memory.
    """

    history: int
    variant: str
    peak: int
    kept: int
    kept_bytes: int


class ConversationsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    backend: str
    machine: Machine
    load: float
    method: str
    encoder: bool
    tokens: list[int]
    routing: list[Routing]
    answers: list[Answers]
    held: list[Held]


def measure_conversations(
    model: str,
    *,
    encoder: SentenceEncoder | None,
    method: str = "epicache:budget=0.2,block=256",
    routed: int = 10,
    dialogues: int = 3,
    histories: Sequence[int] = (2000, 7500),
    threads: int | None = None,
    earlier: ConversationsReport | None = None,
    progress: Callable[[str], None] = lambda _: None,
    save: Callable[[ConversationsReport], None] = lambda _: None,
) -> ConversationsReport:
    """Measure a method of episodes on dialogues of all kinds.

    Args:
        model: its name or path.
        encoder: finds topics; None: the model's embeddings do.
        method: the specification.
        routed: dialogues per kind whose questions are only routed.
        dialogues: per kind, whose questions are asked.
        histories: tokens of the histories whose KV is counted.
        threads: of the CPU; None takes all cores.
        earlier: an interrupted run's report, which is continued.
        progress: called with what is being done.
        save: called with the report so far.

    Raises:
        MidfillError: the model can't be loaded, or the earlier report is of something else.
    """
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), "auto")
    report = earlier or ConversationsReport(
        model=model, backend="", machine=describe_machine(), load=os.getloadavg()[0],
        method=method, encoder=encoder is not None, tokens=[], routing=[], answers=[], held=[],
    )  # fmt: skip
    if (report.model, report.method, report.encoder) != (model, method, encoder is not None):
        raise MidfillError("the earlier run measured something else: name another --json file")
    if not report.routing:
        progress("routing")
        router = Router(checkpoint, encoder)
        routing = [
            router.route(kind, seed, draw_dialogue(kind, seed))
            for kind in KINDS
            for seed in range(routed)
        ]
        report = msgspec.structs.replace(report, routing=routing)
        save(report)
    methods: dict[str, Method] = {}
    session = MethodSession(model, threads, methods)
    try:
        methods |= _variants(session, method, encoder)
        return _Asking(session, report, progress, save).run(dialogues, histories, list(methods))
    finally:
        session.close()


def _variants(
    session: MethodSession, method: str, encoder: SentenceEncoder | None
) -> dict[str, Method]:
    """Return the method and what it is compared with, ready for the model, by their names."""
    served = replace(session.served_model, embed=None if encoder is None else encoder.encode)
    found: dict[str, Method] = {}
    for name, (options, change) in VARIANTS.items():
        if encoder is None and name == TOKENS:
            continue
        settings = resolve_method(method + options)
        assert isinstance(settings, ModelSpecific)
        found[name] = change(cast("EpisodicMethod", settings.for_model(served)))
    return found


class _Asking:
    """Asks a model about dialogues; continues a report."""

    def __init__(
        self,
        session: MethodSession,
        report: ConversationsReport,
        progress: Callable[[str], None],
        save: Callable[[ConversationsReport], None],
    ) -> None:
        self._session, self._progress, self._save = session, progress, save
        self._report = msgspec.structs.replace(report, backend=session.info.backend)

    def run(
        self, dialogues: int, histories: Sequence[int], variants: Sequence[str]
    ) -> ConversationsReport:
        """Ask what isn't known yet."""
        known = {(each.kind, each.seed, each.variant) for each in self._report.answers}
        for seed in range(dialogues):
            for variant in (FULL, *variants):
                for kind in KINDS:
                    if (kind, seed, variant) not in known:
                        self._progress(f"{kind} {seed}: {variant}")
                        self._add(answers=self._ask(kind, seed, variant))
        counted = {(each.history, each.variant) for each in self._report.held}
        for history in histories:
            if (history, BOUNDED) not in counted:
                self._progress(f"{history} tokens: {BOUNDED}")
                self._add(held=self._hold(history, BOUNDED))
        return self._report

    def _add(self, **found: Answers | Held) -> None:
        fields = {name: [*getattr(self._report, name), one] for name, one in found.items()}
        self._report = msgspec.structs.replace(self._report, **fields)
        self._save(self._report)

    def _ask(self, kind: str, seed: int, variant: str) -> Answers:
        dialogue, tokenizer = draw_dialogue(kind, seed), self._session.tokenizer
        text = self._session.encode(dialogue.text)
        if len(text) not in self._report.tokens:
            tokens = sorted({*self._report.tokens, len(text)})
            self._report = msgspec.structs.replace(self._report, tokens=tokens)
        logprobs = []
        for asked in dialogue.asked:
            prompt = [*text, *tokenizer.encode_continuation(asked.question)]
            answer = tokenizer.encode_continuation(asked.answer)
            rows = self._session.answer_likelihoods(prompt, answer, _named(variant))
            logprobs.append(float(rows[np.arange(len(answer)), answer].mean()))
        return Answers(kind=kind, seed=seed, variant=variant, logprobs=logprobs)

    def _hold(self, history: int, variant: str) -> Held:
        """Ask one question about dialogues one after the other, of so many tokens in all."""
        lines: list[str] = []
        seed = 0
        while len(text := self._session.encode("".join(f"{line}\n" for line in lines))) < history:
            lines += draw_dialogue("paraphrased", 100 + seed).lines
            seed += 1
        end = self._session.tokenizer.encode_continuation("\nMia: Who leads the singers now?\nLeo:")
        found = self._session.hold([*text[:history], *end], _named(variant), 4, cold=True)
        return Held(
            history=history,
            variant=variant,
            peak=found.peak,
            kept=found.after_prefill,
            kept_bytes=found.list_bytes,
        )


def _named(variant: str) -> str:
    return OFF if variant == FULL else variant


def routing_table(report: ConversationsReport) -> ResultTable:
    """Return the shares of questions that went to the topic with their answer."""
    rows = []
    for kind in KINDS:
        found = shares(report.routing, kind)
        groups = _questions(kind, sorted({each.seed for each in report.routing}))
        row = {"dialogues": kind}
        for name, right in found.items():
            share = estimate_share(right, groups)
            row[name] = f"{share.value:.0%} [{share.low:.0%}, {share.high:.0%}]"
        rows.append(row)
    count = len({each.seed for each in report.routing})
    caption = (
        f"{count} dialogues of each kind, 20 questions each, 4 topics; intervals resample"
        " questions, whose wording is the same in all dialogues of a kind."
    )
    return ResultTable(rows=rows, caption=caption)


def answers_table(report: ConversationsReport) -> ResultTable:
    """Return the log probability of answers by variant and kind, and the paired differences."""
    variants = list(dict.fromkeys(each.variant for each in report.answers))
    rows = []
    for variant in variants:
        row = {"keys": variant}
        for kind in (*KINDS, "all"):
            values, groups = _values(report, variant, kind)
            mean = estimate_mean(values, groups)
            row[kind] = f"{mean.value:.2f}"
        own, groups = _values(report, OWN, "all")
        other, _ = _values(report, variant, "all")
        row[f"{OWN} is better by"] = (
            "" if variant == OWN else difference_cell(other, own, groups, digits=2)
        )
        rows.append(row)
    dialogues = len({(each.kind, each.seed) for each in report.answers})
    caption = (
        f"{report.model}, {report.backend}: {report.method}; {dialogues} dialogues of"
        f" {report.tokens[0]} to {report.tokens[-1]} tokens, 20 questions each; mean log"
        " probability per token of the answer, and 95% intervals of paired differences that"
        f" resample questions. {report.machine}; load {report.load:.1f}."
    )
    return ResultTable(rows=rows, caption=caption)


def held_table(report: ConversationsReport) -> ResultTable:
    """Return the slots that long histories held."""
    rows = [
        {
            "history": f"{each.history:,}",
            "keys": each.variant,
            "most slots held": f"{each.peak:,}",
            "held after prefill": f"{each.kept:,}",
            "MB beside the pool": f"{each.kept_bytes / 1e6:.1f}",
        }
        for each in report.held
    ]
    caption = (
        f"{report.model}. A slot is one token's keys and values in all layers; full KV holds one"
        " per token."
    )
    return ResultTable(rows=rows, labels=2, caption=caption)


def _values(report: ConversationsReport, variant: str, kind: str) -> tuple[list[float], list[str]]:
    """Return all answers' log probabilities, and the questions that they are of."""
    values: list[float] = []
    groups: list[str] = []
    for each in sorted(report.answers, key=lambda each: (each.kind, each.seed)):
        if each.variant == variant and kind in (each.kind, "all"):
            values += each.logprobs
            groups += _questions(each.kind, [each.seed])
    return values, groups


def _questions(kind: str, seeds: Sequence[int]) -> list[str]:
    dialogues: list[Dialogue] = [draw_dialogue(kind, seed) for seed in seeds]
    return [f"{kind} {asked.question}" for dialogue in dialogues for asked in dialogue.asked]


def conversations(
    model: ModelArgument = None,
    encoder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="A sentence encoder; by default token embeddings."),
    ] = None,
    routed: Annotated[int, typer.Option(min=1, help="Dialogues per kind that are routed.")] = 10,
    dialogues: Annotated[int, typer.Option(min=1, help="Dialogues per kind that are asked.")] = 3,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure caches per topic of conversations beside their nulls; continues what --json holds."""
    earlier = None
    if json is not None and json.exists() and json.stat().st_size:
        earlier = msgspec.json.decode(json.read_bytes(), type=ConversationsReport)

    def save(found: ConversationsReport) -> None:
        if json is not None:
            write_file(json, msgspec.json.encode(found).decode())

    with show_steps("loading") as progress:
        report = measure_conversations(
            model or DEFAULT_MODEL,
            encoder=None if encoder is None else SentenceEncoder.open(encoder),
            routed=routed,
            dialogues=dialogues,
            threads=threads,
            earlier=earlier,
            progress=progress,
            save=save,
        )
    publish(
        report,
        routing_table(report), answers_table(report), held_table(report),
        section="conversations", json=json, docs=docs,
    )  # fmt: skip
