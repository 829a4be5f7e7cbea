"""A run: every variant on the same prompts, model by model; it can be interrupted and continued."""

import os
from collections.abc import Callable, Iterator, Sequence

import msgspec

from midfill.errors import MidfillError
from midfill.methods.method import Method
from midfill.methods.registry import methods_of, parse_name
from midfill.system.machine import describe_machine
from midfill_lab.bench.methods.costs import measure_costs
from midfill_lab.bench.methods.nulls import make_null, share_observations
from midfill_lab.bench.methods.probes import (
    ContextMaker,
    Haystacks,
    Probe,
    draw_lines,
    needle_probes,
    read_probe,
    score_probe,
    shared_context_probes,
)
from midfill_lab.bench.methods.results import (
    FULL,
    NEEDLES,
    HoleResult,
    MethodsOptions,
    MethodsReport,
    ModelResult,
    ProbeResult,
    Task,
    Variant,
    merge_parts,
)
from midfill_lab.bench.methods.session import MethodSession
from midfill_lab.evaluation.metrics import is_exact_first_line

_MAX_LINE_TOKENS = 48

Progress = Callable[[str], None]


def measure_methods(
    models: Sequence[str],
    variants: Sequence[Variant],
    options: MethodsOptions,
    *,
    threads: int | None = None,
    progress: Progress = lambda _: None,
    save: Callable[[MethodsReport], None] = lambda _: None,
    earlier: MethodsReport | None = None,
) -> MethodsReport:
    """Measure methods.

    Args:
        models: names or paths.
        variants: methods at budgets; full KV is measured beside them.
        options: what is measured.
        threads: that the models run on; None is one per core.
        progress: called with what is being done.
        save: called with the report so far.
        earlier: the report of an interrupted run, or of one that measured other parts; what it
            holds is not measured again.

    Raises:
        MidfillError: a model can't be loaded, or the earlier run was another.
    """
    merged = options if earlier is None else merge_parts(earlier.options, options)
    if earlier is not None and merged is None:
        raise MidfillError(
            "the earlier run can't be continued: it measured something else "
            f"({earlier.options}, now {options}); name another --json file"
        )
    load = os.getloadavg()[0] if earlier is None or options.repeats else earlier.load
    known = {result.model: result for result in earlier.models} if earlier is not None else {}
    results = dict(known)

    def report(finished: bool = False) -> MethodsReport:
        return MethodsReport(
            machine=describe_machine(),
            load=load,
            options=merged or options,
            variants=list(variants),
            models=list(results.values()),
            finished=finished,
        )

    for model in models:
        progress(f"loading {model}")
        nulls: dict[str, Method] = {}
        session = MethodSession(model, threads, nulls)
        try:
            run = _ModelRun(session, model, variants, options, known.get(model), nulls)
            for result in run.steps(progress):
                results[model] = result
                save(report())
        finally:
            session.close()
    return report(finished=True)


