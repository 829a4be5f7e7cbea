"""What the counting engine counts is what an engine with a model computes."""

import asyncio

import msgspec
import pytest
from toy_engine import engine, prompt, sampling

from benchmarks.plugins.counting_engine import CountingEngine, Counts
from midfill.engine.request import EngineOutput, EngineRequest
from midfill.models.checkpoints.checkpoint import Checkpoint
from serving import request, serve

ALL = prompt(90)


async def outputs(one: CountingEngine, asked: EngineRequest) -> list[EngineOutput]:
    with one.submit(asked) as stream:
        return [output async for output in stream]


def run(one: CountingEngine, asked: EngineRequest) -> list[EngineOutput]:
    return asyncio.run(outputs(one, asked))


def test_prompts_are_found_in_the_cache_as_by_the_engine(checkpoint: Checkpoint) -> None:
    prompts = [ALL[:60], ALL[:70], ALL[:70], ALL[:30] + ALL[50:], ALL[:65], ALL[5:]]
    counting, real = CountingEngine(checkpoint.tokenizer), engine()
    for number, tokens in enumerate(prompts):
        asked = request(f"{number}", tokens, sampling(max_tokens=1))
        (output,) = run(counting, asked)
        (answer,) = serve(real, [asked]).values()
        assert output.cached_tokens == answer.cached_tokens
    stats = real.stats()
    assert counting.counts.prompt_tokens == stats.prompt_tokens
    assert counting.counts.computed_tokens == stats.prompt_tokens - stats.cached_tokens
    assert counting.counts.requests == len(prompts)


def test_all_but_the_last_token_of_an_answer_are_cached(checkpoint: Checkpoint) -> None:
    tokenizer = checkpoint.tokenizer
    one = CountingEngine(tokenizer)
    one.answer = "return 1"
    start, typed = tokenizer.encode("def f():\n    "), tokenizer.encode("return 1\n")
    (output,) = run(one, request("a", start, sampling(max_tokens=64)))
    written = tokenizer.encode("return 1")
    assert output.token_ids[:-1] == written
    assert output.token_ids[-1] in tokenizer.eos_token_ids
    (output,) = run(one, request("b", start + typed, sampling(max_tokens=4)))
    assert output.cached_tokens == len(start) + len(written)
    assert (output.token_ids, output.finish_reason) == (written[:4], "length")


def test_healed_bytes_are_written_again(checkpoint: Checkpoint) -> None:
    one = CountingEngine(checkpoint.tokenizer)
    one.answer = "urn"
    asked = msgspec.structs.replace(request("a", ALL), begins_with=b"ret")
    (output,) = run(one, asked)
    text = checkpoint.tokenizer.decode(output.token_ids[:-1])
    assert "return".startswith(text)


@pytest.mark.parametrize("known", [False, True])
def test_idle_work_is_counted_by_itself(checkpoint: Checkpoint, known: bool) -> None:
    one = CountingEngine(checkpoint.tokenizer)
    if known:
        run(one, request("a", ALL[:40], sampling(max_tokens=1)))
    asked = msgspec.structs.replace(request("b", ALL), background=True)
    (output,) = run(one, asked)
    assert (output.token_ids, output.finish_reason) == ([], "stop")
    assert one.counts.background_tokens == (50 if known else 90)
    (output,) = run(one, request("c", ALL))
    assert output.cached_tokens == 89
    assert one.counts == Counts(
        requests=1 + known,
        prompt_tokens=90 + 40 * known,
        computed_tokens=1 + 40 * known,
        background_tokens=50 if known else 90,
    )
