"""Fields of chats that OpenAI's and Ollama's dialects share: tools, reasoning, the template's."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from midfill.errors import InvalidRequestError
from midfill.serving.server.service import ModelService

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Of OpenAI's ``reasoning_effort``, and of what Ollama takes for ``think``."""

_SWITCHES = ("enable_thinking", "thinking")
"""Names by which chat templates are told whether the model is to reason."""

_OWN_NAMES = frozenset(("messages", "tools", "add_generation_prompt", "bos_token", "eos_token"))


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call; ``parameters`` is its JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    """An entry of ``tools``."""

    type: Literal["function"] = "function"
    function: Function

    def fields(self) -> dict[str, Any]:
        """Return what the template sees; some expect a description."""
        function: dict[str, Any] = {"name": self.function.name}
        function["description"] = self.function.description or ""
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": self.type, "function": function}


def check_tools(service: ModelService) -> None:
    """Refuse tools where a model's calls can't be told from the text of its answers."""
    if not service.has_calls:
        raise InvalidRequestError(
            "tools are not supported for this model: its calls can't be told from its text",
            param="tools",
        )


def reasoning_fields(reasoning: str | None, content: str) -> dict[str, str]:
    """Return the fields in which templates expect an earlier message's reasoning."""
    if not reasoning:
        return {}
    # Templates that read "thinking" want it or content beside a call, not both.
    return {"reasoning_content": reasoning} | ({} if content else {"thinking": reasoning})


def thinking_fields(service: ModelService, *, thinks: bool) -> dict[str, Any]:
    """Return what tells the chat template whether to reason; nothing if it can't be told."""
    return {name: thinks for name in _SWITCHES if name in service.template_names}


def effort_fields(service: ModelService, effort: str, field: str) -> dict[str, Any]:
    """Return what tells the chat template how much to reason.

    Args:
        service: the model's.
        effort: as the client says it; "none" turns reasoning off where that can be.
        field: in which it does.

    Raises:
        InvalidRequestError: no such effort is known.
    """
    if effort not in _EFFORTS:
        known = ", ".join(_EFFORTS)
        raise InvalidRequestError(f"{field} must be one of {known}, not {effort!r}", param=field)
    return {"reasoning_effort": effort, **thinking_fields(service, thinks=effort != "none")}


def check_template_kwargs(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``chat_template_kwargs``, whose names the chat template reads.

    Raises:
        InvalidRequestError: a name is the template's for something that the server passes to it.
    """
    field = "chat_template_kwargs"
    for name in sorted(_OWN_NAMES.intersection(given or ())):
        raise InvalidRequestError(
            f"{field} can't hold {name!r}: the server sets it itself", param=field
        )
    return given or {}
