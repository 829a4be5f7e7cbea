"""``midfill.report``: the prompt's tokens beside what the API says of it, through a real socket."""

import json
from typing import Any

from running_server import RunningServer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PREFIX = "".join(f"value_{n} = {n}\n" for n in range(20))
SUFFIX = "\nprint(value_1)\n"


def report_of(server: RunningServer, prefix: str, **fields: object) -> dict[str, Any]:
    midfill = {"report": "tokens", **fields}
    return server.complete(prompt=prefix, suffix=SUFFIX, **GREEDY, midfill=midfill)


def tokens_of(answer: dict[str, Any]) -> int:
    return sum(len(segment["token_ids"]) for segment in answer["midfill"]["report"]["segments"])


def test_a_keystroke_finds_all_but_its_own_tokens_in_the_cache(server: RunningServer) -> None:
    first = report_of(server, PREFIX)
    second = report_of(server, PREFIX + "y")
    for answer in (first, second):
        healed = answer["midfill"]["report"]["healed_tokens"]
        assert tokens_of(answer) == answer["usage"]["prompt_tokens"] + healed
    assert second["midfill"]["computed_tokens"] <= 3
    psm = second["midfill"]["report"]["psm"]
    suffix = next(one for one in second["midfill"]["report"]["segments"] if one["role"] == "suffix")
    assert "".join(suffix["texts"]) == SUFFIX
    assert psm["prompt_tokens"] - psm["cached_tokens"] > len(suffix["token_ids"])


def test_a_stream_reports_with_its_first_chunk(server: RunningServer) -> None:
    body = {"prompt": PREFIX, "suffix": SUFFIX, **GREEDY, "stream": True}
    response = server.post("/v1/completions", {**body, "midfill": {"report": "tokens"}})
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    reported = ["report" in json.loads(event).get("midfill", {}) for event in events]
    assert reported == [True] + [False] * (len(events) - 1)


def test_each_prompt_of_a_request_has_its_report(server: RunningServer) -> None:
    answer = server.complete(
        prompt=["a = 1", "bb = 2"], suffix=SUFFIX, **GREEDY, midfill={"report": "tokens"}
    )
    for choice, prefix in zip(answer["choices"], ("a = 1", "bb = 2"), strict=True):
        segments = choice["midfill"]["report"]["segments"]
        roles = ("prefix", "increment")
        texts = [text for one in segments if one["role"] in roles for text in one["texts"]]
        assert "".join(texts) == prefix


def test_nothing_is_reported_unasked(server: RunningServer) -> None:
    answer = server.complete(prompt=PREFIX, suffix=SUFFIX, **GREEDY)
    assert "report" not in answer["midfill"]


def test_an_unknown_report_is_refused(server: RunningServer) -> None:
    body = {"prompt": "a", "suffix": "", "midfill": {"report": "words"}}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "midfill.report"
