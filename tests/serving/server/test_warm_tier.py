"""The warm tier of a server: it outlives its engine and, on disk, the server."""

import os
import signal
from pathlib import Path

import pytest
from running_server import RunningServer, start

PROMPT = "def tokenizer(model):\n    return variant" * 14
SIZES = ("--kv-memory", "4MB", "--warm-tier-memory", "16MB", "--warm-tier-disk", "16MB")


def ask(server: RunningServer, api_key: str = "") -> tuple[str, int, int]:
    """Return the answer, the prompt's tokens, and how many of them were cached."""
    response = server.post(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 8, "temperature": 0},
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )
    if response.status_code == 503:
        return "", 0, 0
    assert response.status_code == 200, response.text
    body = response.json()
    usage = body["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return body["choices"][0]["text"], usage["prompt_tokens"], cached


def in_memory() -> set[Path]:
    return set(Path("/dev/shm").glob("midfill-kv-*"))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_a_document_stays_warm_when_the_engine_and_then_the_server_end(
    tiny_folder: Path, tmp_path: Path
) -> None:
    options = (*SIZES, "--warm-tier-folder", str(tmp_path / "kv"))
    before = in_memory()
    with start(tiny_folder, *options) as server:
        text, tokens, cached = ask(server)
        assert (tokens > 200, cached) == (True, 0)
        chunks = tokens // 64
        server.wait_for(lambda: len(list((tmp_path / "kv").glob("*/*.kv"))) >= chunks)

        os.kill(server.engine_process(), signal.SIGKILL)
        server.wait_for(lambda: ask(server)[1] > 0, seconds=60)
        assert server.metric("warm_tier_loaded_tokens_total") == 64 * chunks
        assert server.metric("warm_tier_rejected_chunks_total") == 0
        assert ask(server)[0] == text
    assert in_memory() <= before, "what was in memory goes with the server"

    with start(tiny_folder, *options) as server:
        assert ask(server) == (text, tokens, 64 * chunks)


@pytest.mark.slow
def test_another_key_of_the_same_number_finds_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    options = ("--warm-tier-disk", "16MB", "--warm-tier-folder", str(tmp_path / "kv"))
    for key, expected in (("first", False), ("second", False), ("first", True)):
        with start(tiny_folder, "--kv-memory", "4MB", *options, "--api-key", key) as server:
            assert (ask(server, key)[2] > 0) == expected
