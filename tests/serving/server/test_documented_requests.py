"""Requests that the documentation shows succeed, at the paths that it names.

The answers it shows are the default model's: test_real_model.py compares them.
"""

import re
from pathlib import Path

import pytest
from doc_blocks import PAGES, ShellCommand
from documented_requests import ADDRESS, REQUESTS, ask
from running_server import RunningServer


@pytest.mark.parametrize("command", REQUESTS, ids=str)
def test_requests_with_curl_succeed(server: RunningServer, command: ShellCommand) -> None:
    assert ask(server, command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_addresses_name_paths_of_the_server(server: RunningServer, page: Path) -> None:
    paths = {route.rstrip("/") for route in server.get("/openapi.json").json()["paths"]}
    paths |= {"/openapi.json"}
    for path in re.findall(rf"{ADDRESS}(/[\w/.-]*)?", page.read_text("utf-8")):
        path = path.rstrip("/.")
        # Clients are given an endpoint, or what their endpoints begin with.
        assert any(f"{each}/".startswith(f"{path}/") for each in paths), f"no {path}"
