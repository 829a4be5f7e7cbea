"""Exported KV is imported elsewhere to the same bits, and a prompt that waits for it finds it."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import toy_engine
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.kv_transfer import transfers
from midfill.engine.kv_transfer.transfers import TransferResult
from midfill.engine.messages import TransferDone, TransferRefused
from midfill.engine.request import EngineRequest
from midfill.kv.blob import decode_blob
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import Answers, build_engine, check_idle, request, serve, torch_runner

PROMPT = toy_engine.prompt(90)


def finish(engine: Engine) -> list[TransferResult]:
    """Step until nothing is left; return the results."""
    results: list[TransferResult] = []
    while engine.has_work():
        engine.step()
        results += engine.kv_traffic.transfers.take_results()
    check_idle(engine)
    return results


def serve_beside(
    engine: Engine, requests: Iterable[EngineRequest] = ()
) -> tuple[Answers, list[TransferResult]]:
    """Serve requests while transfers go on; return the results of these, too."""
    results: list[TransferResult] = []
    answers = serve(
        engine,
        requests,
        after_step=lambda one: results.extend(one.kv_traffic.transfers.take_results()),
    )
    return answers, results


def exported(engine: Engine, tokens: list[int], tenant: str = "") -> TransferDone:
    engine.kv_traffic.transfers.start_export("out", tenant, np.array(tokens, np.int32))
    (result,) = finish(engine)
    assert isinstance(result, TransferDone)
    return result


def imported(engine: Engine, blob: bytes, tenant: str = "") -> int:
    engine.kv_traffic.transfers.start_import("in", tenant, blob)
    (result,) = finish(engine)
    assert isinstance(result, TransferDone)
    return result.tokens


@pytest.fixture(autouse=True)
def few_tokens_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every transfer takes several steps."""
    monkeypatch.setattr(transfers, "MAX_STEP_BYTES", 16 * 384)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(params=["cpu f32", "cpu f16", "cpu i8", "cpu i4", "torch"])
def make_runner(request: pytest.FixtureRequest, folder: Path) -> Callable[[], Runner]:
    checkpoint = open_checkpoint(folder)
    if request.param == "torch":
        return lambda: torch_runner(checkpoint, slots=512)
    kv_cache_dtype = request.param.split()[1]
    return lambda: CpuRunner.load(
        checkpoint, slots=512, threads=1, weights="f32", kv_cache_dtype=kv_cache_dtype
    )


def test_imported_kv_has_the_bits_of_computed_kv(make_runner: Callable[[], Runner]) -> None:
    prompt = random.Random(3).choices(range(1, VOCAB), k=150)
    source_runner, target_runner = make_runner(), make_runner()
    source, target = build_engine(source_runner), build_engine(target_runner)
    cold = serve(source, [request("cold", prompt)])["cold", 0]
    # Other slots than in the source, so that every place is a different one.
    serve(target, [request("before", random.Random(4).choices(range(1, VOCAB), k=37))])

    blob = exported(source, prompt)
    assert blob.tokens == 150
    assert imported(target, blob.blob) == 150

    assert decode_blob(exported(target, prompt).blob).data == decode_blob(blob.blob).data
    warm = serve(target, [request("warm", prompt)])["warm", 0]
    assert warm.tokens == cold.tokens
    assert warm.cached_tokens == 149


def test_a_blob_is_as_large_as_its_tokens_are() -> None:
    source = toy_engine.engine()
    serve(source, [request("a", PROMPT)])
    blob = decode_blob(exported(source, PROMPT).blob)
    assert len(blob.data) == 90 * 2 * 2 * 12 * 8  # layers, K and V, head_dim, float64
    assert source.stats().exported_bytes == len(blob.data)


def test_only_what_is_cached_is_exported() -> None:
    source = toy_engine.engine()
    serve(source, [request("a", PROMPT)])
    assert exported(source, [*PROMPT[:50], PROMPT[50] ^ 1]).tokens == 50
    source.kv_traffic.transfers.start_export("none", "", np.array([PROMPT[0] ^ 1], np.int32))
    assert finish(source) == [TransferRefused("none", "none of these tokens is cached")]


