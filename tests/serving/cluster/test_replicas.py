"""Two real replicas on a real Ray cluster."""

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import wait_for
from running_cluster import RunningCluster, start_cluster
from running_server import start
from tiny_checkpoints import write_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # a busy machine starts Ray slowly

_OPTIONS = ("--kv-memory", "4MB", "--cpus-per-replica", "1")
_RECOVERY_SECONDS = 300


@pytest.fixture(scope="module")
def cluster(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """Two replicas of the tiny model, whose steps take as long as a larger model's."""
    folder = tmp_path_factory.mktemp("cluster")
    options = ("--replicas", "2", *_OPTIONS)
    with start_cluster(folder, tiny_folder, *options, step_seconds=0.01) as cluster:
        yield cluster


def documents(count: int, name: str, characters: int = 300) -> list[str]:
    """Return prefixes of as many documents; those of another name share nothing with them."""
    return [
        "\n".join(f"{name} {each} has {line}" for line in range(40))[:characters]
        for each in range(count)
    ]


def reported_documents(cluster: RunningCluster, seconds: float = 6) -> dict[str, int]:
    """Return each replica's documents, once no report in ``seconds`` has changed them.

    Replicas report every two seconds, so what an earlier test sent may not be counted yet.
    """
    found: dict[str, int] = {}
    since = time.monotonic()

    def steady() -> bool:
        nonlocal found, since
        now = {name: one["documents"] for name, one in cluster.status()["replicas"].items()}
        if now != found:
            found, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    wait_for(steady)
    return found


def test_replicas_give_the_answers_of_one_server(
    cluster: RunningCluster, tiny_folder: Path
) -> None:
    bodies = [
        {"prompt": text, "suffix": "\n\nend", "max_tokens": 12, "seed": 3, "temperature": heat}
        for text in documents(6, "tree")
        for heat in (0, 1)
    ]
    with start(tiny_folder, "--kv-memory", "4MB") as server:
        expected = [server.complete(**body)["choices"] for body in bodies]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: cluster.complete(**body)["choices"], bodies))
    assert answers == expected


def test_a_document_stays_with_the_replica_that_holds_its_kv(cluster: RunningCluster) -> None:
    texts = documents(8, "house")
    held = reported_documents(cluster)
    for text in texts:
        cluster.complete(prompt=text, suffix="\n", max_tokens=1)
    for text in texts:
        usage = cluster.complete(prompt=text + " x", suffix="\n", max_tokens=1)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0.8 * usage["prompt_tokens"]
    now = reported_documents(cluster)
    assert sum(now[name] - held[name] for name in held) == len(texts)


def test_every_dialect_is_spoken(cluster: RunningCluster) -> None:
    client, url = cluster.client, cluster.url
    native = client.post(f"{url}/infill", json={"input_prefix": "f(", "input_suffix": ")"})
    ollama = client.post(
        f"{url}/api/generate",
        json={"model": "tiny-llama", "prompt": "def f(", "options": {"num_predict": 2}},
    )
    chat = client.post(
        f"{url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    )
    assert [each.status_code for each in (native, ollama, chat)] == [200] * 3
    assert len(ollama.text.splitlines()) > 1  # streamed
    assert client.get(f"{url}/health").json() == {"status": "ok"}
    wrong = client.post(f"{url}/v1/completions", json={"prompt": 3.5})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "prompt"


def stream(cluster: RunningCluster, body: dict[str, object], seen: list[str]) -> str:
    """Return a streamed answer's text; ``seen`` grows with it. Its errors fail the test."""
    request = {**body, "stream": True}
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json=request, timeout=120
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                seen.append(event["choices"][0]["text"])
    return "".join(seen)


def test_another_replica_ends_the_answers_of_one_that_is_killed(cluster: RunningCluster) -> None:
    bodies: list[dict[str, object]] = [
        {"prompt": text, "max_tokens": 330, "seed": 5, "temperature": heat, "ignore_eos": True}
        for text in documents(3, "river", 60)
        for heat in (0, 1)
    ]
    expected = [cluster.complete(**body)["choices"][0]["text"] for body in bodies]
    before = cluster.status()
    seen: list[list[str]] = [[] for _ in bodies]
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        answers = [
            pool.submit(stream, cluster, body, texts)
            for body, texts in zip(bodies, seen, strict=True)
        ]
        wait_for(lambda: all(seen))  # all have begun
        assert not all(answer.done() for answer in answers)
        for replica in before["replicas"].values():
            os.kill(replica["process_id"], signal.SIGKILL)
            break
        assert [answer.result(timeout=120) for answer in answers] == expected

    def recovered() -> bool:
        now = cluster.status()
        return len(now["replicas"]) == 2 and now["replicas"].keys() != before["replicas"].keys()

    wait_for(recovered, _RECOVERY_SECONDS)


def test_a_model_changes_while_requests_are_answered(
    cluster: RunningCluster, tiny_folder: Path, tmp_path: Path
) -> None:
    other = write_tiny("llama", tmp_path / "other-llama", hidden_size=32)
    before = cluster.status()["generation"]
    served = set[str]()
    stop = False

    def ask() -> None:
        while not stop:
            served.add(cluster.complete(prompt="def f(", max_tokens=4)["model"])

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            cluster.up(other, "--replicas", "1", *_OPTIONS)
            wait_for(lambda: "other-llama" in served)
        finally:
            stop = True
        asking.result(timeout=60)  # none has failed
    assert served == {"tiny-llama", "other-llama"}
    status = cluster.status()
    assert (status["model"], status["generation"]) == ("other-llama", before + 1)

    broken = cluster.run("up", "/no-such-model")
    assert broken.returncode == 1
    assert "no-such-model" in broken.stderr
    assert cluster.complete(prompt="x", max_tokens=1)["model"] == "other-llama"

    cluster.up(tiny_folder, "--replicas", "2", *_OPTIONS)


def moves(cluster: RunningCluster) -> dict[str, float]:
    """Return what became of prompts whose KV another replica had, by result."""
    lines = cluster.client.get(f"{cluster.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("midfill:kv_moves_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def test_a_document_that_moves_is_fetched_from_the_replica_that_had_it(
    cluster: RunningCluster, tiny_folder: Path, tmp_path: Path
) -> None:
    slow = write_tiny("llama", tmp_path / "slow-llama", hidden_size=512)
    cluster.up(slow, "--replicas", "2", "--router", "round-robin", *_OPTIONS[2:])
    try:
        check_moves(cluster)
    finally:
        cluster.up(tiny_folder, "--replicas", "2", *_OPTIONS)


def check_moves(cluster: RunningCluster) -> None:
    """Ask two replicas for the same answer: the second fetches the KV of the first."""
    body = {"prompt": documents(1, "bird", 450)[0], "suffix": "\n", "max_tokens": 4}
    # In turn: each of the replicas gets one of them.
    first, second = (cluster.complete(**body, temperature=0) for _ in range(2))
    assert first["choices"] == second["choices"]
    wait_for(lambda: any(moves(cluster).values()))
    result = moves(cluster)
    assert result["moved"] + result["late"] == 1, result  # late if the machine is busy
    if result["moved"]:
        usage = second["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]


def test_a_page_that_points_its_name_here_is_refused(cluster: RunningCluster) -> None:
    response = cluster.client.get(f"{cluster.url}/v1/models", headers={"host": "evil.example"})
    assert response.status_code == 421
    assert "--allowed-host" in response.json()["error"]["message"]
