"""Sections of a document that benchmarks write, as in docs/benchmarks.md."""

from pathlib import Path


def replace_section(path: Path, name: str, body: str) -> None:
    """Replace what is between the marks ``<!-- name -->`` and ``<!-- /name -->`` of a document.

    If the document lacks the marks, the section is added at its end; a missing document is created.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = f"{start}\n{body.strip()}\n{end}"
    text = path.read_text("utf-8") if path.exists() else "# Benchmarks\n"
    if start in text and end in text:
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + section + after
    else:
        text = text.rstrip("\n") + "\n\n" + section + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