def test_a_prompt_that_begins_with_loading_kv_waits_for_it() -> None:
    source, target = toy_engine.engine(), toy_engine.engine()
    serve(source, [request("a", PROMPT)])
    blob = exported(source, PROMPT).blob

    target.kv_traffic.transfers.start_import("in", "", blob)
    target.add(request("waits", [*PROMPT, 3]))
    target.add(request("elsewhere", [PROMPT[0] ^ 1, 2, 3], tenant="bob"))
    assert target.stats().loading == 1
    answers, results = serve_beside(target)

    assert answers["waits", 0].cached_tokens == 90
    assert answers["waits", 0].tokens == toy_engine.truth([*PROMPT, 3])
    assert answers["elsewhere", 0].cached_tokens == 0
    assert target.stats().imported_bytes == 90 * 384
    assert results == [TransferDone("in", 90)]


def test_a_prompt_that_waits_can_be_cancelled() -> None:
    source, target = toy_engine.engine(), toy_engine.engine()
    serve(source, [request("a", PROMPT)])
    target.kv_traffic.transfers.start_import("in", "", exported(source, PROMPT).blob)
    target.add(request("waits", PROMPT))
    target.cancel("waits")
    outputs = target.step()
    assert [output.finish_reason for output in outputs] == ["cancelled"]
    finish(target)


def test_a_prompt_that_waits_for_a_transfer_that_is_ended_is_computed() -> None:
    source, target = toy_engine.engine(), toy_engine.engine()
    serve(source, [request("a", PROMPT)])
    target.kv_traffic.transfers.start_import("in", "", exported(source, PROMPT).blob)
    target.add(request("waits", PROMPT))
    assert target.stats().loading == 1
    target.kv_traffic.transfers.end("in")
    answers, results = serve_beside(target)
    assert answers["waits", 0].tokens == toy_engine.truth(PROMPT)
    assert answers["waits", 0].cached_tokens == 0
    assert results == []


def test_beside_long_steps_more_is_copied_between_two_of_them() -> None:
    source = toy_engine.engine()
    serve(source, [request("a", PROMPT)])
    transfers = source.kv_traffic.transfers
    transfers.start_export("bounded", "", np.array(PROMPT, np.int32))
    transfers.step()
    assert transfers.exported_bytes == 16 * 384
    transfers.step(seconds=60)
    assert transfers.exported_bytes == len(PROMPT) * 384
    finish(source)


def test_an_export_that_is_ended_locks_nothing() -> None:
    source = toy_engine.engine()
    serve(source, [request("a", PROMPT)])
    source.kv_traffic.transfers.start_export("out", "", np.array(PROMPT, np.int32))
    source.kv_traffic.transfers.step()  # a part of it
    source.kv_traffic.transfers.end("out")
    assert finish(source) == []  # and all slots can be evicted


def test_steps_go_on_beside_a_transfer() -> None:
    source, target = toy_engine.engine(), toy_engine.engine()
    serve(source, [request("a", PROMPT)])
    target.add(request("decoding", PROMPT[:5]))
    target.step()
    target.kv_traffic.transfers.start_import("in", "", exported(source, PROMPT).blob)
    answers, results = serve_beside(target)
    assert answers["decoding", 0].finish_reason == "length"
    assert results == [TransferDone("in", 90)]


def test_without_room_the_rest_is_computed() -> None:
    source, target = toy_engine.engine(), toy_engine.engine(slots=40)
    serve(source, [request("a", PROMPT)])
    target.add(request("holds", PROMPT[:1], toy_engine.sampling(max_tokens=30)))
    target.step()
    target.kv_traffic.transfers.start_import("in", "", exported(source, PROMPT).blob)
    target.step()
    answers, (result,) = serve_beside(target)
    assert answers["holds", 0].finish_reason == "length"
    assert isinstance(result, TransferDone)
    assert result.tokens < 90


