"""Tables of a report of ``far``: answers beside those of the smallest window, and times."""

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from midfill_lab.evaluation.far import FarReport, far_conditions
from midfill_lab.evaluation.far_carets import FAR_KINDS, FarKind
from midfill_lab.evaluation.report import LEGEND, ReportTables, estimate_cell
from midfill_lab.evaluation.summary import Estimate, estimate_difference, estimate_share
from midfill_lab.reporting import ResultTable

_TITLES: dict[FarKind, str] = {
    "far": "A name that the file sets far above",
    "imported": "A name that an imported file sets",
    "any": "Any lines of these files",
}


def far_tables(report: FarReport) -> ReportTables:
    """Return a table of answers for each kind of carets, and one of times."""
    tables = [*_answer_tables(report)]
    if report.times:
        tables.append(ResultTable(title="Processor time", rows=list(_time_rows(report))))
    return ReportTables(tables, _caption(report))


def gain(report: FarReport, kind: FarKind, condition: str, beside: str) -> Estimate:
    """Return how many more first lines are right with one condition than with another, paired."""
    carets = [caret for caret in report.carets if caret.kind == kind]
    return estimate_difference(
        [float(caret.answers[beside].right) for caret in carets],
        [float(caret.answers[condition].right) for caret in carets],
        [caret.group for caret in carets],
    )


def _conditions(report: FarReport) -> list[str]:
    options = report.options
    return [condition.name for condition in far_conditions(options.windows, options.methods)]


def _answer_tables(report: FarReport) -> Iterator[ResultTable]:
    names = _conditions(report)
    widest = names[len(report.options.windows) - 1]
    for kind in FAR_KINDS:
        carets = [caret for caret in report.carets if caret.kind == kind]
        if not carets:
            continue
        groups = [caret.group for caret in carets]
        rows = []
        for name in names:
            answers = [caret.answers[name] for caret in carets]
            row = {
                "window": name,
                "tokens": f"{fmean(answer.tokens for answer in answers):,.0f}",
                "first line right": estimate_cell(
                    estimate_share([answer.right for answer in answers], groups)
                ),
                f"minus {names[0]}": _cell(report, kind, name, names[0]),
            }
            if kind != "any":
                named = estimate_share([answer.named for answer in answers], groups)
                row["name written"] = estimate_cell(named)
            same = [answer.text == caret.answers[widest].text for answer, caret in
                    zip(answers, carets, strict=True)]  # fmt: skip
            row["as all keys"] = estimate_cell(estimate_share(same, groups)) if "," in name else ""
            rows.append(row)
        files = len(set(groups))
        yield ResultTable(
            title=f"{_TITLES[kind]}, {len(carets)} carets in {files} files", rows=rows
        )


def _cell(report: FarReport, kind: FarKind, condition: str, beside: str) -> str:
    if condition == beside:
        return ""
    return estimate_cell(gain(report, kind, condition, beside), signed=True)


def _time_rows(report: FarReport) -> Iterator[dict[str, str]]:
    for name in _conditions(report):
        times = [one for one in report.times if one.condition == name]
        steps = sum(one.steps for one in times)
        yield {
            "window": name,
            "tokens": f"{median(one.tokens for one in times):,.0f}",
            "nothing cached, s": f"{median(one.cold for one in times):.2f}",
            "a word typed, s": f"{median(one.typed for one in times):.3f}",
            "ms per further token": _milliseconds(sum(one.step_seconds for one in times), steps),
        }


def _milliseconds(seconds: float, steps: int) -> str:
    return f"{1000 * seconds / steps:.0f}" if steps else ""


def _caption(report: FarReport) -> str:
    options, lines = report.options, report.lines
    shares = ", ".join(
        f"{100 * lines[kind] / max(lines['any'], 1):.1f}% are {kind}" for kind in FAR_KINDS[:-1]
    )
    return (
        f"{report.model}; files of {options.shortest:,} to {options.longest:,} characters, seed"
        f" {options.seed}, {len(report.done)} files done; of their lines of code {shares}."
        " Windows are characters before and after the caret; imported files are shown beside the"
        " smallest one, with as many characters in all. Tokens: of a prompt, on average."
        " As all keys: answers of methods that are those of the same window without them."
        f" {LEGEND}{_timed(report.times)} {report.machine}; load {report.load:.1f} when it began."
    )


def _timed(times: Sequence[object]) -> str:
    if not times:
        return ""
    return (
        " Times are of the process, to the first token and for each further one; medians over one"
        " caret in each of some files, the last one whose name is far away."
    )
