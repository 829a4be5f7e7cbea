"""The loads of a comparison: what is sent and what is made of the answers."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from peer_reports import SMALL_LOADS

from midfill.errors import MidfillError
from midfill_lab.bench.clients import HttpClient, Measurement
from midfill_lab.bench.documents import Prompts
from midfill_lab.bench.peers.loads import (
    ALL_LAYOUTS,
    LAID_OUT,
    Load,
    Subject,
    loads_for,
    rate_together,
)
from midfill_lab.bench.peers.servers import ComparedModel


def test_only_the_loads_that_are_asked_for(folder_model: ComparedModel) -> None:
    fewer = msgspec.structs.replace(SMALL_LOADS, loads=("rounds", "prefill"))
    loads = loads_for(fewer, Prompts(folder_model.checkpoint.tokenizer, seed=0), ALL_LAYOUTS)
    assert [load.kind for load in loads] == ["prefill", "prefill", "rounds"]


def test_a_peer_is_not_sent_prefix_and_suffix(folder_model: ComparedModel) -> None:
    prompts = Prompts(folder_model.checkpoint.tokenizer, seed=0)
    some = msgspec.structs.replace(SMALL_LOADS, loads=("prefill", "keystroke", "rounds"))
    peer = loads_for(some, prompts, LAID_OUT)
    own = loads_for(some, prompts, ALL_LAYOUTS)
    for theirs, ours in zip(peer, own, strict=True):
        assert (theirs.prompt_tokens < ours.prompt_tokens) == (ours.kind != "prefill")


def test_servers_that_draft_decode_after_another_prompt_in_each_run(
    folder_model: ComparedModel,
) -> None:
    some = msgspec.structs.replace(
        SMALL_LOADS, loads=("decode",), contexts=(16,), streams=(1,), repeats=3
    )
    plain, drafting = loads_for(some, Prompts(folder_model.checkpoint.tokenizer, 0), LAID_OUT)
    for load, different in ((plain, 1), (drafting, 3)):
        cached, decoded = prompts_of(load)
        assert len(cached) == different
        assert len(set(decoded)) == different
        assert len(decoded) == 3
        assert set(decoded) == set(cached)
        assert load.prompt_tokens == 16 * different


def prompts_of(load: Load) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Run a load; return the prompts that were sent before decoding, and to decode after."""
    cached: list[tuple[int, ...]] = []
    decoded: list[tuple[int, ...]] = []

    class Recorder:
        async def complete(self, body: dict[str, Any]) -> Measurement:
            sent = cached if body["max_tokens"] == 1 else decoded
            sent.append(tuple(body["prompt"]))
            return answer([0.0, 1.0, 2.0], 9)

    subject = Subject(cast(HttpClient, Recorder()), "model", lambda *_: 1.0, lambda _: None)
    asyncio.run(load.run(subject))
    return cached, decoded


def test_streams_count_while_all_of_them_are_written() -> None:
    early = answer([0.0, 1.0, 2.0, 3.0, 4.0], 5)
    late = answer([1.0, 2.0, 3.0, 4.0, 5.0], 5)
    assert rate_together([early]) == 1.0
    assert rate_together([early, late]) == 2.0  # from 1 to 4: three tokens each
    assert rate_together([answer([0.0, 1.0, 2.0], 9)]) == 4.0  # four tokens a message
    with pytest.raises(MidfillError, match="not decoded at the same time"):
        rate_together([early, answer([9.0, 10.0, 11.0], 3)])


def answer(arrivals: Sequence[float], tokens: int) -> Measurement:
    return Measurement(0.1, 1.0, 16, 0, tokens, "", tuple(arrivals))
