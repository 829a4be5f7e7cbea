"""The dashboard in Chromium, in front of a real server, or of metrics that a test makes up."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playground_page import OpenedPage, open_browser
from processes import lasting_port
from running_server import RunningServer, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UNKNOWN = "\N{EN DASH}"
NO_HISTORY = json.dumps({"series": [], "samples": []})


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., OpenedPage]]:
    """Opens dashboards, which end with the test; they must load nothing that is forbidden."""
    pages: list[OpenedPage] = []

    def open(url: str, **context: Any) -> OpenedPage:
        pages.append(OpenedPage(browser, url, "/dashboard", **context))
        return pages[-1]

    yield open
    for page in pages:
        page.close()
        assert page.elsewhere == []


def panel(dashboard: OpenedPage, title: str) -> str:
    """The legend of a panel."""
    has_title = dashboard.page.locator("h2", has_text=title)
    return dashboard.page.locator(".panel", has=has_title).locator(".legend").text_content()


def wait_for_legend(dashboard: OpenedPage, title: str, legend: str) -> None:
    """Wait until the legend of a panel begins with a text."""
    dashboard.wait_until(
        """([title, legend]) => [...document.querySelectorAll(".panel")].some(panel =>
            panel.querySelector("h2").textContent.includes(title) &&
            panel.querySelector(".legend").textContent.startsWith(legend))""",
        [title, legend],
    )


def test_it_shows_the_servers_own_numbers(
    opened: Callable[..., OpenedPage], server: RunningServer
) -> None:
    dashboard = opened(server.url)
    dashboard.wait_until("document.querySelector('#facts').textContent !== ''")
    for number in range(3):
        server.complete(prompt=f"a = {number}", suffix="\n", max_tokens=4, temperature=0)
    answers = int(server.metric("request_success_total"))
    dashboard.wait_until(
        "text => document.querySelector('#facts').textContent.includes(text)",
        f"Since the start: {answers} answers · ",
    )
    assert dashboard.page.locator("#model").text_content() == "tiny-llama"
    assert re.fullmatch(r"[\d.]+ m?s median[\d.]+ m?s 95%", panel(dashboard, "First token"))
    wait_for_legend(dashboard, "In progress", "0 running0 queued0 in idle time")
    assert dashboard.complaints == []


def written(first_token: dict[str, int], prompt: int, cached: int) -> str:
    """Metrics as the server writes them."""
    name = "midfill:time_to_first_token_seconds_bucket"
    lines = [f'{name}{{le="{le}",model_name="m"}} {count}.0' for le, count in first_token.items()]
    lines.append(f'midfill:prefix_cache_queries_total{{model_name="m"}} {prompt}.0')
    lines.append(f'midfill:prefix_cache_hits_total{{model_name="m"}} {cached}.0')
    return "\n".join(["# TYPE is passed over", *lines, ""])


def test_percentiles_and_shares_are_of_what_is_new(
    opened: Callable[..., OpenedPage], server: RunningServer
) -> None:
    dashboard = opened(server.url)
    states = [
        written({"0.1": 7, "0.25": 8, "+Inf": 8}, 1000, 1000),
        written({"0.1": 17, "0.25": 98, "+Inf": 108}, 1200, 1050),
        written({"0.1": 1, "0.25": 2, "+Inf": 2}, 100, 100),  # the engine began again
    ]
    # First 10 new values up to 0.1 s, 80 up to 0.25 s, 10 above; then 1 and 1 more.
    expected = [
        (f"{UNKNOWN} median{UNKNOWN} 95%", f"{UNKNOWN} found"),
        ("175 ms median250 ms 95%", "25% found"),
        ("174 ms median250 ms 95%", "50% found"),
    ]
    body = {"now": ""}
    dashboard.page.route("**/metrics/history", lambda route: route.fulfill(body=NO_HISTORY))
    dashboard.page.route("**/metrics", lambda route: route.fulfill(body=body["now"]))
    for state, (first_token, found) in zip(states, expected, strict=True):
        body["now"] = state
        if state == states[0]:
            dashboard.page.reload()
        for _ in range(2):  # a response that had begun before has the state before
            with dashboard.page.expect_response("**/metrics"):
                pass
        wait_for_legend(dashboard, "First token", first_token)
        wait_for_legend(dashboard, "Prompt tokens from the cache", found)


def test_states_are_shown_of_models_that_have_them(
    opened: Callable[..., OpenedPage], server: RunningServer
) -> None:
    dashboard = opened(server.url)
    dashboard.wait_until("document.querySelector('#facts').textContent !== ''")
    titles = dashboard.page.locator("h2", has_text=re.compile("states", re.IGNORECASE))
    assert titles.count() == 2
    assert not any(title.is_visible() for title in titles.all())
    gauges = {"states": 8, "states_used": 2, "state_snapshots": 4}
    counters = {"state_snapshots_reused_total": 3, "state_snapshots_evicted_total": 0}
    numbers = (gauges | counters).items()
    body = "\n".join(f'midfill:{name}{{model_name="m"}} {number}.0' for name, number in numbers)
    dashboard.page.route("**/metrics/history", lambda route: route.fulfill(body=NO_HISTORY))
    dashboard.page.route("**/metrics", lambda route: route.fulfill(body=body + "\n"))
    dashboard.page.reload()
    wait_for_legend(dashboard, "States", "50% snapshots25% in use")
    wait_for_legend(dashboard, "Snapshots of states", "0/s reused0/s evicted")
    assert all(title.is_visible() for title in titles.all())


def recorded(samples: list[tuple[float, int, int]]) -> str:
    """A server's history: age, prompt tokens and cached ones."""
    names = ("kv_slots", "prefix_cache_queries_total", "prefix_cache_hits_total")
    rows = [{"age": age, "values": [100, prompt, hits]} for age, prompt, hits in samples]
    return json.dumps({"series": [{"name": f"midfill:{name}"} for name in names], "samples": rows})


