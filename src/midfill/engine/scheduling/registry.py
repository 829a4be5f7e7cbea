"""Scheduling policies by name, and what "layered-prefill+shortest-first:ageing=20" means.

A specification names one way of batching, one queue order, or both joined with "+". A policy's
module is imported when it is first asked for.
"""

import importlib
from dataclasses import dataclass, fields
from typing import Any, Literal

from midfill.engine.scheduling.policies.ordered_admission import QueueOrder
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.errors import InvalidRequestError
from midfill.specifications import defaults, nearest_name, parse_options, split_specification

Kind = Literal["batching", "layers", "order"]
"""What a policy decides: "batching" which tokens run in a step (a subclass of ``SarathiServe``),
"layers" the same for prompts that run layer by layer, "order" who is admitted next."""

_SIZES = frozenset({"token_budget", "max_running"})
"""Fields that other options of the server set."""


@dataclass(frozen=True)
class PolicyEntry:
    """A registered policy.

    Attributes:
        name: on the command line.
        kind: what it decides.
        title: what it does, for a list of policies.
        source: where it was published.
        module, factory: the dataclass of its options; the module is one of ``policies``, or a full
            name.
    """

    name: str
    kind: Kind
    title: str
    source: str
    module: str
    factory: str

    def load(self) -> type[Any]:
        """Return the dataclass of the policy's options."""
        package = f"{__package__}.policies"
        found: type[Any] = getattr(importlib.import_module(self.module, package), self.factory)
        return found

    def options(self) -> dict[str, object]:
        """Return the policy's options and their defaults; a batch's sizes are none of them."""
        if self.kind == "layers":
            return {}
        factory = self.load()
        hidden = _SIZES
        if self.kind == "batching":
            hidden |= factory.fixed_options
        return {name: value for name, value in defaults(factory).items() if name not in hidden}


