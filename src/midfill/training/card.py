"""The model card: what was trained on what, and how, in words; made from the record."""

from collections.abc import Mapping
from typing import Any

_HEAD = """---
library_name: {library}
base_model: {base}
license: {licence}
pipeline_tag: text-generation
tags: [code, infilling, fill-in-the-middle]
---

# {base}, taught to infill

Completes at a caret between a prefix and a suffix. Made from {base} by `midfill train fim`;
{serving}

{prompt} {fragments}
"""
_ADAPTER = (
    "`midfill serve {base} --adapter FOLDER` merges this adapter into its base when it starts."
)
_MODEL = "`midfill serve FOLDER` runs it."
_PROMPT = (
    "Prompt: `{prefix}` prefix[:k] `{suffix}` suffix `{middle}` prefix[k:], for any k; the answer\n"
    "ends with `{stop}`."
)
_OWN_PROMPT = "Prompts are in the base's own infilling format."
_FRAGMENTS = (
    "Trained on text tokenised in fragments (EFIM, arXiv 2505.21889), so the caret and k may be "
    "inside a word."
)
_WHOLE = "Trained on text tokenised as a whole."


def model_card(record: Mapping[str, Any], *, adapter: bool) -> str:
    """Markdown for people and for the Hugging Face hub's index.

    Args:
        record: what ``adapter_record`` made.
        adapter: whether it is for an adapter's folder, not a whole model's.
    """
    base, fim = record["base"], record.get("fim")
    prompt = _OWN_PROMPT
    if fim is not None:
        prompt = _PROMPT.format(**{**fim, "stop": fim["stop"][0]})
    parts = [
        _HEAD.format(
            library="peft" if adapter else "transformers",
            base=base["name"],
            licence=str(base.get("licence") or "unknown").lower(),
            serving=(_ADAPTER if adapter else _MODEL).format(base=base["name"]),
            prompt=prompt,
            fragments=_FRAGMENTS if record["fragments"] else _WHOLE,
        )
    ]
    for title in ("training", "data", "recipe"):
        rows = _rows(record.get(title, {}))
        if rows:
            parts.append(f"\n## {title.capitalize()}\n\n| | |\n| --- | --- |\n{rows}")
    return "".join(parts)


def _rows(values: Mapping[str, Any], prefix: str = "") -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append(_rows(value, f"{prefix}{name}."))
        else:
            lines.append(f"| {prefix}{name} | {value} |\n")
    return "".join(lines)