def test_it_opens_with_what_the_server_has_recorded(
    opened: Callable[..., OpenedPage], server: RunningServer
) -> None:
    dashboard = opened(server.url)
    page, title = dashboard.page, "Prompt tokens from the cache"
    ages = range(1750, 0, -10)
    states = [(age, 40 * place, 10 * place) for place, age in enumerate(ages)]
    page.route("**/metrics/history", lambda route: route.fulfill(body=recorded(states)))
    page.route("**/metrics", lambda route: route.fulfill(body=written({}, 40 * 175, 10 * 175)))
    page.reload()
    wait_for_legend(dashboard, title, "25% found")  # without any traffic since
    chart = page.locator(".panel", has=page.locator("h2", has_text=title)).locator("svg")
    assert page.locator(".panel svg text", has_text="29 min 10 s ago").count() == 9
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
    wait_for_legend(dashboard, title, "25% found")
    assert chart.locator("text", has_text=" min").last.text_content().startswith("14 min ")


def test_what_was_missed_is_taken_from_the_servers_record(
    opened: Callable[..., OpenedPage], server: RunningServer
) -> None:
    dashboard = opened(server.url)
    page = dashboard.page
    dashboard.wait_until("document.querySelector('#facts').textContent !== ''")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(server.url)))
    page.route("**/metrics", lambda route: route.abort())
    page.wait_for_selector("#notice:not([hidden])")
    page.unroute("**/metrics")
    with page.expect_response("**/metrics/history"):
        pass
    page.wait_for_selector("#notice", state="hidden")
    with page.expect_response("**/metrics"):
        pass
    assert asked.count("/metrics/history") == 1


