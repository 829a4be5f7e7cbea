"""LLM: the same engine and frontend inside a Python program."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace
from scripted_model import write_scripted
from tiny_adapters import FIM, write_adapter, write_record

from midfill import LLM, SamplingParams
from midfill.errors import InvalidRequestError, MidfillError
from midfill.frontend.generation import GenerationResult
from midfill.infill.request import InfillRequest

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_folder), threads=1, kv_memory=4 * 2**20) as llm:
        yield llm


def test_generate(llm: LLM) -> None:
    first, second = llm.generate(["def f(", "class A"], GREEDY)
    assert first.text == llm.generate("def f(", GREEDY)[0].text
    assert second.text != first.text
    assert first.usage.completion_tokens == len(first.answers[0].token_ids) == 12
    assert first.answers[0].finish_reason == "length"


def test_the_old_name_of_the_kv_cache_dtype_works_for_one_release(
    tiny_folder: Path, llm: LLM
) -> None:
    options = {"threads": 1, "kv_memory": 4 * 2**20}
    with (
        pytest.warns(DeprecationWarning, match="kv_cache_dtype"),
        LLM(str(tiny_folder), kv_dtype="f16", **options) as halves,
    ):
        assert halves.info.slots // 2 == llm.info.slots


def test_generate_from_token_ids(llm: LLM) -> None:
    (result,) = llm.generate([[5, 6, 7]], GREEDY)
    assert result.usage.prompt_tokens == 3
    assert result.layout is None


@pytest.mark.parametrize("streamed", [False, True])
def test_what_the_last_answer_proposed_is_drafted(tmp_path: Path, streamed: bool) -> None:
    letters = "ZQXJKVWYUGHPBF"  # each a token of its own
    equals = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}="  # " =" as the vocabulary spells it
    folder = write_scripted(tmp_path, "", pairwise([equals, *letters]))
    with LLM(str(folder), threads=1, kv_memory=4 * 2**20) as llm:

        def ask(typed: str) -> tuple[str, int]:
            before, ask = llm.stats.steps, llm.infill_stream if streamed else llm.infill
            answer = ask("x =" + typed, "\ny\n", GREEDY, healing=False)
            text = answer.text if isinstance(answer, GenerationResult) else answer.result().text
            return text, llm.stats.steps - before

        assert ask("") == (letters[:12], 12)
        # How many tokens of a draft are worth running depends on what rows cost here.
        text, steps = ask("")
        assert text == letters[:12]
        assert steps < 8
        text, steps = ask("ZQ")
        assert text == letters[2:14]
        assert steps < 10


def test_a_stream_that_is_collected_amid_an_encoding_blocks_nothing(llm: LLM) -> None:
    stream = llm.infill_stream("abandoned = ", "\n", GREEDY)
    next(stream)
    with llm._encoding:
        del stream
    assert llm.infill("abandoned = ", "\n", GREEDY).usage.completion_tokens == 12


def test_infill_reuses_what_it_computed(llm: LLM) -> None:
    prefix, suffix = "total = 0\n" * 45, "print(total)\n" * 10
    first = llm.infill(prefix, suffix, GREEDY)
    later = llm.infill(prefix + "tot", suffix, GREEDY)
    assert first.layout is not None
    assert later.layout is not None
    assert later.layout.layout == "efim"
    assert later.layout.cut == first.layout.cut
    assert later.usage.computed_tokens <= 5


def test_streams_give_the_same_text_also_in_turn(llm: LLM) -> None:
    texts = [llm.generate("def f(", GREEDY)[0].text, llm.infill("a", "b", GREEDY).text]
    streams = [llm.generate_stream("def f(", GREEDY), llm.infill_stream("a", "b", GREEDY)]
    streamed = ["", ""]
    for deltas in itertools.zip_longest(*streams):
        for number, delta in enumerate(deltas):
            streamed[number] += delta.text if delta is not None else ""
    assert streamed == texts


def test_a_stream_has_the_whole_result_at_its_end(llm: LLM) -> None:
    drawn = replace(GREEDY, temperature=0.9, seed=1, n=3, logprobs=1)
    whole = llm.generate("def f(", drawn)[0]
    stream = llm.generate_stream("def f(", drawn)
    first = [next(stream), next(stream)]
    result = stream.result()
    assert result.answers == whole.answers
    assert result.answers[first[0].index].text.startswith(first[0].text)
    assert result.usage.completion_tokens == whole.usage.completion_tokens
    assert stream.result() == result
    assert list(stream) == []


def test_closing_a_stream_ends_its_request(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, n=3)
    stream = llm.generate_stream("a", long)
    next(stream)
    stream.close()
    assert all(not answer.finish_reason for answer in stream.result().answers)
    stats = llm.stats
    assert stats.running == stats.waiting == 0
    assert stats.slots_free + stats.slots_cached == stats.slots_total


def test_threads_share_the_engine(llm: LLM) -> None:
    prompts = [f"def f{i}(x):" for i in range(8)]
    alone = [result.text for result in llm.generate(prompts, GREEDY)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY)[0].text, prompts))
    assert together == alone


def test_several_answers_and_stop_strings(llm: LLM) -> None:
    whole = llm.generate("def f(", GREEDY)[0].text
    stop = whole[4:6]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2, stop=(stop,))
    (result,) = llm.generate("def f(", sampling)
    assert [answer.text for answer in result.answers] == [whole[: whole.index(stop)]] * 2
    assert result.answers[0].stop_reason == stop
    assert llm.stats.running == 0


def test_an_answer_that_met_its_stop_string_costs_nothing_more(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.5, seed=4, max_tokens=60, ignore_eos=True, n=4)
    whole = llm.generate("def f(", drawn)[0].answers
    stop = whole[2].text[3:5]
    before = llm.stats.generated_tokens
    stopped = llm.generate("def f(", replace(drawn, stop=(stop,)))[0]
    for answer, free in zip(stopped.answers, whole, strict=True):
        assert answer.text == free.text.partition(stop)[0]
    assert stopped.answers[2].finish_reason == "stop"
    assert any(answer.finish_reason == "length" for answer in stopped.answers)
    # A step may bring a few tokens more than were needed.
    assert llm.stats.generated_tokens - before <= stopped.usage.completion_tokens + 4 * 17


def test_speculation_changes_no_answer(llm: LLM, tiny_folder: Path) -> None:
    text = "total = 0\nfor value in values:\n    total += value\n" * 4
    drawn = replace(GREEDY, temperature=0.9, seed=1, n=2, logprobs=2, max_tokens=40)
    with LLM(str(tiny_folder), threads=1, kv_memory=4 * 2**20, speculation=False) as plain:
        for params in (GREEDY, drawn, replace(GREEDY, logit_bias={5: 90.0, 9: 90.0})):
            for prefix in (text, text + "for va"):
                with_drafts = llm.infill(prefix, "print(total)", params)
                assert with_drafts.answers == plain.infill(prefix, "print(total)", params).answers
        assert plain.stats.draft_tokens == 0


def test_whether_answers_are_empty_is_decided_by_their_probability(llm: LLM) -> None:
    prefixes = [f"total = {number}\nfor value in val" for number in range(6)]
    biased = SamplingParams(temperature=0, max_tokens=12, logit_bias={0: 4.0})
    asked = [InfillRequest(prefix=prefix, suffix="\nprint(total)\n") for prefix in prefixes]
    measured = llm.infill_all(asked, biased, empty_threshold=1e-30)
    found = [result.empty_probability for result in measured]
    probabilities = [one for one in found if one is not None]
    assert len(set(probabilities)) == 6
    middle = sorted(probabilities)[3]
    for threshold in (middle * 1.001, middle * 0.999, 1.0, 0.0):
        results = llm.infill_all(asked, biased, empty_threshold=threshold)
        empty = [result.text == "" for result in results]
        if threshold > 0:
            assert empty == [one > threshold for one in probabilities]
        for item, result in zip(asked, results, strict=True):
            alone = llm.infill(item.prefix, item.suffix, biased, empty_threshold=threshold)
            assert alone.answers == result.answers
    each = llm.infill_all(asked[:2], biased, empty_threshold=[1e-30, 1.0])
    assert [result.text == "" for result in each] == [True, False]
    with pytest.raises(InvalidRequestError, match="empty_threshold must be a number from 0 to 1"):
        llm.infill("a", "b", biased, empty_threshold=15)


def test_what_cant_be_is_refused_at_once(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.generate_stream("a", SamplingParams(temperature=-1))
    with pytest.raises(InvalidRequestError, match="context"):
        llm.infill("ab" * 500, "", window="as-sent")
    assert llm.generate("a", GREEDY)[0].text


def test_a_model_that_isnt_there() -> None:
    with pytest.raises(MidfillError, match="no-such-model"):
        LLM("./no-such-model.gguf")


def test_an_adapter_changes_the_answers_and_the_fim_tokens(
    llm: LLM, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tiny_folder, tmp_path / "tiny-fim")
    write_record(folder, tiny_folder)
    with LLM(str(tiny_folder), adapter=folder, threads=1, kv_memory=4 * 2**20) as adapted:
        assert adapted.info.adapter == "tiny-fim"
        assert adapted.info.weight_bytes == llm.info.weight_bytes
        assert adapted.fim_format is not None
        assert adapted.fim_format.prefix.text == FIM["prefix"]
        assert adapted.generate("def f(", GREEDY)[0].text != llm.generate("def f(", GREEDY)[0].text
    with LLM(str(tiny_folder), adapter="none", threads=1, kv_memory=4 * 2**20) as plain:
        assert plain.info.adapter is None
        assert plain.generate("def f(", GREEDY)[0].text == llm.generate("def f(", GREEDY)[0].text


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from midfill import LLM, SamplingParams

with LLM(sys.argv[1], threads=1, kv_memory=4 * 2**20) as llm:
    for method in ("none", "snapkv:budget=48", "cacheblend", "lazyllm", "flexprefill"):
        for fields in ({"temperature": 0}, {"seed": 1, "top_p": 0.9, "logprobs": 2}):
            sampling = SamplingParams(max_tokens=4, ignore_eos=True, **fields)
            (answer,) = llm.generate("total = 0\\n" * 20, sampling, method=method)[0].answers
            print(method, len(answer.token_ids))
"""


def test_the_cpu_kernels_need_no_torch(tiny_folder: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tiny_folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"4"}
