"""bench peers: what is refused before a model is opened."""

import pytest
from typer.testing import CliRunner

from midfill_lab.cli.bench.app import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume continues what a file holds: name it with --json"),
        (["--vllm-dtypes", "int8"], "--vllm-dtypes names int8; there are float32, bfloat16, w8a8"),
        (["--llama-formats", "a b"], "--llama-formats names 'a b'"),
    ],
)
def test_options_of_peers_that_do_not_fit(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(app, ["peers", *arguments]).exception
    assert message in str(error)
