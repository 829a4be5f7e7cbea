"""midfill serves language models for infilling and computes only what an edit changed.

from midfill import LLM, SamplingParams
print(LLM("smollm2-135m").infill("def add(a, b):\\n    return ", "\\n").text)
"""

from typing import TYPE_CHECKING, Any

from midfill.version import __version__

if TYPE_CHECKING:
    from midfill.frontend.sampling import PostProcessing, SamplingParams
    from midfill.infill.context_files import ContextFile
    from midfill.infill.window import WindowRule
    from midfill.llm import LLM

__all__ = ["LLM", "ContextFile", "PostProcessing", "SamplingParams", "WindowRule", "__version__"]

_HOMES = {
    "ContextFile": "midfill.infill.context_files",
    "LLM": "midfill.llm",
    "PostProcessing": "midfill.frontend.sampling",
    "SamplingParams": "midfill.frontend.sampling",
    "WindowRule": "midfill.infill.window",
}
_RENAMED = {"Trimming": "PostProcessing"}  # old name -> new name; kept for one release


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line must start fast."""
    if name in _RENAMED:
        import warnings

        message = f"midfill.{name} is now midfill.{_RENAMED[name]}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name not in _HOMES:
        raise AttributeError(f"module 'midfill' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
