"""``midfill gateway`` as a process: its banner, its signals, its errors."""

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from processes import default_interrupt
from stub_upstream import StubModel, StubUpstream
from typer.testing import CliRunner

from midfill.cli.app import app

COMMAND = [sys.executable, "-m", "midfill", "gateway", "--port", "0"]


def test_it_says_what_it_stands_before_and_ends_when_asked() -> None:
    with StubUpstream(StubModel(block=1)) as upstream:
        command = [*COMMAND, "--upstream", f"{upstream.url}/v1"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=default_interrupt
        ) as process:
            assert process.stdout is not None
            banner = ""
            while "curl" not in banner:
                line = process.stdout.readline()
                assert line, banner
                banner += line
            assert "stands in front of stub-coder" in banner
            assert f"server   {upstream.url} (vllm, half words written again)" in banner
            assert "FIM tokens <|fim_prefix|> <|fim_suffix|> <|fim_middle|>" in banner
            url = re.search(r"listens  on (\S+)", banner)
            assert url is not None
            answer = httpx.post(
                f"{url[1]}/v1/completions", json={"prompt": "a =", "suffix": "\n"}, timeout=60
            )
            assert answer.json()["choices"][0]["text"] == " x + 1"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_a_server_that_has_a_tokenizer_gets_token_ids(tiny_folder: Path) -> None:
    with StubUpstream() as upstream:
        command = [*COMMAND, "--upstream", upstream.url, "--tokenizer", str(tiny_folder)]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=default_interrupt
        ) as process:
            assert process.stdout is not None
            banner = ""
            while "listens" not in banner:
                line = process.stdout.readline()
                assert line, banner
                banner += line
            assert f"prompts  token ids, by {tiny_folder}" in banner
            url = re.search(r"listens  on (\S+)", banner)
            assert url is not None
            body = {"prompt": "def f(a):\n    return toke", "suffix": "\n", "max_tokens": 4}
            answer = httpx.post(f"{url[1]}/v1/completions", json=body, timeout=60)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        assert answer.status_code == 200, answer.text
        assert all(isinstance(each.body["prompt"], list) for each in upstream.received)
        # The half word is asked for without, and then, as the answer begins otherwise, with it.
        first, second = (each.ids for each in upstream.received)
        assert len(first) < len(second)
        assert second[: len(first)] == first


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ([], 1, "name a server to stand in front of"),
        (["--upstream", "localhost:8000"], 2, "--upstream takes a URL"),
        (["--upstream", "http://127.0.0.1:9", "--wait", "0"], 1, "can't be reached"),
        (["--upstream-file", "no-such-file"], 1, "no-such-file: can't be read"),
    ],
)
def test_errors_are_one_line(options: list[str], status: int, message: str) -> None:
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == status
    assert done.stderr.startswith("midfill: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_unknown_kind_of_server_is_refused() -> None:
    done = CliRunner().invoke(app, ["gateway", "--upstream-api", "tgi"])
    assert done.exit_code == 2
    assert "there is no 'tgi'; there are auto, vllm, sglang" in done.output


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["gateway", "--upstream", "http://127.0.0.1:9"])
    assert str(done.exception) == (
        "midfill gateway needs aiohttp; install it with: pip install 'midfill[gateway]'"
    )
