"""What makes servers write a text first and then anything: a regular expression, or a grammar."""

import re

_REGEX_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()/]")
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def start_regex(text: str) -> str:
    """Return the regular expression of what begins with a text, for vLLM and SGLang."""
    escaped = _REGEX_SPECIAL.sub(lambda match: "\\" + match.group(), text)
    return _without_control(escaped) + r"[\s\S]*"


def start_grammar(text: str) -> str:
    """Return the grammar of what begins with a text, in llama.cpp's GBNF."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'root ::= "{_without_control(escaped)}" [^\\x00]*'


def _without_control(text: str) -> str:
    for character, escape in _CONTROL.items():
        text = text.replace(character, escape)
    return text
