"""Which files of fetched packages people wrote, and may be trained on.

Files are judged by their names first, then by their content. Copies of other projects, generated
and compiled code, data and translations are left out.
"""

import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path, PurePosixPath

from benchmarks.package_sources import Package
from midfill_lab.training.licences import PERMISSIVE, spdx_of

OTHER = "other"
"""Name of the group of files in languages without a list of packages."""

SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "python": (".py",),
    "javascript": (".js", ".mjs", ".cjs", ".jsx"),
    "typescript": (".ts", ".tsx", ".mts"),
    "go": (".go",),
    "rust": (".rs",),
    "c": (".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh"),
    OTHER: (".java", ".rb", ".lua", ".sh", ".css", ".html", ".md"),
}
"""Suffixes of the files of each language."""

MAX_CHARACTERS = 100_000
"""Maximum length of a file."""

_WEB_LANGUAGES = frozenset({"javascript", "typescript", OTHER})

_SKIPPED_FOLDER = re.compile(
    r"(?i)(\.git|\.venv|__pycache__|node_modules|bower_components|_*vend(or|ored|oring)_*|pythonwin"
    r"|3rd_?party|third[-_]?party|extern(al|als|s)?|bundled?|_?_?generated_?_?|gen|autogen"
    r"|locales?|i18n|lang|langs|languages|translations|cldr|migrations|fixtures|testdata|test[-_]data"
    r"|test262|snapshots|__snapshots__|__fixtures__|dumps|openssl|boringssl|libxml2?|hiredis|argon2"
    r"|phc-winner-argon2|google-?apis?|googleapis|protobufs?|protos?|pb|swagger|openapi|flow-typed"
    r"|typings|icons?|emojis?|legacy-examples|corpus|corpora|templates?_?data)"
)
_BUILT_FOLDER = re.compile(
    r"(?i)(dist|dist-\w+|build|built|umd|esm\d*|cjs|fesm\d*|min|bundles?|es|lib-?es\w*|module"
    r"|commonjs|out|compiled|prod|public|assets?|static)"
)
_SKIPPED_FILE = re.compile(
    r"(?i)(.*(_pb2(_grpc)?\.py|\.pb(\.\w+)?\.(go|h|cc|js|ts)|_pb\.(js|ts)|\.gen\.\w+"
    r"|\.generated\.\w+|_generated\.\w+|zz_generated.*|[._-]min\.\w+|[._-]bundle[d]?\.\w+"
    r"|\.prod\.\w+|-lock\.\w+|\.d\.\w?ts|\.snap\.\w+|_string\.go|_easyjson\.go|bindata\.go)"
    r"|_version\.py"
    r"|(licen[sc]e|copying|notice|authors|change(s|log)|history|code_of_conduct|contributing"
    r"|security).*\.md)"
)
_TEST = re.compile(
    r"(?i)(^|/)(tests?|__tests?__|testing|specs?|conftest\.py|jstests|unittests?)(/|$)"
    r"|(^|/)test_[^/]*$|[._-](test|tests|spec)\.\w+$|_(unit)?tests?\.\w+$"
)
# What compilers and bundlers write; the sources that people wrote are wanted.
_COMPILED = re.compile(
    r"__esModule|_interopRequire|__webpack_require__|sourceMappingURL=|\b__awaiter\b|\b__extends\b"
    r"|\b__spreadArray|_classCallCheck|_createClass\(|/\*[#@]__PURE__\*/|regeneratorRuntime|_jsxs?\("
    r"|tslib_\d|\.__proto__ \|\| Object\.getPrototypeOf|\bvar _excluded\b|_asyncToGenerator"
)
# A header that names another licence than the package's own.
_RESTRICTED = re.compile(
    r"(?i)gnu (lesser |affero |library )?general public|\b[al]?gpl(v|-|\s)?[23]"
    r"|mozilla public licen"
    r"|\bMPL[- ]?[12]|eclipse public licen|common development and distribution|server side public"
    r"|business source licen|commons clause|elastic licen|creative commons|\bcc[- ]by\b"
    r"|proprietary and confidential|confidential and proprietary|commercial licen"
    r"|stackoverflow\.com/(a|questions)/"
)
_HEADER_CHARACTERS = 3000
_DEBIAN_RESTRICTED = re.compile(
    r"(?i)GPL|GFDL|MPL|EPL|CDDL|CC-BY|EUPL|OFL|SSPL|BUSL|Artistic|non-?free|propr"
)
_STANZA = re.compile(r"\n[ \t]*\n")

