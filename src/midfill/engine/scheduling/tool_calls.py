"""find_tool: which tool an answer calls, by its text.

After Li et al., "Continuum", 2025, arXiv 2511.02230: the first word of the only fenced shell block,
or the function's name in a tool call as JSON. Agents that call tools in other ways get no name, and
so no benefit.
"""

import json
import re
from collections.abc import Iterator

_FENCED = re.compile(r"```(?:bash|sh|shell|console)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_CHARACTERS = 16_384
_MAX_OBJECTS = 64
_MAX_NAME = 64


def find_tool(text: str) -> str:
    """Return the name of the tool that an answer calls; "" for none, several, or one cut off.

    Args:
        text: the answer; only its end is looked at if it is long.
    """
    text = text[-_MAX_CHARACTERS:]
    if "```" in text:
        blocks = _FENCED.findall(text)
        words = blocks[0].split() if len(blocks) == 1 and text.count("```") == 2 else []
        return words[0][:_MAX_NAME] if words else ""
    names = list(_functions(text))
    return names[0][:_MAX_NAME] if len(names) == 1 else ""


def _functions(text: str) -> Iterator[str]:
    """Yield the function names of the tool calls that stand in a text as JSON objects."""
    decoder, place = json.JSONDecoder(), 0
    for _ in range(_MAX_OBJECTS):
        place = text.find("{", place)
        if place < 0:
            return
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        call = found.get("function", found)
        if isinstance(call, dict) and ("arguments" in call or "parameters" in call):
            name = call.get("name")
            if isinstance(name, str) and name:
                yield name