POLICIES = {
    entry.name: entry
    for entry in (
        PolicyEntry("sarathi-serve", "batching", "decodes first, then chunks of prompts",
            "Agrawal et al., OSDI 2024, arXiv 2403.02310", ".sarathi_serve", "SarathiServe"),
        PolicyEntry("dynamic-chunks", "batching", "chunks that shrink as the context grows",
            "Agrawal et al., OSDI 2024, arXiv 2403.02310", ".dynamic_chunks", "DynamicChunks"),
        PolicyEntry("nexus", "batching", "chunks as large as the answers can bear, by their cost",
            "Shi et al., 2025, arXiv 2507.06608", ".nexus", "Nexus"),
        PolicyEntry("layered-prefill", "layers", "long prompts by groups of layers",
            "Lee et al., 2025, arXiv 2510.08055", ".layered_prefill", "LayeredPrefill"),
        PolicyEntry("memory-centric", "batching", "admits as KV memory allows, with a reserve",
            "Zheng et al., 2024, arXiv 2412.03594", ".memory_centric", "MemoryCentric"),
        PolicyEntry("sarathi", "batching", "one prompt's chunk per step, decodes ride along",
            "Agrawal et al., 2023, arXiv 2308.16369", ".sarathi", "Sarathi"),
        PolicyEntry("prefill-first", "batching", "baseline: whole prompts, before any decode",
            "Kwon et al., SOSP 2023, arXiv 2309.06180", ".prefill_first", "PrefillFirst"),
        PolicyEntry("iteration-level", "batching", "baseline: whole prompts beside the decodes",
            "Yu et al., OSDI 2022", ".iteration_level", "IterationLevel"),
        PolicyEntry("request-level", "batching", "baseline: one batch after the other",
            "Yu et al., OSDI 2022", ".request_level", "RequestLevel"),
        PolicyEntry("fcfs", "order", "first come, first served",
            "Kwon et al., SOSP 2023, arXiv 2309.06180", ".fcfs", "FirstComeFirstServed"),
        PolicyEntry("shortest-first", "order", "shortest prompt first, with ageing",
            "Shi et al., 2025, arXiv 2507.06608", ".shortest_first", "ShortestPromptFirst"),
        PolicyEntry("longest-prefix", "order", "most cached tokens first",
            "Zheng et al., NeurIPS 2024, arXiv 2312.07104",
            ".longest_prefix", "LongestPrefixMatch"),
        PolicyEntry("hit-rate", "order", "largest cached share first, with ageing",
            "Yang et al., 2025, arXiv 2503.16525", ".highest_hit_rate", "HighestHitRate"),
        PolicyEntry("priority", "order", "lowest `priority` first",
            "vLLM's priority scheduling", ".priority", "PriorityOrder"),
        PolicyEntry("edf", "order", "earliest deadline first",
            "Liu and Layland, Journal of the ACM 1973",
            ".earliest_deadline", "EarliestDeadlineFirst"),
        PolicyEntry("decode-heavy", "order", "long answers to short prompts first",
            "Zheng et al., 2024, arXiv 2412.03594", ".decode_heavy_first", "DecodeHeavyFirst"),
        PolicyEntry("continuum", "order", "programs in order of arrival; their KV stays for a time",
            "Li et al., 2025, arXiv 2511.02230", ".continuum", "Continuum"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class ChosenPolicies:
    """What a specification names.

    Attributes:
        batching: the dataclass of the way of batching.
        settings: its options, as far as they are given.
        by_layers: whether prompts run layer by layer where they may.
        order: decides who is admitted next; None leaves the queue as it is, first come, first
            served.
    """

    batching: type[SarathiServe] = SarathiServe
    settings: tuple[tuple[str, Any], ...] = ()
    by_layers: bool = False
    order: QueueOrder | None = None

    def build_batching(self, token_budget: int, max_running: int, **defaults: Any) -> SarathiServe:
        """Return the way of batching.

        Args:
            token_budget, max_running: see ``SarathiServe``.
            defaults: of options that the specification doesn't give.

        Raises:
            InvalidRequestError: an option's value is out of range.
        """
        known = {field.name for field in fields(self.batching)}
        given = {name: value for name, value in defaults.items() if name in known}
        given |= dict(self.settings)
        found: SarathiServe = _build(
            self.batching, token_budget=token_budget, max_running=max_running, **given
        )
        return found


def resolve_scheduler(specification: str) -> ChosenPolicies:
    """Return the policies that "name:option=value,option=value" stands for.

    Args:
        specification: a way of batching, an order, or both joined with "+".

    Raises:
        InvalidRequestError: there is no such policy or option, a value doesn't fit, or there are
            several of one kind.
    """
    chosen: dict[str, str] = {}
    values: dict[str, Any] = {}
    for part in split_specification(specification, param="scheduler"):
        name, _, settings = part.partition(":")
        if name not in POLICIES:
            nearest = nearest_name(name, list(POLICIES))
            raise InvalidRequestError(f"there is no scheduler {name!r}{nearest}", param="scheduler")
        entry = POLICIES[name]
        decides = "order" if entry.kind == "order" else "batching"
        if decides in chosen:
            raise InvalidRequestError(
                f"{chosen[decides]} and {name} both decide the {decides}; name one of them",
                param="scheduler",
            )
        chosen[decides] = name
        given = parse_options(
            entry.load(), name, settings, known=list(entry.options()), param="scheduler"
        )
        if entry.kind == "order":
            values["order"] = _build(entry.load(), **given)
        elif entry.kind == "layers":
            values["by_layers"] = True
        else:
            values |= {"batching": entry.load(), "settings": tuple(given.items())}
    found = ChosenPolicies(**values)
    found.build_batching(1, 1)  # checks the values
    return found


def _build(factory: type[Any], **options: Any) -> Any:
    """Return an instance of a policy.

    Raises:
        InvalidRequestError: a value is out of range.
    """
    try:
        return factory(**options)
    except ValueError as error:
        raise InvalidRequestError(str(error), param="scheduler") from None
