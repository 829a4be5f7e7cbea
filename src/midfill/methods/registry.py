"""Methods by name, and what a specification like "cake:budget=256" means.

A method's module is imported when it is first asked for, so that nothing pays for methods that
nobody uses.
"""

import importlib
from dataclasses import dataclass
from typing import Any

from midfill.errors import InvalidRequestError
from midfill.methods.method import CombinedMethod, Method, ModelSpecific
from midfill.specifications import defaults, make_options, nearest_name, split_specification

OFF = "none"
"""A specification that asks for no method."""

KINDS = {
    "evict": "keeps a part of each prompt's KV while its answer is written",
    "quantize": "keeps each prompt's KV at few bits while its answer is written",
    "prefill": "computes a part of a prompt's attention",
    "reuse": "takes KV of text that has moved from where it stood",
    "decode": "reads a part of the KV for each token of an answer",
    "episodes": "keeps a part of a conversation's KV for each of its topics",
    "rows": "drops tokens of a prompt between two layers",
    "latents": "has each worker read its part of the latents of DeepSeek models",
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
        calibrated: whether it has tables, for some options at least, that ``midfill methods
            calibrate`` computes of a model.
        calibrated_where: for which options, if not for all: "with alpha above 0".
    """

    name: str
    kind: str
    title: str
    source: str
    module: str
    factory: str
    calibrated: bool = False
    calibrated_where: str = ""

    def load(self) -> type[Any]:
        """Return the dataclass of the method's hyper-parameters."""
        found: type[Any] = getattr(importlib.import_module(self.module, __package__), self.factory)
        return found

    def options(self) -> dict[str, object]:
        """Return the method's options and their defaults."""
        return defaults(self.load())


METHODS = {
    entry.name: entry
    for entry in (
        MethodEntry("cake", "evict", "CAKE",
            "Qin et al., ICLR 2025, arXiv 2503.12491", ".evict.cake", "Cake"),
        MethodEntry("h2o", "evict", "H2O",
            "Zhang et al., NeurIPS 2023, arXiv 2306.14048", ".evict.h2o", "H2O"),
        MethodEntry("kvmerger", "evict", "KVMerger",
            "Wang et al., 2024, arXiv 2407.08454", ".evict.kvmerger", "KVMerger"),
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
        MethodEntry("minicache", "evict", "MiniCache",
            "Liu et al., NeurIPS 2024, arXiv 2405.14366", ".evict.minicache", "MiniCache"),
        MethodEntry("gear", "quantize", "GEAR",
            "Kang et al., 2024, arXiv 2403.05527", ".quantize.gear", "Gear"),
        MethodEntry("kivi", "quantize", "KIVI",
            "Liu et al., ICML 2024, arXiv 2402.02750", ".quantize.kivi", "Kivi"),
        MethodEntry("mikv", "quantize", "MiKV",
            "Yang et al., 2024, arXiv 2402.18096", ".quantize.mikv", "MiKV"),
        MethodEntry("zipcache", "quantize", "ZipCache",
            "He et al., NeurIPS 2024, arXiv 2405.14256", ".quantize.zipcache", "ZipCache"),
        MethodEntry("minference", "prefill", "MInference",
            "Jiang et al., NeurIPS 2024, arXiv 2407.02490",
            ".sparse_prefill.minference", "MInference", calibrated=True),
        MethodEntry("flexprefill", "prefill", "FlexPrefill",
            "Lai et al., ICLR 2025, arXiv 2502.20766",
            ".sparse_prefill.flexprefill", "FlexPrefill"),
        MethodEntry("cacheblend", "reuse", "CacheBlend",
            "Yao et al., EuroSys 2025, arXiv 2405.16444", ".reuse.cacheblend", "CacheBlend"),
        MethodEntry("cachecraft", "reuse", "Cache-Craft",
            "Agarwal et al., SIGMOD 2025, arXiv 2502.15734", ".reuse.cachecraft", "CacheCraft"),
        MethodEntry("kvshare", "reuse", "KVShare",
            "Yang et al., 2025, arXiv 2503.16525", ".reuse.kvshare", "KVShare"),
        MethodEntry("kvcomm", "reuse", "KVCOMM",
            "Ye et al., NeurIPS 2025, arXiv 2510.12872", ".reuse.kvcomm", "KVComm"),
        MethodEntry("ape", "reuse", "APE",
            "Yang et al., ICLR 2025, arXiv 2502.05431", ".contexts.ape", "Ape"),
        MethodEntry("lserve", "decode", "LServe",
            "Yang et al., MLSys 2025, arXiv 2502.14866", ".sparse_decode.lserve", "LServe"),
        MethodEntry("hip", "decode", "HiP Attention",
            "Lee et al., ICLR 2025, arXiv 2406.09827", ".sparse_decode.hip", "Hip"),
        MethodEntry("hip-prefill", "prefill", "HiP Attention's prefill",
            "Lee et al., ICLR 2025, arXiv 2406.09827", ".sparse_prefill.hip_prefill", "HipPrefill"),
        MethodEntry("sentencekv", "decode", "SentenceKV",
            "Zhu et al., COLM 2025, arXiv 2504.00970", ".sentences.sentencekv", "SentenceKV"),
        MethodEntry("epicache", "episodes", "EpiCache",
            "Kim et al., 2025, arXiv 2509.17396",
            ".episodes.epicache", "EpiCache", calibrated=True,
            calibrated_where="with alpha above 0"),
        MethodEntry("lazyllm", "rows", "LazyLLM",
            "Fu et al., 2024, arXiv 2407.14057", ".rows.lazyllm", "LazyLLM"),
        MethodEntry("uncomp-stage", "rows", "UNComp's stages",
            "Xiong et al., 2024, arXiv 2410.03090", ".rows.uncomp_stage", "UNCompStage"),
        MethodEntry("tpla", "latents", "TPLA",
            "Tang et al., 2025, arXiv 2508.15881", ".latents.tpla", "Tpla"),
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
    parts = split_methods(specification)
    if not parts:
        return None
    found = []
    for part in parts:
        name, _, settings = part.partition(":")
        check_name(name)
        method: Method = make_options(METHODS[name].load(), name, settings, param="method")
        found.append((name, method))
    return found[0][1] if len(found) == 1 else CombinedMethod(tuple(found))


def split_methods(specification: str) -> list[str]:
    """Return the specifications of the methods that one names together; none for no method.

    Raises:
        InvalidRequestError: it is longer than any that means something.
    """
    if specification in ("", OFF):
        return []
    return split_specification(specification, param="method")


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
