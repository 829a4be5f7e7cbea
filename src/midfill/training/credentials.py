"""Credentials in texts: keys, tokens and passwords that nobody should learn by heart."""

import re

# A literal that every match of a pattern holds, and the pattern: looking for the literal first is
# many times faster, and most documents hold none.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (literal, re.compile(pattern))
    for literal, pattern in (
        ("PRIVATE KEY-----", r"-----BEGIN [A-Z ]*PRIVATE KEY-----\s*[A-Za-z0-9+/=]{40}"),
        ("AKIA", r"\bAKIA[0-9A-Z]{16}\b"),
        ("gh", r"\bgh[pousr]_[A-Za-z0-9]{36}\b"),
        ("github_pat_", r"\bgithub_pat_[A-Za-z0-9_]{60,}"),
        ("xox", r"\bxox[abprs]-[A-Za-z0-9-]{20,}"),
        ("sk-", r"\bsk-[A-Za-z0-9]{40,}"),
        ("AIza", r"\bAIza[0-9A-Za-z_-]{35}\b"),
        ("eyJ", r"\beyJ[A-Za-z0-9_-]{20,}\.eyJ[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{20,}"),
    )
)
# A long text without blanks that is given to a name, or to a key of a mapping, that means a secret.
_ASSIGNED = re.compile(r"[:=]\s*['\"][A-Za-z0-9+/_-]{32,}['\"]")
_NAME = re.compile(
    r"(?i)(?P<quote>['\"]\w*)?(?:api_?key|secret|passwd|password|token)(?(quote)['\"])\s*$"
)
_NAME_CHARACTERS = 80


def holds_credential(text: str) -> bool:
    """Whether a key, a token or a password seems to be written down in a text."""
    if any(literal in text and pattern.search(text) for literal, pattern in _KINDS):
        return True
    return any(
        _NAME.search(text[max(0, match.start() - _NAME_CHARACTERS) : match.start()])
        for match in _ASSIGNED.finditer(text)
    )