def test_empty_panels_say_what_will_fill_them(
    opened: Callable[..., OpenedPage], server: RunningServer
) -> None:
    dashboard = opened(server.url)
    page = dashboard.page
    page.route("**/metrics/history", lambda route: route.fulfill(body=NO_HISTORY))
    page.route("**/metrics", lambda route: route.fulfill(body=written({}, 0, 0)))
    page.reload()
    dashboard.wait_until(
        "document.querySelectorAll('.panel:not([hidden]) .empty:not([hidden])').length === 4"
    )
    shown = [one.text_content() for one in page.locator(".empty").all() if one.is_visible()]
    assert all(
        re.fullmatch(r"(No|The engine has run no) .*\. .* will be here\.", one) for one in shown
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", ["/dashboard", "/planner"])
def test_both_themes_can_be_read(
    browser: Any, server: RunningServer, scheme: str, path: str
) -> None:
    page = OpenedPage(browser, server.url, path, color_scheme=scheme)
    page.wait_until("document.querySelectorAll('#facts:not(:empty), h2').length > 0")
    found = page.contrasts()
    page.close()
    assert len(found) > 30
    assert [one for one in found if one[0] < 4.5] == []


def test_a_server_that_restarts_is_said_in_one_line(
    opened: Callable[..., OpenedPage], tiny_folder: Path
) -> None:
    options = ("--kv-memory", "4MB", "--port", str(lasting_port()))
    with start(tiny_folder, *options) as server:
        dashboard = opened(server.url)
        dashboard.wait_until("document.querySelector('#facts').textContent !== ''")
    dashboard.page.wait_for_selector("#notice:not([hidden])")
    with start(tiny_folder, *options):
        dashboard.page.wait_for_selector("#notice", state="hidden")


def test_several_tenants_are_told_apart_in_a_table(
    opened: Callable[..., OpenedPage], server: RunningServer
) -> None:
    def written(answers: dict[str, int]) -> str:
        lines = [
            f'midfill:{name}{{model_name="m",tenant="{tenant}"}} {number}'
            for tenant, number in answers.items()
            for name in ("num_requests_running", "generation_tokens_total")
        ]
        return "\n".join(lines)

    dashboard = opened(server.url)
    dashboard.wait_until("document.querySelector('#facts').textContent !== ''")
    assert dashboard.page.locator("table").count() == 0  # a server without keys has one tenant
    body = {"now": written({"key-1": 1, "key-2": 2})}
    dashboard.page.route("**/metrics/history", lambda route: route.fulfill(body=NO_HISTORY))
    dashboard.page.route("**/metrics", lambda route: route.fulfill(body=body["now"]))
    dashboard.page.reload()
    with dashboard.page.expect_response("**/metrics"):
        pass
    dashboard.page.wait_for_timeout(200)
    body["now"] = written({"key-1": 1, "key-2": 10_000})
    dashboard.wait_until("document.querySelector('tbody')?.textContent.includes('10,000') ?? false")
    rows = dashboard.page.locator("tbody tr").all()
    cells = [row.locator("th, td").all_text_contents() for row in rows]
    assert [row[:3] for row in cells] == [["key-1", "1", "0"], ["key-2", "10,000", "0"]]
    assert cells[0][6] == "0/s"
    assert re.fullmatch(r"[\d,]+/s", cells[1][6])
    assert cells[1][6] != "0/s"
    assert cells[0][7:] == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize("width", [1280, 800])
def test_charts_fit_and_are_read_by_keyboard(
    opened: Callable[..., OpenedPage], server: RunningServer, width: int
) -> None:
    dashboard = opened(server.url, viewport={"width": width, "height": 800})
    dashboard.wait_until("document.querySelectorAll('.panel path').length > 8")
    assert dashboard.page.evaluate("document.documentElement.scrollWidth") == width
    for _ in range(3):  # a link, the theme, the first chart
        dashboard.page.keyboard.press("Tab")
    dashboard.page.keyboard.press("ArrowLeft")
    charts = dashboard.page.locator(".panel:not([hidden]) svg")
    assert dashboard.page.locator(".cross").count() == charts.count()
    assert "Answers, 10 s ago: " in charts.first.get_attribute("aria-label")
