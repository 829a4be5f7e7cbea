"""What the command line says of a wrong option: one line that names it and what was meant."""

import pytest
from typer.testing import CliRunner

from midfill.cli.app import app

SERVE, COMPLETE = "(see 'midfill serve --help')", "(see 'midfill complete --help')"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve --scheduler sarathi-server", "--scheduler: there is no scheduler"
         f" 'sarathi-server'; did you mean 'sarathi-serve'? {SERVE}"),
        ("serve --scheduler edf+priority", "--scheduler: edf and priority both decide the order;"
         f" name one of them {SERVE}"),
        ("serve --scheduler shortest-first:ageing=x", "--scheduler: shortest-first: ageing must be"
         f" a number, not 'x' {SERVE}"),
        ("serve --port x", f"--port takes a whole number, not 'x' {SERVE}"),
        ("serve --port 70000", f"--port takes at most 65535, not 70000 {SERVE}"),
        ("serve --token-budget 0", f"--token-budget takes at least 1, not 0 {SERVE}"),
        ("complete --temperature warm a:1", f"--temperature takes a number, not 'warm' {COMPLETE}"),
        ("complete -n 0 a:1", f"--max-tokens takes at least 1, not 0 {COMPLETE}"),
        ("serve --kv-memory 2XB", "--kv-memory: '2XB' is not a size; write it like 2GB or 512MB"
         f" {SERVE}"),
        ("serve --method snapkw", "--method: there is no method 'snapkw'; did you mean 'snapkv'?"
         f" {SERVE}"),
        ("serve --reuse cake", "--reuse: cake takes no KV from elsewhere, as cacheblend,"
         f" cachecraft, kvshare, kvcomm and ape do {SERVE}"),
        ("serve --allow-method snapkw", "--allow-method: there is no method 'snapkw'; did you mean"
         f" 'snapkv'? {SERVE}"),
        ("serve --threads 2000", f"--threads takes at most 1024, not 2000 {SERVE}"),
        ("serve --method snapkv:budgt=3", "--method: snapkv has no option 'budgt'; did you mean"
         f" 'budget'? {SERVE}"),
        ("serve --warm-tier-codec cachegn", "--warm-tier-codec: there is no codec 'cachegn'; did"
         f" you mean 'cachegen'? {SERVE}"),
        ("serve --window 5", f"--window: '5' is no window; write it like 1200,400 {SERVE}"),
        ("serve --prot 80", f"there is no option --prot; did you mean --port? {SERVE}"),
        ("serve --log-format", "option '--log-format' requires an argument"),
        ("complete", f"missing argument 'FILE:LINE[:COL]' {COMPLETE}"),
        ("complete x", f"'x' is not FILE:LINE or FILE:LINE:COL {COMPLETE}"),
        ("serv", "there is no command 'serv'; did you mean 'serve'? (see 'midfill --help')"),
        ("bench speeds", "there is no command 'speeds'; did you mean 'speed', 'peers'?"
         " (see 'midfill bench --help')"),
        ("gateway --upstream-api vlm", "--upstream-api: there is no 'vlm'; did you mean vllm?"
         " (see 'midfill gateway --help')"),
        ("cluster up --replicas 3 --max-replicas 2", "--max-replicas 2 is less than 3"
         " (see 'midfill cluster up --help')"),
    ],
    ids=lambda text: text.replace(" ", "_"),
)  # fmt: skip
def test_a_wrong_use_is_one_line_and_status_2(line: str, said: str) -> None:
    done = CliRunner().invoke(app, line.split(), prog_name="midfill")
    if not isinstance(done.exception, SystemExit):
        raise AssertionError(f"ended with {done.exception!r}") from done.exception
    assert (done.exit_code, done.stderr) == (2, f"midfill: {said}\n")


def test_no_command_at_all_shows_the_help() -> None:
    done = CliRunner().invoke(app, ["bench"], prog_name="midfill")
    assert done.exit_code == 2
    assert "Measure speed" in done.output


def test_help_and_version_are_no_errors() -> None:
    for argument in ("--help", "--version"):
        done = CliRunner().invoke(app, [argument], prog_name="midfill")
        assert done.exit_code == 0
        assert "midfill" in done.stdout
