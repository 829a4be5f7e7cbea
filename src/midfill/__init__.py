"""midfill serves language models for infilling and computes only what an edit changed.

from midfill import LLM, SamplingParams
print(LLM("smollm2-135m").infill("def add(a, b):\\n    return ", "\\n").text)
"""

from typing import TYPE_CHECKING, Any

from midfill.version import __version__

if TYPE_CHECKING:
    from midfill.frontend.sampling import SamplingParams
    from midfill.frontend.trimming import Trimming
    from midfill.infill.context import ContextFile
    from midfill.llm import LLM

__all__ = ["LLM", "ContextFile", "SamplingParams", "Trimming", "__version__"]

_HOMES = {
    "ContextFile": "midfill.infill.context",
    "LLM": "midfill.llm",
    "SamplingParams": "midfill.frontend.sampling",
    "Trimming": "midfill.frontend.trimming",
}


def __getattr__(name: str) -> Any:
    """Import what it takes when it is first used: the command line must start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'midfill' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