_MIN_LINES = 8
_MAX_MEAN_LINE_CHARACTERS = 70.0
_MAX_DIGITS = 0.12
_MAX_NON_ASCII = 0.05
_MAX_COMPRESSION = 9.0  # more is the same line over and over, as in tables
_MIN_COMPRESSION = 1.9  # less is data
_LONG_TEXT = 3000  # shorter ones compress less


def relative_paths(folder: Path, language: str) -> list[PurePosixPath]:
    """Return the paths of a folder's files in a language, sorted."""
    return sorted(_relative_paths(folder, frozenset(SUFFIXES[language])))


def _relative_paths(folder: Path, suffixes: frozenset[str]) -> Iterator[PurePosixPath]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            if path.suffix in suffixes and not path.is_symlink():
                yield PurePosixPath(path.relative_to(folder).as_posix())


def is_wanted(path: PurePosixPath, language: str, copied: frozenset[str] = frozenset()) -> bool:
    """Return whether a file's name is that of code that people wrote for its package.

    Args:
        path: of the file in its package.
        language: a key of ``SUFFIXES``.
        copied: names of other projects, see ``copy_names``; files and folders that have them are
            copies.
    """
    *folders, _ = parts = path.parts
    names = [part.split(".")[0].lower().replace("_", "-").strip("-") for part in parts]
    names += [f"{one}-{other}" for one, other in pairwise(names)]
    if not copied.isdisjoint(names) or any(map(_SKIPPED_FOLDER.fullmatch, folders)):
        return False
    if language in _WEB_LANGUAGES and any(map(_BUILT_FOLDER.fullmatch, folders)):
        return False
    return not _SKIPPED_FILE.fullmatch(path.name)


def is_test(path: PurePosixPath) -> bool:
    """Return whether a file's name or folder says that it is a test."""
    return _TEST.search(path.as_posix()) is not None


def refusal(content: bytes, suffix: str) -> str | None:
    """Return why a file is no code that a person would write or read, None if it is."""
    if len(content) > 4 * MAX_CHARACTERS:
        return "too long"
    text = content.decode("utf-8", "replace")
    if _RESTRICTED.search(text[:_HEADER_CHARACTERS]):
        return "another licence in its header"
    lines = text.count("\n") + 1
    size = max(1, len(text))
    if lines < _MIN_LINES:
        return "too few lines"
    if size / lines > _MAX_MEAN_LINE_CHARACTERS and suffix not in (".md", ".html"):
        return "long lines"
    if suffix in SUFFIXES["javascript"] + SUFFIXES["typescript"] and _COMPILED.search(text):
        return "compiled"
    if sum(map(text.count, "0123456789")) > _MAX_DIGITS * size:
        return "data"
    if len(content) - size > 2 * _MAX_NON_ASCII * size:
        return "not in English"
    ratio = len(content) / len(zlib.compress(content, 1))
    if ratio > _MAX_COMPRESSION or (size > _LONG_TEXT and ratio < _MIN_COMPRESSION):
        return "data"
    return None


def is_permissive(copyright_file: Path) -> bool:
    """Return whether all of a Debian package, but its packaging, is permissively licensed.

    Args:
        copyright_file: the package's ``copyright``. One that is not in the machine-readable format
            is judged by the licences it names anywhere.
    """
    try:
        text = copyright_file.read_text("utf-8", "replace")
    except OSError:
        return False
    seen = False
    for stanza in _STANZA.split(text):
        files = re.match(r"(?s)\s*Files:(.*?)\n\S", stanza + "\n.")
        licence = re.search(r"(?m)^License:[ \t]*(.*)$", stanza)
        if files is None or licence is None:
            continue
        if all(each.startswith("debian/") for each in files[1].replace(",", " ").split()):
            continue
        seen = True
        choices = re.split(r"(?i)\s+or\s+|\s*\|\s*", licence[1])
        if all(_DEBIAN_RESTRICTED.search(choice) for choice in choices):
            return False
    return seen or spdx_of(text) in PERMISSIVE


def copy_names(packages: Iterable[Package]) -> frozenset[str]:
    """Return the names that folders and modules with copies of some packages would have."""
    names = set()
    for package in packages:
        name = package.name.lower().lstrip("@").replace("_", "-")
        name = re.sub(r"^golang-(github-)?|^librust-|-dev$", "", name)
        names |= {name.rsplit("/", 1)[-1], name.replace("/", "-")}
    return frozenset(names)
