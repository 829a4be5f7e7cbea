"""Latents in two processes behind the engine: answers by parts, prompts shared as ever."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from naive_latents import CPU, naive_logits, text_batch
from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.messages import TransferDone
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError, OptionError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.torch.latent_parts.runner import LatentPartsRunner
from midfill.runners.torch.weights import load_weights
from serving import Answer, FixedCost, build_engine, preempting_every, request, serve

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=0)
OPTIONS = ModelOptions(
    backend="torch", device="cpu", latent_parts=2, threads=1, kv_memory=512 * 3 * 128 * 4
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("latents")
    return open_checkpoint(write_tiny("deepseek2", folder, hidden_size=192))


@pytest.fixture(scope="module")
def loaded(checkpoint: Checkpoint) -> Iterator[tuple[Engine, LatentPartsRunner]]:
    engine, runner, info = load_engine(checkpoint, OPTIONS)
    assert info.method == "tpla"
    assert isinstance(runner, LatentPartsRunner)
    yield engine, runner
    runner.close()


def engine_of(loaded: tuple[Engine, LatentPartsRunner], **options: Any) -> Engine:
    engine, runner = loaded
    return build_engine(runner, method=engine.find_method("tpla"), **options)


def prompt(length: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(length).integers(4, 320, length).tolist()
    return tokens


def ask(engine: Engine, *prompts: Sequence[int], **fields: Any) -> list[Answer]:
    requests = [request(str(n), tokens, PARAMS, **fields) for n, tokens in enumerate(prompts)]
    answers = serve(engine, requests)
    return [answers[str(number), 0] for number in range(len(prompts))]


def check_same(found: Answer, expected: Answer) -> None:
    """Up to rounding, as in torch generally."""
    assert found.tokens == expected.tokens
    scores = [[one.logprob for one in answer.logprobs] for answer in (found, expected)]
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-4)


def test_an_answer_follows_the_formulas(
    loaded: tuple[Engine, LatentPartsRunner], checkpoint: Checkpoint
) -> None:
    """Its first token is the model's own, and the others are chosen part by part."""
    tokens = prompt(60)
    (answer,) = ask(loaded[0], tokens)
    weights = load_weights(checkpoint, CPU, torch.float32)
    model = (checkpoint.config, weights, loaded[1].rotation, tokens + answer.tokens)
    expected = naive_logits(*model, len(tokens))[len(tokens) - 1 : -1]
    assert answer.tokens == expected.argmax(-1).tolist()
    scores = expected.log_softmax(-1).max(-1).values.tolist()
    np.testing.assert_allclose([one.logprob for one in answer.logprobs], scores, rtol=0, atol=1e-3)
    whole = naive_logits(*model, len(tokens + answer.tokens))[len(tokens) - 1 : -1]
    assert not torch.allclose(whole[1:], expected[1:], atol=0.05)


def test_load_changes_no_answer(loaded: tuple[Engine, LatentPartsRunner]) -> None:
    """Neither batching, nor chunks, nor drafts, nor what is cached, nor a prompt of one token."""
    prompts = [*(prompt(length) for length in (1, 17, 150)), prompt(12) * 5]
    alone = [ask(engine_of(loaded), tokens)[0] for tokens in prompts]
    drafting = engine_of(loaded, step_cost=FixedCost())
    for engine in (engine_of(loaded, token_budget=16), drafting):
        for found, expected in zip(ask(engine, *prompts), alone, strict=True):
            check_same(found, expected)
    assert drafting.stats().draft_tokens > 0
    for tokens, expected in zip(prompts, alone, strict=True):
        (found,) = ask(drafting, tokens)
        check_same(found, expected)
        assert found.cached_tokens == len(tokens) - 1


def test_preemption_changes_no_answer(loaded: tuple[Engine, LatentPartsRunner]) -> None:
    """An answer that is computed again is computed part by part again."""
    prompts = [prompt(length) for length in (17, 60, 150)]
    alone = [ask(engine_of(loaded), tokens)[0] for tokens in prompts]
    requests = [request(str(n), tokens, PARAMS) for n, tokens in enumerate(prompts)]
    found = serve(engine_of(loaded), requests, after_step=preempting_every(5))
    for number, expected in enumerate(alone):
        check_same(found[str(number), 0], expected)


def test_only_prompts_are_cached(loaded: tuple[Engine, LatentPartsRunner]) -> None:
    """What follows an answer finds the prompt's exact latents, and none of the answer's."""
    tokens, engine = prompt(60), engine_of(loaded)
    (answer,) = ask(engine, tokens)
    text = tokens + answer.tokens
    (after,) = ask(engine, text)
    assert after.cached_tokens == len(tokens)
    check_same(after, ask(engine_of(loaded), text)[0])
    (again,) = ask(engine, text)
    assert again.cached_tokens == len(text) - 1


def test_a_prompts_latents_go_to_another_engine(loaded: tuple[Engine, LatentPartsRunner]) -> None:
    """As bytes, part by part: what went there isn't computed there."""
    tokens = prompt(60)
    source, target = engine_of(loaded), engine_of(loaded)
    (expected,) = ask(source, tokens)
    source.kv_traffic.transfers.start_export("out", "", np.array(tokens, np.int32))
    (exported,) = results(source)
    loaded[1].forward(text_batch(prompt(510), 0))  # over the slots that it came from
    ask(target, prompt(17))  # so that it comes to others
    target.kv_traffic.transfers.start_import("in", "", exported.blob)
    (imported,) = results(target)
    assert imported.tokens == len(tokens)
    (found,) = ask(target, tokens)
    assert found.cached_tokens == len(tokens) - 1
    check_same(found, expected)


def results(engine: Engine) -> list[TransferDone]:
    """What became of the engine's transfer, once it has ended."""
    found: list[TransferDone] = []
    while not found:
        engine.step()
        found += [
            result
            for result in engine.kv_traffic.transfers.take_results()
            if isinstance(result, TransferDone)
        ]
    return found


def test_requests_may_want_exact_answers(
    loaded: tuple[Engine, LatentPartsRunner], checkpoint: Checkpoint
) -> None:
    """Without a method the latents of all keys are gathered, once per layer and row."""
    tokens, engine = prompt(60), build_engine(loaded[1])
    gathers = loaded[1].group.gathers
    (answer,) = ask(engine, tokens)
    assert loaded[1].group.gathers - gathers == 3 * len(answer.tokens)
    weights = load_weights(checkpoint, CPU, torch.float32)
    text = tokens + answer.tokens
    whole = naive_logits(checkpoint.config, weights, loaded[1].rotation, text, len(text))
    assert answer.tokens == whole[len(tokens) - 1 : -1].argmax(-1).tolist()
    (after,) = ask(engine, text)
    assert after.cached_tokens == len(text) - 1


def test_other_methods_stay_refused(
    loaded: tuple[Engine, LatentPartsRunner], checkpoint: Checkpoint
) -> None:
    for name in ("snapkv", "tpla+hip"):
        with pytest.raises(InvalidRequestError, match="not possible with latent attention"):
            loaded[0].check_method(any_method(name))
    with pytest.raises(OptionError, match=r"--method tpla: tpla: needs .* --latent-parts 2"):
        load_engine(checkpoint, msgspec.structs.replace(OPTIONS, latent_parts=None, method="tpla"))


def any_method(name: str) -> Any:
    from midfill.methods.registry import resolve_method

    return resolve_method(name)
