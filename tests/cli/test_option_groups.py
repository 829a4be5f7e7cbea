"""Groups of options as Typer sees them, and those of ``midfill serve``."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from midfill.cli.app import app as midfill
from midfill.cli.option_groups import FlagsOf, option_of, with_option_groups
from midfill.config import ModelOptions, Workers
from midfill.errors import MidfillError
from midfill.serving.options import API_KEY_VARIABLE, ServeOptions, TlsFiles, WindowSize


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option(min=1, help="How wide it is.")] = 3
    tall: Annotated[bool, typer.Option("--tall")] = False


@dataclass(frozen=True)
class Place:
    column: Annotated[int | None, typer.Option()] = None


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_option_groups
    def draw(
        *,
        name: Annotated[str, typer.Argument()],
        size: Size,
        colour: Annotated[str, typer.Option()] = "red",
        place: Place,
    ) -> None:
        """Draw a box."""
        typer.echo(f"{name} {size} {colour} {place}")

    return app


def test_a_group_has_the_values_of_its_options(app: typer.Typer) -> None:
    arguments = ["box", "--width", "5", "--tall", "--column", "2", "--colour", "blue"]
    result = CliRunner().invoke(app, arguments)
    assert result.output == f"box {Size(5, True)} blue {Place(2)}\n"


def test_options_that_are_not_given_have_the_defaults_of_the_group(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["box"]).output == f"box {Size()} red {Place()}\n"


def test_help_and_checks_are_those_of_the_options(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "Draw a box." in shown
    assert "How wide it is." in shown
    refused = CliRunner().invoke(app, ["box", "--width", "0"])
    assert refused.exit_code == 2
    assert "--width" in refused.output


class ServedError(Exception):
    """Carries the options that a command was given out of it."""

    def __init__(self, options: ServeOptions) -> None:
        super().__init__()
        self.options = options


@pytest.fixture
def served() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_option_groups
    def serve(*, served: Annotated[dict[str, Any], FlagsOf(ServeOptions)]) -> None:
        raise ServedError(ServeOptions(model="m", **served))

    return app


def parsed(app: typer.Typer, *arguments: str) -> ServeOptions:
    result = CliRunner().invoke(app, arguments)
    if not isinstance(result.exception, ServedError):
        assert result.exception is not None, result.output
        raise result.exception
    return result.exception.options


def test_without_options_a_server_has_the_defaults_of_its_fields(served: typer.Typer) -> None:
    assert parsed(served) == ServeOptions(model="m")


def test_flags_reach_fields_at_any_depth(served: typer.Typer) -> None:
    found = parsed(
        served,
        *("--alias", "a", "--alias", "b", "--window", "1200,400", "--kv-memory", "2GB"),
        *("--kv-cache-dtype", "i8", "--warm-tier-disk", "1KB", "--warm-tier-folder", "kv"),
        *("--prefill-workers", "1", "--decode-workers", "2", "--no-idle-prefill", "--redact"),
        *("--stream-interval-ms", "10", "--max-connections", "7", "--ssl-certfile", "c.pem"),
    )
    assert (found.aliases, found.window) == (("a", "b"), WindowSize(1200, 400))
    engine = found.options
    assert (engine.kv_memory, engine.kv_cache_dtype) == (2**31, "i8")
    assert (engine.warm_tier.disk, engine.warm_tier.folder) == (1024, str(Path("kv").absolute()))
    assert found.workers == Workers(1, 2)
    assert not found.idle_prefill
    assert found.logs.redact
    assert found.stream_interval == pytest.approx(0.01)
    assert found.listen.max_connections == 7
    assert found.tls == TlsFiles(Path("c.pem"))


def test_a_former_name_of_an_option_is_taken(served: typer.Typer) -> None:
    assert parsed(served, "--stream-interval", "50").stream_interval == pytest.approx(0.05)


def test_a_key_needs_a_certificate(served: typer.Typer) -> None:
    with pytest.raises(MidfillError, match="TLS needs a certificate, too: --ssl-certfile FILE"):
        parsed(served, "--ssl-keyfile", "key.pem")


def test_an_empty_variable_is_no_key(served: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(MidfillError, match=f"{API_KEY_VARIABLE} is set but empty"):
        parsed(served)
    monkeypatch.setenv(API_KEY_VARIABLE, "one two")
    assert parsed(served).api_keys == ("one", "two")


def test_a_command_may_take_some_fields() -> None:
    flags = FlagsOf(ModelOptions, "threads", "method")
    assert [each.name for each in flags.parameters] == ["threads", "method"]
    given = {"threads": 3, "method": "none", "other": 1}
    assert flags.take(given) == {"threads": 3, "method": "none"}
    assert given == {"other": 1}
    assert option_of(ModelOptions, "threads").min == 1


def test_every_option_of_a_server_is_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(midfill, ["serve", "--help"]).output
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    panels = re.findall(r"^(\w+):$", shown, re.MULTILINE)
    assert panels == ["Arguments", "Basics", "Memory", "Network", "Limits", "Advanced"]
    names = set(re.findall(r"^  (--[a-z-]+)", shown, re.MULTILINE))
    assert {"--max-queued-tokens-per-key", "--kv-cache-dtype", "--warm-tier-codec"} <= names
    assert {"--host", "--port", "--window"} <= names