class _ModelRun:
    """One model's run; ``steps`` yields the result so far after each part."""

    def __init__(
        self,
        session: MethodSession,
        model: str,
        variants: Sequence[Variant],
        options: MethodsOptions,
        earlier: ModelResult | None,
        nulls: dict[str, Method],
    ) -> None:
        """Begin, or continue.

        Args:
            session: the model.
            model: its name.
            variants: what is measured.
            options: how.
            earlier: what was found before.
            nulls: further methods of the session; those that the variants ask for are added.
        """
        if earlier is not None and earlier.fingerprint != session.fingerprint:
            raise MidfillError(f"the earlier run can't be continued: {model} was another model")
        self._session = session
        self._options = options
        self._haystacks = Haystacks(session.encode, options.seed)
        refused = {
            variant.specification: reason
            for variant in variants
            if not variant.null and (reason := session.refusal(variant.specification)) is not None
        }
        suited = [one for one in variants if not refused.keys() & {one.specification, one.of}]
        nulls |= {
            one.specification: make_null(one.of, one.null, session.served_model)
            for one in suited
            if one.null
        }
        share_observations(nulls.values())
        self._methods = [FULL, *(one.specification for one in suited if not one.null)]
        self._nulls = [one for one in suited if one.null]
        found = earlier or ModelResult(model=model, fingerprint=session.fingerprint, backend="")
        self._result = msgspec.structs.replace(
            found, backend=session.info.backend, text=self._haystacks.source, refused=refused
        )

    def steps(self, progress: Progress) -> Iterator[ModelResult]:
        """Measure what is missing."""
        yield from self._measure_probes(progress)
        if self._session.has_sentinels:
            yield from self._measure_holes(progress)
        yield from self._measure_costs(progress)
        yield self._result

    def _measure_probes(self, progress: Progress) -> Iterator[ModelResult]:
        probes = self._probes()
        results = {result.name: result for result in self._result.probes}
        for number, probe in enumerate(probes, 1):
            known = results[probe.name].scores if probe.name in results else {}
            asked = [*self._methods, *self._nulls_for(probe.task)]
            missing = [specification for specification in asked if specification not in known]
            if not missing:
                continue
            progress(f"{probe.name} ({number} of {len(probes)})")
            full = read_probe(self._session, probe, FULL)
            scores = {
                specification: score_probe(self._session, probe, specification, full)
                for specification in missing
            }
            group = probe.group or probe.name
            merged = ProbeResult(probe.name, probe.task, probe.label, group, known | scores)
            results[probe.name] = merged
            self._replace(probes=list(results.values()))
            yield self._result

    def _nulls_for(self, task: Task) -> Sequence[str]:
        """Return the nulls that answer a task: in code, those of methods that choose in each row.

        The others choose once, at the prompt's end, as their methods may do again in an answer.
        """
        if task in NEEDLES:
            return [one.specification for one in self._nulls]
        if task != "code":
            return []
        chosen = methods_of("decode")
        return [one.specification for one in self._nulls if parse_name(one.of) in chosen]

    def _measure_holes(self, progress: Progress) -> Iterator[ModelResult]:
        options, results = self._options, {result.name: result for result in self._result.holes}
        holes = draw_lines(self._haystacks.texts, options.holes) if options.holes else []
        for number, hole in enumerate(holes, 1):
            known = results.get(hole.id, HoleResult(hole.id, hole.group, {}, {}))
            missing = [method for method in self._methods if method not in known.answers]
            if not missing:
                continue
            progress(f"{hole.id} ({number} of {len(holes)})")
            prompt = self._session.infill_prompt(hole.prefix, hole.suffix, hole.id)
            answers = self._session.infill(prompt, missing, _MAX_LINE_TOKENS)
            found = dict(zip(missing, answers, strict=True))
            exact = {
                specification: is_exact_first_line(answer, hole.hole)
                for specification, answer in found.items()
            }
            results[hole.id] = HoleResult(
                hole.id, hole.group, known.answers | found, known.exact | exact
            )
            self._replace(holes=list(results.values()))
            yield self._result

    def _measure_costs(self, progress: Progress) -> Iterator[ModelResult]:
        costs = measure_costs(
            self._session, self._haystacks, self._options, self._methods, self._result.costs,
            progress,
        )  # fmt: skip
        for found in costs:
            self._replace(costs=found)
            yield self._result

    def _probes(self) -> list[Probe]:
        options, session = self._options, self._session
        room = session.info.context - 64 * options.questions
        tokens = min(options.context, room)
        maker = ContextMaker(
            session.tokenizer, session.encode, self._haystacks, tokens, options.questions
        )
        return [
            *needle_probes(
                session.tokenizer,
                self._haystacks,
                tokens=tokens,
                depths=options.depths,
                repeats=options.needles,
                seed=options.seed,
            ),
            *shared_context_probes(maker, contexts=options.shared, seed=options.seed),
            *self._code_probes(min(options.code_context, room - options.code_tokens)),
        ]

    def _code_probes(self, context: int) -> list[Probe]:
        end = context + self._options.code_tokens
        probes: list[Probe] = []
        for number in range(len(self._haystacks.texts)):
            tokens = tuple(self._haystacks.document(number)[:end])
            if len(tokens) == end and len(probes) < self._options.code:
                name, file = f"code/{number}", self._haystacks.file(number)
                probes.append(Probe(name, "code", "", tokens, context, ((context, end),), file))
        return probes

    def _replace(self, **fields: object) -> None:
        self._result = msgspec.structs.replace(self._result, **fields)
