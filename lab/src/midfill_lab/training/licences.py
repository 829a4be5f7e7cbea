"""Licences: which one a file is under, by its own header, its package or its folder."""

import csv
import json
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
"""SPDX identifiers of licences under which text may be trained on and the result distributed."""

_HEADER_BYTES = 2048
_LICENCE_FILES = ("LICENSE", "LICENCE", "COPYING", "LICENSE.txt", "LICENSE.md", "LICENSE.rst")
_SPDX_LINE = re.compile(
    rb"SPDX-License-Identifier:[ \t]*(\(*[\w.+-]+\)*(?: (?:AND|OR|WITH) \(*[\w.+-]+\)*)*)"
)
_OPERATOR = re.compile(r"(\(|\)|\bAND\b|\bOR\b)")
_MAX_EXPRESSION_CHARACTERS = 300
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # folders above belong to another project

# Tried in this order. Copyleft licences come first, because a text that names several is not
# permissive. Only Python's licence precedes them: it starts with a history that mentions the GPL.
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
    """Return the SPDX identifier of a licence's name, an SPDX expression, or a licence's text.

    Of a choice ("MIT OR GPL-2.0") the permissive licence is taken, of a conjunction ("MIT AND
    GPL-2.0") the one that is not permissive. None if no licence is recognised.
    """
    text = text.strip()
    if len(text) <= _MAX_EXPRESSION_CHARACTERS and re.search(r"\b(AND|OR)\b", text):
        parts = (part.strip() for part in _OPERATOR.split(text))
        return _either(iter([part for part in parts if part]))
    known = {identifier.lower(): identifier for identifier in PERMISSIVE}
    if text.lower() in known:
        return known[text.lower()]
    return next((name for name, pattern in _PATTERNS if pattern.search(text)), None)


def spdx_of_all(texts: Iterable[str]) -> str | None:
    """Return the SPDX identifier of a work under several licences at once: the least permissive.

    None if one of them is not recognised, or there is none.
    """
    return _least_permissive([spdx_of(text) for text in texts])


def _least_permissive(names: list[str | None]) -> str | None:
    restricting = (name for name in names if name not in PERMISSIVE)
    return next(restricting, names[0] if names else None)


def _either(parts: Iterator[str]) -> str | None:
    """Evaluate an expression up to its closing parenthesis; AND binds tighter than OR."""
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
    """Finds the licences of files, and caches what it read in each folder.

    In this order: the file's own SPDX line; then, in the file's folder and upwards to the root,
    the installed package the file belongs to (``*.dist-info``), a package's ``PKG-INFO`` or
    ``package.json``, and a licence file.
    """

    def __init__(self) -> None:
        self._packaged: dict[Path, dict[str, str]] = {}
        self._own: dict[Path, str | None] = {}

    def licence_of(self, root: Path, path: Path, content: bytes) -> str | None:
        """Return the SPDX identifier of a file's licence, None if it is unknown.

        Args:
            root: the folder where the search stops.
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
    """Return the licences of the files that are listed by packages installed in a folder."""
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
    """Return the licence named by a folder's own PKG-INFO, package.json or licence file."""
    if (found := _metadata_licence(folder / "PKG-INFO")) is not None:
        return found
    if (found := _npm_licence(folder / "package.json")) is not None:
        return found
    for name in _LICENCE_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # A licence names itself at its start; further down, others are often discussed.
        return spdx_of(text[:1500]) or spdx_of(text)
    return None


def _npm_licence(path: Path) -> str | None:
    """Return the licence in an npm package's description: an SPDX expression."""
    try:
        named = json.loads(path.read_bytes())["license"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return spdx_of(named) if isinstance(named, str) else None


def _metadata_licence(path: Path) -> str | None:
    """Return the licence in a package's metadata: expression, else classifiers, else free text."""
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
