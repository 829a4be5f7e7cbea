"""The pictures of docs/planner.md, drawn from what the planner really does.

Run it with: .venv/bin/python docs/site/figures.py
It writes docs/figures/*.svg; a test compares them. Each picture has its own background, and dark
colours where its page has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from midfill.infill.common_affixes import common_prefix
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.layout import PromptLayout, TextSegment
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.prefix_cut import DEFAULT_RULE
from midfill.infill.request import InfillRequest, RequestedLayout
from midfill.infill.window import WindowRule

FOLDER = Path(__file__).parents[1] / "figures"
FORMAT = FimFormat("example", Sentinel("PRE", 0), Sentinel("SUF", 1), Sentinel("MID", 2))
WINDOW = WindowRule(before=2000, after=600)  # the default model's
SENTINELS = 0xE000  # characters that no text has stand for them

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px } .bold { font-weight: 600 } .end { text-anchor: end }
.middle { text-anchor: middle } .faint { fill: #57606a }
.page { fill: #ffffff } .text { fill: #dfe4ea } .cached { fill: #a9c4e8 }
.computed { fill: #e8912d } .answer { fill: #7cc07f } .sentinel { fill: #57606a }
.line { stroke: #57606a; fill: none } .dashed { stroke-dasharray: 4 3 }
.band { fill: #a9c4e8; fill-opacity: .7 } .caret { stroke: #cf222e; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .faint { fill: #9aa4ae } .page { fill: #1f2129 } .text { fill: #3d4450 }
.cached { fill: #3f6294 } .computed { fill: #d9822b } .answer { fill: #4b8f50 }
.sentinel { fill: #9aa4ae } .line { stroke: #9aa4ae } .band { fill: #3f6294 }
.caret { stroke: #ff7b72 }
}
"""


def program(functions: int) -> str:
    """A text of short functions, about 68 characters each."""
    return "".join(
        f"def scale_{number:03}(value):\n    factor = {number:03}\n    return value * factor\n\n\n"
        for number in range(functions)
    )


def svg(width: int, height: int, title: str, *parts: str) -> str:
    """Return a picture with a background of its own."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    page = f'<rect class="page" width="{width}" height="{height}" rx="6"/>'
    named = f"<title>{escape(title)}</title>"
    return "\n".join([head, named, f"<style>{STYLE}</style>", page, *parts, "</svg>", ""])


def label(x: float, y: float, text: str, classes: str = "") -> str:
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
    )


def path(points: Sequence[tuple[float, float]], classes: str) -> str:
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline class="{classes}" points="{steps}"/>'


def layout_picture() -> str:
    """The parts of a document, and where they stand in its prompt."""
    parts: list[str] = []
    names = {"head": 170, "increment": 110, "suffix": 170}
    places, x = {}, 100.0
    parts.append(label(20, 53, "document", "bold"))
    for name, width in names.items():
        places[name] = (x, width)
        parts += [box(x, 36, width - 2, 26, "text"), label(x + width / 2, 53, name, "middle")]
        x += width
    caret = places["suffix"][0] - 1
    parts += [
        path([(caret, 28), (caret, 70)], "caret"),
        label(caret, 22, "caret", "small middle"),
        label(places["increment"][0], 22, "cut", "small middle"),
        path([(places["increment"][0] - 1, 28), (places["increment"][0] - 1, 70)], "line dashed"),
        label(20, 163, "prompt", "bold"),
    ]
    x = 100.0
    for sentinel, name in (("PRE", "head"), ("SUF", "suffix"), ("MID", "increment")):
        parts += [box(x, 146, 36, 26, "sentinel"), label(x + 18, 188, sentinel, "small middle")]
        x += 38
        start, width = places[name]
        parts += [box(x, 146, width - 2, 26, "text"), label(x + width / 2, 163, name, "middle")]
        parts.append(path([(start + width / 2, 66), (x + width / 2, 142)], "line"))
        x += width
    parts += [box(x, 146, 70, 26, "answer"), label(x + 35, 163, "answer", "middle")]
    return svg(760, 206, "PRE head SUF suffix MID increment", *parts)


@dataclass(frozen=True)
class Moment:
    """A request of an editing session, and what has happened before it."""

    name: str
    prefix: str
    suffix: str


def session() -> list[Moment]:
    """Four requests for a document of about 4,000 characters."""
    text = program(62)
    caret = text.index("    return value * factor", 2400) + len("    return ")
    prefix, suffix = text[:caret], text[caret:]
    typed = prefix + "float(value) "
    deleted = prefix[:-7]
    up = text.index("    return value * factor", caret - 700) + len("    return ")
    whole = deleted + suffix
    return [
        Moment("First request", prefix, suffix),
        Moment("13 characters typed", typed, suffix),
        Moment("20 characters deleted", deleted, suffix),
        Moment("Caret 640 characters further up", whole[:up], whole[up:]),
    ]


def texts(layout: PromptLayout) -> list[str]:
    """The prompt's segments as texts; a sentinel is one character that no text has."""
    return [
        segment.text if isinstance(segment, TextSegment) else chr(SENTINELS + segment.token_id)
        for segment in layout.segments
    ]


