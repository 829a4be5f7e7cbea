"""The pages' files: served to everyone, and allowed to load nothing from elsewhere."""

import re

import pytest
from running_server import RunningServer

PAGES = ["/", "/dashboard", "/planner"]


@pytest.mark.parametrize("path", PAGES)
def test_a_page_and_all_that_it_names_are_served(server: RunningServer, path: str) -> None:
    page = server.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    files = re.findall(r'(?:src|href)="(/[^"]+)"', page.text)
    assert files
    for file in files:
        assert server.get(file).status_code == 200, file


@pytest.mark.parametrize("path", PAGES)
def test_a_page_may_load_only_what_the_server_sends(server: RunningServer, path: str) -> None:
    policies = [server.get(path).headers["content-security-policy"] for _ in range(2)]
    assert policies[0].startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policies[0]
    assert policies[0] != policies[1]  # a new nonce
    page = server.get(path).text
    assert re.findall(r"<script(?![^>]*src=)|<style| style=| on\w+=", page) == []
    loaded = re.findall(r'src="([^"]*)"|<link[^>]* href="([^"]*)"', page)
    assert all("".join(address).startswith("/pages/") for address in loaded)


def test_the_page_on_the_planner_refers_to_what_a_reader_can_open(server: RunningServer) -> None:
    page = server.get("/planner").text
    assert '<h2 id="the-cut">' in page
    assert "{{text}}" not in page
    for link in re.findall(r'href="([^"]+)"', page):
        assert link.startswith("https://arxiv.org/") or server.get(link).status_code == 200, link


def test_files_that_have_not_changed_are_not_sent_again(server: RunningServer) -> None:
    first = server.get("/pages/playground.js")
    again = server.client.get(
        f"{server.url}/pages/playground.js", headers={"if-none-match": first.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["none.js", "playground.html", "dashboard.html", "..%2Froutes.py", "%00"]
)
def test_other_files_are_not_served(server: RunningServer, name: str) -> None:
    assert server.get(f"/pages/{name}").status_code == 404


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_loads_anything_from_elsewhere(server: RunningServer, path: str) -> None:
    """FastAPI's pages for the API's description do, so there are none."""
    assert server.get(path).status_code == 404