def test_a_path_that_is_exported_is_not_evicted() -> None:
    source = toy_engine.engine(slots=120)
    serve(source, [request("a", PROMPT)])
    blob = exported(source, PROMPT).blob
    source.kv_traffic.transfers.start_export("out", "", np.array(PROMPT, np.int32))
    other = toy_engine.prompt(60, seed=9)
    answers, (result,) = serve_beside(source, [request("b", other)])
    assert answers["b", 0].tokens == toy_engine.truth(other)
    assert isinstance(result, TransferDone)
    assert result.blob == blob


def test_several_transfers_go_on_at_once() -> None:
    source, target = toy_engine.engine(1000), toy_engine.engine(1000)
    prompts = [toy_engine.prompt(90 - 7 * number, seed=number) for number in range(4)]
    serve(source, [request(f"{number}", prompt) for number, prompt in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        source.kv_traffic.transfers.start_export(f"{number}", "", np.array(prompt, np.int32))
    blobs = finish(source)
    for one in blobs:
        assert isinstance(one, TransferDone)
        target.kv_traffic.transfers.start_import(one.transfer_id, "", one.blob)
    lengths = {f"{number}": len(prompt) for number, prompt in enumerate(prompts)}
    assert {one.transfer_id: one.tokens for one in finish(target)} == lengths  # type: ignore[union-attr]


def test_tenants_share_no_kv() -> None:
    source, target = toy_engine.engine(), toy_engine.engine()
    serve(source, [request("a", PROMPT, tenant="alice")])
    source.kv_traffic.transfers.start_export("theirs", "bob", np.array(PROMPT, np.int32))
    assert finish(source) == [TransferRefused("theirs", "none of these tokens is cached")]
    target.kv_traffic.transfers.start_import("in", "bob", exported(source, PROMPT, "alice").blob)
    assert finish(target) == [TransferRefused("in", "the KV belongs to another tenant")]
    assert target.stats().slots_cached == 0


@pytest.mark.parametrize("damage", [b"", b"midfill", b"\x00" * 500])
def test_what_is_no_blob_is_refused_and_harms_nobody(damage: bytes) -> None:
    target = toy_engine.engine()
    target.kv_traffic.transfers.start_import("in", "", damage)
    answers, (result,) = serve_beside(target, [request("a", PROMPT)])
    assert answers["a", 0].tokens == toy_engine.truth(PROMPT)
    assert isinstance(result, TransferRefused)


def test_what_the_receiver_has_is_left_out() -> None:
    source, target = toy_engine.engine(), toy_engine.engine()
    serve(source, [request("a", PROMPT, toy_engine.sampling(max_tokens=1))])
    whole = exported(source, PROMPT)
    assert imported(target, exported(source, PROMPT[:40]).blob) == 40
    tokens = np.array(PROMPT, np.int32)
    source.kv_traffic.transfers.start_export("out", "", tokens, 40)
    (rest,) = finish(source)
    assert isinstance(rest, TransferDone)
    assert rest.tokens == whole.tokens - 40
    transfers = target.kv_traffic.transfers
    transfers.find("find", "", tokens)
    assert finish(target) == [TransferDone("find", 40)]
    for before, reason in ((40 * [1], "the KV follows other tokens"), ([], "not at 0")):
        transfers.start_import("in", "", rest.blob, np.array(before, np.int32))
        (refused,) = finish(target)
        assert isinstance(refused, TransferRefused)
        assert reason in refused.message
    transfers.start_import("in", "", rest.blob, tokens[:40])
    assert finish(target) == [TransferDone("in", whole.tokens)]
    assert exported(target, PROMPT).blob == whole.blob


def test_without_what_comes_before_nothing_is_imported() -> None:
    source, target = toy_engine.engine(), toy_engine.engine()
    serve(source, [request("a", PROMPT, toy_engine.sampling(max_tokens=1))])
    tokens = np.array(PROMPT, np.int32)
    source.kv_traffic.transfers.start_export("out", "", tokens, 40)
    (rest,) = finish(source)
    assert isinstance(rest, TransferDone)
    target.kv_traffic.transfers.start_import("in", "", rest.blob, tokens[:40])
    assert finish(target) == [TransferDone("in", 0)]