def cached_picture() -> str:
    """What each request of a session computes, in PSM order, with EFIM and with the planner."""
    parts = [
        *(box(20, 16, 14, 14, "cached"), label(40, 27, "found in the cache")),
        *(box(180, 16, 14, 14, "computed"), label(200, 27, "computed, in characters")),
    ]
    orders: tuple[tuple[str, RequestedLayout], ...] = (
        ("PSM", "psm"),
        ("EFIM", "efim"),
        ("planner", "auto"),
    )
    planners = {name: Planner(FORMAT, PlannerOptions(fragments=True)) for name, _ in orders}
    earlier: dict[str, list[str]] = {name: [] for name, _ in orders}
    y = 46.0
    for moment in session():
        parts.append(label(20, y + 12, moment.name, "bold"))
        y += 20
        for name, order in orders:
            request = InfillRequest(prefix=moment.prefix, suffix=moment.suffix, layout=order)
            segments = texts(planners[name].plan_and_record(request))
            prompt = "".join(segments)
            cached = max((common_prefix(prompt, other) for other in earlier[name]), default=0)
            new = sum(ord(each) < SENTINELS for each in prompt[cached:])
            earlier[name].append(prompt)
            parts.append(label(34, y + 12, name, "faint"))
            parts += strip(segments, cached, 100, y)
            parts.append(label(740, y + 12, f"{new:,}", "end"))
            y += 22
        y += 14
    return svg(760, round(y), "What requests compute under PSM, EFIM and the planner", *parts)


def strip(segments: Sequence[str], cached: int, x: float, y: float) -> Iterator[str]:
    """Yield a prompt as a strip: sentinels dark, texts by whether they were cached."""
    scale, place = 0.126, 0
    for segment in segments:
        is_sentinel = len(segment) == 1 and ord(segment) >= SENTINELS
        known = min(max(cached - place, 0), len(segment))
        place += len(segment)
        if is_sentinel:
            yield box(x, y, 3, 16, "sentinel")
            x += 4
            continue
        for count, kind in ((known, "cached"), (len(segment) - known, "computed")):
            if count:
                width = max(2.0, count * scale)
                yield box(x, y, width, 16, kind)
                x += width


def bracket(left: float, right: float, y: float, text: str) -> tuple[str, str]:
    """Return a bracket from left to right with a text below it."""
    line = path([(left, y - 6), (left, y), (right, y), (right, y - 6)], "line")
    return line, label((left + right) / 2, y + 17, text, "middle")


def cut_picture() -> str:
    """Where the prefix is cut, and when a cut is given up."""
    rule = DEFAULT_RULE
    caret, scale = 640.0, 0.6
    cut = caret - (rule.least_increment + 30) * scale
    least = caret - rule.least_increment * scale
    half = caret - rule.least_standing * scale
    parts = [
        box(60, 60, cut - 61, 26, "cached"),
        label((60 + cut) / 2, 77, "head", "middle"),
        box(cut + 1, 60, caret - cut - 2, 26, "text"),
        label((cut + half) / 2, 77, "increment", "middle"),
        path([(caret, 46), (caret, 98)], "caret"),
        label(caret, 40, "caret", "small middle"),
        path([(cut, 46), (cut, 98)], "line"),
        label(cut, 40, "cut, between two lines", "small middle"),
        path([(half, 56), (half, 92)], "line dashed"),
        *bracket(least, caret, 106, f"the model needs at least {rule.least_increment} characters"),
        *bracket(half, caret, 146, "deletions that leave less than"),
        label((half + caret) / 2, 180, f"{rule.least_standing} give the cut up", "middle"),
        label(60, 22, "text before the caret", "faint"),
    ]
    return svg(760, 194, "Where the text before the caret is cut", *parts)


def window_picture() -> str:
    """What of a long document is shown while the caret goes through it."""
    text = program(190)
    planner = Planner(FORMAT, PlannerOptions(fragments=True, window=WINDOW))
    left, bottom, scale = 90.0, 330.0, 0.0232
    starts: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    hops, last = 0, 0
    for caret in range(200, len(text) - 700, 68):
        layout = planner.plan_and_record(InfillRequest(prefix=text[:caret], suffix=text[caret:]))
        start = caret - len(layout.planned_prefix)
        hops, last = hops + (start != last), start
        x = left + caret * 0.05
        if starts and starts[-1][1] != bottom - start * scale:
            starts.append((x, starts[-1][1]))
        starts.append((x, bottom - start * scale))
        ends.append((x, bottom - (caret + len(layout.planned_suffix)) * scale))
    end = starts[-1][0]
    band = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*starts, *reversed(ends)])
    carets = [(left + at * 0.05, bottom - at * scale) for at in (200, len(text) - 700)]
    parts = [
        label(20, 24, "part of the document that the model sees", "bold"),
        f'<polygon class="band" points="{band}"/>',
        path(starts, "line"),
        path(carets, "caret"),
        path([(left, bottom), (end, bottom)], "line"),
        path([(left, bottom), (left, bottom - len(text) * scale)], "line"),
        label(left - 8, bottom, "0", "small end"),
        label(left - 8, bottom - len(text) * scale + 8, f"{len(text):,}", "small end"),
        label(left, bottom + 18, "0", "small middle"),
        label(end, bottom + 18, f"caret at {len(text) - 700:,}", "small end"),
        label(carets[1][0] + 6, carets[1][1] + 4, "caret", "small"),
        label(left + 330, bottom - 20, f"the start stays, and hops {hops} times"),
    ]
    return svg(760, 360, "The window while the caret goes through a long document", *parts)


PICTURES = {
    "layout": layout_picture,
    "cached": cached_picture,
    "cut": cut_picture,
    "window": window_picture,
}


def main() -> None:
    """Draw all pictures anew."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
