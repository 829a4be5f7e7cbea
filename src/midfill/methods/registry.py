"""Methods by name, and what a specification like "cake:budget=256" means.

A method's module is imported when it is first asked for, so that nothing pays for methods that
nobody uses.
"""

import dataclasses
import difflib
import importlib
import re
from dataclasses import dataclass
from typing import Any, get_type_hints

from midfill.errors import InvalidRequestError
from midfill.methods.method import CombinedMethod, Method, ModelSpecific

OFF = "none"
_MAX_SPECIFICATION = 1000
"""A specification that asks for no method."""

KINDS = {
    "evict": "keeps a part of each prompt's KV while its answer is written",
    "prefill": "computes a part of a prompt's attention",
    "reuse": "takes KV of text that has moved from where it stood",
    "rows": "drops tokens of a prompt between two layers",
}
"""What methods do, by kind."""


@dataclass(frozen=True)
class MethodEntry:
    """A registered method.

    Attributes:
        name: on the command line.
        kind: one of ``KINDS``.
        title: as its paper calls it.
        source: where it was published.
        module, factory: the dataclass of its hyper-parameters; a module below ``midfill.methods``
            begins with a dot.
        calibrated: whether it needs tables that ``midfill methods calibrate`` computes of a model.
    """

    name: str
    kind: str
    title: str
    source: str
    module: str
    factory: str
    calibrated: bool = False

    def load(self) -> type[Any]:
        """Return the dataclass of the method's hyper-parameters."""
        found: type[Any] = getattr(importlib.import_module(self.module, __package__), self.factory)
        return found

    def options(self) -> dict[str, object]:
        """Return the method's options and their defaults."""
        return defaults(self.load())


