"""Hooks of the documentation site: pages from files outside docs/, and pages made from the code.

Every page is read in two places, on a Git host and on the site. So pages link to the repository's
files by relative paths, as a Git host needs it; for the site, the files that are linked become
pages of their own, and the links are rewritten.
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/midfill/models/checkpoints/adapters/smollm2-135m-fim/README.md": "adapter.md",
}
"""Pages outside docs/: path in the repository -> page of the site."""

_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()[^)#:\s]+(?=[)#])")
_LEXERS = {".py": "python", ".json": "json", ".toml": "toml", ".sh": "sh"}

_PYTHON_API = """\
# The Python API

`from midfill import LLM, SamplingParams`: what is listed here is public, and keeps its names for
one release when they change. The first example is in [the README](../index.md).
"""
_PUBLIC: Mapping[str, Sequence[str] | None] = {
    "midfill.LLM": None,
    "midfill.llm.LoadOptions": None,
    "midfill.llm.InfillOptions": None,
    "midfill.infill.request.InfillRequest": (),
    "midfill.SamplingParams": (),
    "midfill.engine.request.EngineSamplingParams": (),
    "midfill.PostProcessing": (),
    "midfill.ContextFile": (),
    "midfill.WindowRule": (),
    "midfill.frontend.generation.GenerationResult": ("text",),
    "midfill.frontend.answer.Answer": (),
    "midfill.frontend.generation.AnswerStream": None,
    "midfill.frontend.answer.AnswerDelta": (),
    "midfill.frontend.answer.TokenLogprob": (),
    "midfill.frontend.generation.Usage": ("computed_tokens",),
    "midfill.frontend.prompt.LayoutReport": (),
    "midfill.errors.MidfillError": (),
    "midfill.errors.InvalidRequestError": (),
    "midfill.errors.ModelNotFoundError": (),
    "midfill.errors.CheckpointError": (),
    "midfill.errors.GenerationError": (),
    "midfill.errors.UnavailableError": (),
}
"""What the Python reference documents, and with which members; None: all public ones."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for path, uri in PAGES.items():
        pages[path] = (ROOT / path).read_text("utf-8")
        files.append(File.generated(config, uri, content=pages[path]))
    linked = {target for path, text in pages.items() for target in _targets(path, text)}
    for path in sorted(_with_files_of_folders(linked)):
        uri = _site_uri(path)
        if uri.startswith("source/"):
            text, hidden = _source_page(path), InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, uri, content=text, inclusion=hidden))
    files.append(File.generated(config, "reference/python.md", content=_python_reference()))
    files.append(File.generated(config, "reference/cli.md", content=_command_reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to the repository's files: they are pages of the site."""
    uri = page.file.src_uri
    if uri.startswith(("reference/", "source/")):
        return markdown
    outside = {site: path for path, site in PAGES.items()}
    folder = str(PurePosixPath(outside.get(uri, f"docs/{uri}")).parent)

    def rewritten(match: re.Match[str]) -> str:
        target = normpath(f"{folder}/{match[0]}")
        return relpath(_site_uri(target), str(PurePosixPath(uri).parent))

    return "".join(
        part if is_code else _LINK.sub(rewritten, part) for is_code, part in _parts(markdown)
    )


def _parts(markdown: str) -> Iterator[tuple[bool, str]]:
    """Divide a page into (whether it is a fenced block, text)."""
    place = 0
    for block in _FENCE.finditer(markdown):
        yield False, markdown[place : block.start()]
        yield True, block[0]
        place = block.end()
    yield False, markdown[place:]


def _targets(path: str, markdown: str) -> Iterator[str]:
    """Yield the repository's files that a page links to."""
    folder = PurePosixPath(path).parent
    for is_code, part in _parts(markdown):
        if not is_code:
            yield from (normpath(f"{folder}/{target}") for target in _LINK.findall(part))


def _with_files_of_folders(paths: set[str]) -> set[str]:
    folders = {path for path in paths if (ROOT / path).is_dir()}
    listed = {entry for folder in folders for entry in _entries(folder)}
    return paths | {path for path in listed if (ROOT / path).is_file()}


def _entries(folder: str) -> list[str]:
    """The files of a folder that belong to the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()


def _site_uri(path: str) -> str:
    """The page of the site that shows a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith((".md", ".png", ".svg")):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def _source_page(path: str) -> str:
    """A page with a file's text, or with links to a folder's files; the search leaves it out."""
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {path}\n\n"
    if (ROOT / path).is_dir():
        folder = PurePosixPath(_site_uri(path)).parent
        links = [f"- [{each}]({relpath(_site_uri(each), folder)})" for each in _entries(path)]
        return head + "\n".join(links) + "\n"
    text = (ROOT / path).read_text("utf-8").rstrip("\n")
    return f"{head}`````{_LEXERS.get(PurePosixPath(path).suffix, 'text')}\n{text}\n`````\n"


def _python_reference() -> str:
    """The page of the public names; mkdocstrings fills it from their docstrings."""
    parts = [_PYTHON_API]
    for name, members in _PUBLIC.items():
        parts.append(f"::: {name}\n")
        if members is not None:
            parts.append(f"    options:\n      members: {list(members)}\n")
    return "\n".join(parts)


def _command_reference() -> str:
    """The page of all commands with their options, as Typer writes it from the commands."""
    command = [sys.executable, "-m", "typer", "midfill.cli.app", "utils", "docs"]
    text = subprocess.run(
        [*command, "--name", "midfill"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    # The lists of commands are cut off in the middle of a sentence, and the page has a contents.
    text = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", "", text)
    return text.replace("# `midfill`", "# The command line", 1)
