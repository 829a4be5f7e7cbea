"""States of an editor's document, and what a plugin sends in them."""

import json
from collections.abc import Mapping

from benchmarks.plugins.clients import Plugin, Sent
from midfill_lab.bench.editing import Round

LINES = [f"    line_{number} = {number}\n" for number in range(1600)]


def state(line: int, typed: str = "", document: str = "a.py", kind: str = "type") -> Round:
    """Return the state in which something was typed into a new line before the given one."""
    prefix, suffix = "".join(LINES[:line]) + typed, "\n" + "".join(LINES[line:])
    return Round(document, prefix, suffix, kind)  # type: ignore[arg-type]


def ask(plugin: Plugin, one: Round, hint: str = "") -> list[Sent]:
    """Return what a plugin sends, if all that it asks is answered with a hint."""
    asking, sent, response = plugin.ask(one, hint), [], None
    while True:
        try:
            sent.append(next(asking) if response is None else asking.send(response))
        except StopIteration:
            return sent
        body = {"content": hint}
        response = json.dumps([body] * 3 if "n_cmpl" in sent[-1].body else body)


def text(body: Mapping[str, object], *names: str) -> str:
    return "".join(str(body[name]) for name in names)
