"""Licences: which one a file is under, told by its package, its folder or its own header."""

import csv
import re
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path

PERMISSIVE = frozenset(
    {
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "HPND",
        "ISC",
        "MIT",
        "MIT-0",
        "PSF-2.0",
        "Unlicense",
        "Zlib",
        "ZPL-2.1",
    }
)
"""SPDX identifiers under which text may be trained on and the result be given away."""

_HEADER_BYTES = 2048
_LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING", "LICENSE.txt", "LICENSE.md", "LICENSE.rst")
_SPDX_LINE = re.compile(
    rb"SPDX-License-Identifier:[ \t]*(\(*[\w.+-]+\)*(?: (?:AND|OR|WITH) \(*[\w.+-]+\)*)*)"
)
_OPERATOR = re.compile(r"(\(|\)|\bAND\b|\bOR\b)")
_EXPRESSION_CHARACTERS = 300
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # what is above is another project's

# Tried in this order: the copyleft ones first, because a text that names several is not permissive.
# Only Python's own licence goes before them: it begins with a history that mentions the GPL.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (identifier, re.compile(pattern, re.IGNORECASE))
    for identifier, pattern in (
        ("PSF-2.0", r"\A\W*A\. HISTORY OF THE SOFTWARE\s+=+\s+Python was created"),
        ("AGPL-3.0", r"\bAGPL|affero"),
        ("LGPL-3.0", r"\bLGPL|lesser general public|library general public"),
        ("GPL-3.0", r"\bGPL|gnu general public|gnu public"),
        ("MPL-2.0", r"\bMPL\b|mozilla public"),
        ("EPL-2.0", r"\bEPL\b|eclipse public"),
        ("Proprietary", r"proprietary|all rights reserved\W*$|commercial licen[sc]e"),
        ("Apache-2.0", r"apache"),
        ("PSF-2.0", r"\bPSF|python software foundation|\bpython-2\.0"),
        ("BSD-3-Clause", r"\bbsd\b|redistribution and use in source and binary"),
        ("0BSD", r"\b0BSD\b|zero-clause"),
        ("MIT-0", r"\bMIT-0\b"),
        ("MIT", r"\bmit\b|permission is hereby granted, free of charge"),
        ("ISC", r"\bisc\b|permission to use, copy, modify, and(/or)? distribute"),
        ("Unlicense", r"unlicense|released into the public domain"),
        ("CC0-1.0", r"\bcc0\b"),
        ("Zlib", r"\bzlib\b"),
        ("HPND", r"\bhpnd\b|historical permission"),
        ("BSL-1.0", r"\bbsl-1|boost software"),
        ("ZPL-2.1", r"\bzpl\b|zope public"),
    )
)


def spdx_of(text: str) -> str | None:
    """SPDX identifier of a licence's name, of an SPDX expression, or of a licence's own text.

    Of an expression with a choice ("MIT OR GPL-2.0") the permissive side is taken; where both
    hold ("MIT AND GPL-2.0"), the one that is not permissive.
    """
    text = text.strip()
    if len(text) <= _EXPRESSION_CHARACTERS and re.search(r"\b(AND|OR)\b", text):
        parts = (part.strip() for part in _OPERATOR.split(text))
        return _either(iter([part for part in parts if part]))
    known = {identifier.lower(): identifier for identifier in PERMISSIVE}
    if text.lower() in known:
        return known[text.lower()]
    return next((name for name, pattern in _PATTERNS if pattern.search(text)), None)


def spdx_of_all(texts: Iterable[str]) -> str | None:
    """SPDX identifier of a work under several licences at once: the least permissive.

    None where one of them is unknown, or there is none.
    """
    return _least_permissive([spdx_of(text) for text in texts])


def _least_permissive(names: list[str | None]) -> str | None:
    restricting = (name for name in names if name not in PERMISSIVE)
    return next(restricting, names[0] if names else None)


def _either(parts: Iterator[str]) -> str | None:
    """The value of an expression up to its closing parenthesis; AND binds closer than OR."""
    sides: list[list[str | None]] = [[]]
    for part in parts:
        if part == ")":
            break
        if part == "OR":
            sides.append([])
        elif part == "(":
            sides[-1].append(_either(parts))
        elif part != "AND":
            sides[-1].append(spdx_of(part))
    choices = [_least_permissive(side) for side in sides]
    return next((name for name in choices if name in PERMISSIVE), choices[0])


class LicenceFinder:
    """Finds the licence of files in folders; remembers what it read of a folder.

    In this order: the file's own SPDX line, the installed package it belongs to (``*.dist-info``
    beside it or above), a package's ``PKG-INFO``, the nearest licence file going up to the root.
    """

    def __init__(self) -> None:
        self._packaged: dict[Path, dict[str, str]] = {}
        self._own: dict[Path, str | None] = {}

    def licence_of(self, root: Path, path: Path, content: bytes) -> str | None:
        """SPDX identifier of one file, None where nothing tells.

        Args:
            root: the folder the search does not leave.
            path: the file, below ``root``.
            content: its bytes.
        """
        line = _SPDX_LINE.search(content[:_HEADER_BYTES])
        if line is not None:
            return spdx_of(line[1].decode("ascii", "replace"))
        for folder in path.parents:
            if folder not in self._own:
                self._packaged[folder] = _packaged_licences(folder)
                self._own[folder] = _own_licence(folder)
            packaged = self._packaged[folder]
            found = packaged.get(str(path.relative_to(folder))) if packaged else None
            found = found or self._own[folder]
            if found is not None or folder == root or folder.name in _PACKAGE_FOLDERS:
                return found
        return None


def _packaged_licences(folder: Path) -> dict[str, str]:
    """Licences of the files that packages installed in a folder list as theirs."""
    licences: dict[str, str] = {}
    for information in folder.glob("*.dist-info"):
        licence = _metadata_licence(information / "METADATA")
        try:
            with (information / "RECORD").open(encoding="utf-8", newline="") as record:
                names = [row[0] for row in csv.reader(record) if row]
        except OSError:
            continue
        if licence is not None:
            licences.update(dict.fromkeys(names, licence))
    return licences


def _own_licence(folder: Path) -> str | None:
    """The licence a folder's own PKG-INFO or licence file names."""
    if (found := _metadata_licence(folder / "PKG-INFO")) is not None:
        return found
    for name in _LICENCE_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # What a licence is stands at its beginning; further down others are often discussed.
        return spdx_of(text[:1500]) or spdx_of(text)
    return None


def _metadata_licence(path: Path) -> str | None:
    """The licence a package's metadata declares: expression, classifiers, then free text."""
    try:
        fields = HeaderParser().parsestr(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    expression = fields.get("License-Expression")
    if expression:
        return spdx_of(str(expression))
    classified = [
        str(value).rsplit("::", 1)[-1]
        for value in fields.get_all("Classifier", [])
        if str(value).startswith("License ::")
    ]
    named = [found for value in classified if (found := spdx_of(value)) is not None]
    if named:
        return next((name for name in named if name not in PERMISSIVE), named[0])
    free = str(fields.get("License") or "")
    return spdx_of(free[:1500]) if free else None