def defaults(factory: type[Any]) -> dict[str, object]:
    """Return the names of a dataclass's fields and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(factory)}


METHODS = {
    entry.name: entry
    for entry in (
        MethodEntry("cake", "evict", "CAKE",
            "Qin et al., ICLR 2025, arXiv 2503.12491", ".evict.cake", "Cake"),
        MethodEntry("h2o", "evict", "H2O",
            "Zhang et al., NeurIPS 2023, arXiv 2306.14048", ".evict.h2o", "H2O"),
        MethodEntry("lacache", "evict", "LaCache",
            "Shi et al., ICML 2025, arXiv 2507.14204", ".evict.lacache", "LaCache"),
        MethodEntry("snapkv", "evict", "SnapKV",
            "Li et al., NeurIPS 2024, arXiv 2404.14469", ".evict.snapkv", "SnapKV"),
        MethodEntry("streamingllm", "evict", "StreamingLLM",
            "Xiao et al., ICLR 2024, arXiv 2309.17453", ".evict.streaming_llm", "StreamingLLM"),
        MethodEntry("compresskv", "evict", "CompressKV",
            "Lin et al., 2025, arXiv 2508.02401",
            ".evict.compresskv", "CompressKV", calibrated=True),
        MethodEntry("uncomp", "evict", "UNComp",
            "Xiong et al., 2024, arXiv 2410.03090", ".evict.uncomp", "UNComp", calibrated=True),
        MethodEntry("razorattention", "evict", "RazorAttention",
            "Tang et al., ICLR 2025, arXiv 2407.15891",
            ".evict.razorattention", "RazorAttention", calibrated=True),
        MethodEntry("duoattention", "evict", "DuoAttention",
            "Xiao et al., ICLR 2025, arXiv 2410.10819",
            ".evict.duoattention", "DuoAttention", calibrated=True),
        MethodEntry("minference", "prefill", "MInference",
            "Jiang et al., NeurIPS 2024, arXiv 2407.02490",
            ".sparse_prefill.minference", "MInference", calibrated=True),
        MethodEntry("flexprefill", "prefill", "FlexPrefill",
            "Lai et al., ICLR 2025, arXiv 2502.20766",
            ".sparse_prefill.flexprefill", "FlexPrefill"),
        MethodEntry("cacheblend", "reuse", "CacheBlend",
            "Yao et al., EuroSys 2025, arXiv 2405.16444", ".reuse.cacheblend", "CacheBlend"),
        MethodEntry("ape", "reuse", "APE",
            "Yang et al., ICLR 2025, arXiv 2502.05431", ".contexts.ape", "Ape"),
        MethodEntry("lazyllm", "rows", "LazyLLM",
            "Fu et al., 2024, arXiv 2407.14057", ".rows.lazyllm", "LazyLLM"),
        MethodEntry("uncomp-stage", "rows", "UNComp's stages",
            "Xiong et al., 2024, arXiv 2410.03090", ".rows.uncomp_stage", "UNCompStage"),
    )
}  # fmt: skip


def methods_of(kind: str) -> list[str]:
    """Return the names of the methods of a kind."""
    return [entry.name for entry in METHODS.values() if entry.kind == kind]


def resolve_method(specification: str) -> Method | ModelSpecific | None:
    """Return the method that "name" or "name:option=value,option=value" stands for.

    Args:
        specification: "" or "none" for no method; several, joined with "+", for all of them
            together: "minference+snapkv:budget=256".

    Raises:
        InvalidRequestError: there is no such method or option, or a value doesn't fit.
    """
    parts = split_specification(specification)
    if not parts:
        return None
    found = []
    for part in parts:
        name, _, settings = part.partition(":")
        check_name(name)
        method: Method = make_options(METHODS[name].load(), name, settings)
        found.append((name, method))
    return found[0][1] if len(found) == 1 else CombinedMethod(tuple(found))


def split_specification(specification: str) -> list[str]:
    """Return the specifications of the methods that one names together; none for no method.

    Raises:
        InvalidRequestError: it is longer than any that means something.
    """
    if specification in ("", OFF):
        return []
    if len(specification) > _MAX_SPECIFICATION:
        raise InvalidRequestError(
            f"a name with its options has at most {_MAX_SPECIFICATION} characters, not"
            f" {len(specification)}",
            param="method",
        )
    return re.split(r"\+(?=[a-z])", specification)  # a "+" in a number's exponent divides nothing


def make_options(factory: type[Any], name: str, settings: str) -> Any:
    """Return ``factory`` with the options that "option=value,option=value" lists.

    Args:
        factory: a dataclass.
        name: for messages.
        settings: "" leaves all at their defaults.

    Raises:
        InvalidRequestError: there is no such option, or a value doesn't fit.
    """
    return factory(**parse_options(factory, name, settings, known=list(defaults(factory))))


def parse_options(
    factory: type[Any], name: str, settings: str, *, known: list[str]
) -> dict[str, object]:
    """Return the options that "option=value,option=value" lists, by name.

    Args:
        factory: a dataclass.
        name: for messages.
        settings: "" gives none.
        known: which of the dataclass's fields are options.

    Raises:
        InvalidRequestError: there is no such option, or a value doesn't fit.
    """
    kinds = get_type_hints(factory)
    values: dict[str, object] = {}
    for item in filter(None, settings.split(",")):
        option, equals, text = item.partition("=")
        if option not in known:
            nearest = nearest_name(option, known) if known else ": it has none"
            raise InvalidRequestError(f"{name} has no option {option!r}{nearest}", param="method")
        if not equals:
            raise InvalidRequestError(f"{name}: write {option}=VALUE", param="method")
        values[option] = _parse(text, kinds[option], f"{name}: {option}")
    return values


def parse_name(specification: str) -> str:
    """Return the name in a specification."""
    return specification.partition(":")[0] or OFF


def check_name(name: str) -> None:
    """Check that there is a method of this name.

    Raises:
        InvalidRequestError: there is none; names the nearest.
    """
    if name not in METHODS:
        raise InvalidRequestError(
            f"there is no method {name!r}{nearest_name(name, list(METHODS))}", param="method"
        )


def _parse(text: str, kind: type, option: str) -> object:
    try:
        return kind(text)
    except ValueError:
        words = {int: "a whole number", float: "a number"}
        raise InvalidRequestError(
            f"{option} must be {words.get(kind, 'text')}, not {text!r}", param="method"
        ) from None


def nearest_name(name: str, known: list[str]) -> str:
    """Return the end of a message: the nearest of some names, or all of them if none is near."""
    wanted = name.lower()
    begun = [each for each in known if len(wanted) > 2 and each.startswith(wanted)]
    found = begun or difflib.get_close_matches(wanted, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; there are {', '.join(known)}"
