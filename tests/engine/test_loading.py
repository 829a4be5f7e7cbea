"""load_engine composes the policies from the model's options."""

import random
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from tiny_checkpoints import VOCAB, write_variant

from midfill.config import ModelOptions, WarmTierOptions
from midfill.engine.loading import (
    load_engine,
    lookahead,
    retention,
    scheduler_policy,
    speculation,
)
from midfill.engine.request import EngineSamplingParams, RequestHints
from midfill.engine.scheduling.policies.background_prefill import BackgroundPrefill
from midfill.engine.scheduling.policies.layered_prefill import LayeredPrefill
from midfill.engine.scheduling.policies.online_first import OnlineFirst
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.policies.shortest_first import ShortestPromptFirst
from midfill.errors import CheckpointError, OptionError
from midfill.methods.episodes.method import EpisodicMethod
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.sentence_encoder import SentenceEncoder
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from serving import request, serve


def test_the_options_reach_the_policies() -> None:
    chunked = SarathiServe(token_budget=7, max_running=3, short_share=0.5)
    options = ModelOptions(token_budget=7, max_running=3)
    ordered = OrderedAdmission(LayeredPrefill(chunked, 30, False), ShortestPromptFirst())
    policies = BackgroundPrefill(ordered)
    assert scheduler_policy(options, 30) == OnlineFirst(policies, options.offline_step_tokens)
    layered = ModelOptions(
        token_budget=7, max_running=3, scheduler="layered-prefill", offline_token_budget=5
    )
    policies = BackgroundPrefill(LayeredPrefill(chunked, 30, True))
    assert scheduler_policy(layered, 30) == OnlineFirst(policies, 5)
    assert speculation(ModelOptions(speculation=False)) is None


@pytest.mark.parametrize("drafts", [True, False])
def test_no_step_of_a_loaded_engine_exceeds_them(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    batches: list[ForwardBatch] = []
    forward = CpuRunner.forward

    def recorded(runner: CpuRunner, batch: ForwardBatch) -> object:
        batches.append(batch)
        return forward(runner, batch)

    monkeypatch.setattr(CpuRunner, "forward", recorded)
    options = ModelOptions(
        backend="cpu",
        threads=1,
        kv_memory=4 * 2**20,
        token_budget=11,
        max_running=3,
        speculation=drafts,
    )
    engine, runner, info = load_engine(open_checkpoint(tiny_folder), options)
    rng = random.Random(0)
    serve(engine, [request(f"r{i}", rng.choices(range(1, VOCAB), k=30) * 2) for i in range(6)])
    assert max(batch.rows for batch in batches) == 11
    assert max(batch.requests for batch in batches) == 3
    assert info.slots == runner.slots == engine.stats().slots_total


def test_loading_counts_from_the_given_start(tiny_folder: Path) -> None:
    options = ModelOptions(backend="cpu", threads=1, kv_memory=2**20)
    started = time.perf_counter() - 1000.0
    _, _, info = load_engine(open_checkpoint(tiny_folder), options, started=started)
    assert info.load_seconds >= 1000.0


def test_methods_are_given_the_sentence_encoder(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ModelOptions(
        backend="cpu", threads=1, kv_memory=4 * 2**20, allow_methods=("any",),
        sentence_encoder=str(tmp_path),
    )  # fmt: skip
    checkpoint = open_checkpoint(tiny_folder)
    with pytest.raises(CheckpointError, match="is no folder of a sentence encoder"):
        load_engine(checkpoint, options)
    encoder = SentenceEncoder({}, {"num_hidden_layers": 0, "num_attention_heads": 1,
        "layer_norm_eps": 0.0, "hidden_size": 8}, None)  # type: ignore[arg-type]  # fmt: skip
    monkeypatch.setattr(SentenceEncoder, "open", lambda _: encoder)
    for encodes, given in ((True, options), (False, replace(options, sentence_encoder=None))):
        engine, runner, _ = load_engine(checkpoint, given)
        method = engine.find_method("epicache:budget=8")
        assert isinstance(method, EpisodicMethod)
        assert (method.encode is not None) == encodes
        assert isinstance(runner, CpuRunner)
        runner.close()


def test_an_order_sees_more_of_the_queue_than_first_come_first_served() -> None:
    assert lookahead(ModelOptions(scheduler="sarathi-serve")) == 0
    assert lookahead(ModelOptions(scheduler="layered-prefill+edf")) > 128


def test_continuum_keeps_the_kv_of_an_answer_that_calls_a_tool(tiny_folder: Path) -> None:
    options = ModelOptions(
        backend="cpu", threads=1, kv_memory=2**20, scheduler="continuum:threshold=1000"
    )
    checkpoint = open_checkpoint(tiny_folder)
    assert retention(ModelOptions(), checkpoint.tokenizer) is None
    engine, _, _ = load_engine(checkpoint, options)
    call = checkpoint.tokenizer.encode('{"name": "ls", "arguments": {}}')
    params = EngineSamplingParams(max_tokens=len(call) + 5, temperature=0.0, ignore_eos=True)
    asked = request("a", range(5, 45), params, hints=RequestHints(program="task"))
    # As if an engine had written the call; its client ends the answer there.
    engine.add(asked)
    while not any(output.token_ids for output in engine.step()):
        pass
    (sequence,) = engine._queues.running
    sequence.drop(sequence.length - sequence.prompt_length)
    for token_id in call:
        sequence.append(token_id)
    engine.cancel("a")
    seconds = engine.idle_seconds()
    assert seconds is not None
    assert 0.0 < seconds <= 1000.0


def test_models_with_states_run_as_many_answers_as_states_allow_and_have_no_warm_tier(
    tmp_path: Path,
) -> None:
    checkpoint = open_checkpoint(write_variant("granitehybrid", tmp_path))
    assert checkpoint.config.state_space is not None
    memory = 20 * checkpoint.config.state_space.state_bytes
    options = ModelOptions(backend="torch", device="cpu", kv_memory=memory)
    engine, runner, info = load_engine(checkpoint, options)
    assert info.max_running == 5
    assert info.kv_bytes == runner.kv_bytes
    answers = serve(engine, [request(f"{n}", range(5, 25 + n)) for n in range(8)])
    assert len(answers) == 8
    tier = WarmTierOptions(memory=1 << 30)
    with pytest.raises(OptionError, match=r"--warm-tier-memory .* layers with a state") as caught:
        load_engine(checkpoint, ModelOptions(warm_tier=tier))
    assert "\n" not in str(caught.value)
