"""The playground in Chromium, in front of a real server."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playground_page import PlaygroundPage, as_edited, open_browser
from processes import lasting_port
from running_server import RunningServer, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEXT = "def area(width, height):\n    return width"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., PlaygroundPage]]:
    """Opens pages, which end with the test."""
    pages: list[PlaygroundPage] = []

    def open(url: str, **context: Any) -> PlaygroundPage:
        pages.append(PlaygroundPage(browser, url, **context))
        return pages[-1]

    yield open
    for page in pages:
        page.close()


@pytest.fixture
def playground(
    opened: Callable[..., PlaygroundPage], server: RunningServer
) -> Iterator[PlaygroundPage]:
    """A page that has asked about its sample; it must load nothing that its policy forbids."""
    page = opened(server.url)
    page.wait_for_first_answer()
    yield page
    assert page.complaints == []
    assert page.elsewhere == []


def test_the_page_opens_with_a_suggestion_for_its_sample(playground: PlaygroundPage) -> None:
    assert playground.page.locator("#model").text_content() == "tiny-llama"
    assert playground.page.locator(".cm-content").evaluate("one => one === document.activeElement")
    assert not playground.page.locator("#notice").is_visible()


def test_ghost_text_is_the_servers_answer_to_what_was_typed(
    playground: PlaygroundPage, server: RunningServer
) -> None:
    before = playground.press("x")
    after = playground.press("y")
    assert after.prefix == before.prefix + "y"
    again = server.complete(**{**after.body, "stream": False})
    assert playground.ghost() == after.answer == as_edited(again["choices"][0]["text"])


def test_the_answer_to_the_last_of_many_keys_is_shown(playground: PlaygroundPage) -> None:
    with playground.page.expect_event(
        "requestfinished", lambda one: (one.post_data_json or {}).get("prompt", "").endswith("345")
    ):
        playground.page.keyboard.type("12345", delay=5)
    assert playground.last_asked().prefix.endswith("12345")
    playground.wait_until(
        "text => (document.querySelector('.ghost')?.textContent ?? '') === text",
        playground.last_asked().answer,
    )


def test_tab_accepts_all(playground: PlaygroundPage) -> None:
    asked = playground.type_until("/./")
    accepted = playground.press("Tab")
    assert accepted.prefix == asked.prefix + asked.answer
    assert accepted.body["suffix"] == asked.body["suffix"]


def test_control_and_arrow_accept_a_word_and_leave_the_rest(playground: PlaygroundPage) -> None:
    asked = playground.type_until(r"/^\s*\w+[^\w]+\w/")
    with playground.page.expect_response("**/v1/completions") as answer:
        playground.page.keyboard.press("Control+ArrowRight")
    inserted = answer.value.request.post_data_json["prompt"].removeprefix(asked.prefix)
    assert re.fullmatch(r"\s*\w+", inserted)
    assert asked.answer.startswith(inserted)


def test_shift_tab_accepts_a_line(playground: PlaygroundPage) -> None:
    playground.choose_lines("all")
    playground.page.locator(".cm-content").focus()
    asked = playground.type_until(r"/^[^\n]+\n/")
    accepted = playground.press("Shift+Tab")
    assert accepted.prefix == asked.prefix + asked.answer.split("\n")[0]


def test_escape_dismisses_and_typing_brings_back(playground: PlaygroundPage) -> None:
    asked = playground.type_until("/./")
    playground.page.keyboard.press("Escape")
    assert playground.ghost() == ""
    assert playground.press("Alt+\\").document == asked.document
    assert playground.ghost() == asked.answer


def test_without_a_suggestion_tab_indents(playground: PlaygroundPage) -> None:
    asked = playground.type_until("/./")
    playground.page.keyboard.press("Escape")
    playground.page.wait_for_timeout(2100)  # until Tab no longer leaves the editor
    indented = playground.press("Tab")
    assert len(indented.document) == len(asked.document) + 4


def test_typing_what_is_suggested_keeps_the_rest(playground: PlaygroundPage) -> None:
    asked = playground.type_until(r"/^[!-'*-Z^-z|~]./s")
    playground.page.route("**/v1/completions", lambda route: None)  # no answer ever comes
    playground.page.keyboard.insert_text(asked.answer[0])
    assert playground.ghost() == asked.answer[1:]
    playground.page.keyboard.insert_text("§")
    assert playground.ghost() == ""


def test_input_methods_are_left_alone_until_a_character_is_complete(
    playground: PlaygroundPage,
) -> None:
    playground.type_until("/./")
    session = playground.page.context.new_cdp_session(playground.page)
    place = {"selectionStart": 1, "selectionEnd": 1}
    session.send("Input.imeSetComposition", {"text": "か", **place})
    assert playground.ghost() == ""
    with playground.page.expect_response("**/v1/completions") as answer:
        session.send("Input.imeSetComposition", {"text": "漢", **place})
        session.send("Input.insertText", {"text": "漢"})
    assert answer.value.request.post_data_json["prompt"].endswith("漢")


def test_accepting_can_be_undone(playground: PlaygroundPage) -> None:
    asked = playground.type_until("/./")
    playground.press("Tab")
    assert playground.press("Control+z").document == asked.document


def test_the_map_shows_what_the_server_reports(playground: PlaygroundPage) -> None:
    playground.press("q")  # other tests have typed other letters, whose prompts PSM would reuse
    asked = playground.press("w")
    page, midfill = playground.page, asked.midfill
    playground.wait_until("document.querySelectorAll('#chart g').length === 3")
    assert midfill["cached_tokens"] > 100
    assert int(page.locator("#count-cached").text_content()) == midfill["cached_tokens"]
    computed = midfill["computed_tokens"] + midfill["report"]["healed_tokens"]
    assert int(page.locator("#count-computed").text_content()) == computed
    assert computed < 8
    psm = midfill["report"]["psm"]
    other = psm["prompt_tokens"] - psm["cached_tokens"]
    assert int(page.locator("#psm").text_content()) == other > computed
    cached = page.locator(".token.cached")
    assert cached.count() > 20
    for fold in page.locator(".block-text .fold").all():
        fold.click()
    assert page.locator(".token.cached").count() == midfill["cached_tokens"]
    increment = page.locator(".block-increment .token:not(.sentinel)").all_text_contents()
    assert asked.prefix.endswith("".join(increment).replace("↵", ""))


def test_a_long_prefix_is_shown_with_its_cut(playground: PlaygroundPage) -> None:
    # In a context of 512 tokens the head is empty unless characters are cheap: four per token.
    asked = playground.insert("    " * 250)
    roles = [one["role"] for one in asked.midfill["report"]["segments"]]
    has_head = roles.index("suffix") > 2
    assert playground.page.locator(".cut").count() == int(has_head)
    assert playground.page.locator(".strip-cut").count() == int(has_head)


def test_pointing_at_a_token_says_what_it_is(playground: PlaygroundPage) -> None:
    playground.press("x")
    playground.page.locator(".block-suffix .token.sentinel").last.hover()
    detail = playground.page.locator("#detail")
    assert re.fullmatch(
        r"<fim_suffix> suffix, token \d+ of [\d,]+ · found in the cache · id \d+",
        detail.text_content(),
    )


def test_everything_is_reached_by_keyboard(playground: PlaygroundPage) -> None:
    keyboard, page = playground.page.keyboard, playground.page
    playground.press("x")
    keyboard.press("Escape")
    seen = []
    for _ in range(30):
        keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        if seen[-1] == "map":
            break
    assert seen[-1] == "map"
    keyboard.press("ArrowLeft")
    assert page.locator(".token.current").count() == 1
    assert "token" in page.locator("#detail").text_content()
    for _ in range(30):
        keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.id") == "theme":
            break
    keyboard.press("Enter")
    assert page.locator("html").get_attribute("data-theme") == "light"
    for control in ("open", "sample", "lines", "language"):
        keyboard.press("Shift+Tab")
        assert page.evaluate("document.activeElement.id") == control


def assert_legible(playground: PlaygroundPage) -> None:
    """Every text has the contrast that WCAG 2.2 asks for at level AA."""
    found = playground.contrasts()
    assert len(found) > 50
    assert [one for one in found if one[0] < 4.5] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read(
    opened: Callable[..., PlaygroundPage], server: RunningServer, scheme: str
) -> None:
    playground = opened(server.url, color_scheme=scheme)
    playground.wait_for_first_answer()
    languages = playground.page.locator("#language option")
    for language in languages.evaluate_all("all => all.map(({value}) => value).reverse()"):
        with playground.page.expect_response("**/v1/completions"):
            playground.page.select_option("#language", language)
        playground.wait_until("document.querySelector('.token') !== null")
        assert_legible(playground)
    playground.page.locator(".cm-content").focus()
    playground.type_until("/./")
    playground.page.locator(".block-increment .block-label .term").hover()
    playground.page.wait_for_selector(".explanation")
    assert_legible(playground)
    ground = playground.page.evaluate("getComputedStyle(document.body).backgroundColor")
    is_dark = sum(int(one) for one in re.findall(r"\d+", ground)[:3]) < 3 * 64
    assert is_dark == (scheme == "dark")


def test_a_chosen_theme_is_kept(playground: PlaygroundPage) -> None:
    button, root = playground.page.locator("#theme"), playground.page.locator("html")
    shown = []
    for _ in range(3):
        button.click()
        ground = playground.page.evaluate("getComputedStyle(document.body).backgroundColor")
        shown.append((root.get_attribute("data-theme"), ground))
    light, dark, auto = shown
    assert [light[0], dark[0], auto[0]] == ["light", "dark", "auto"]
    assert light[1] == auto[1] != dark[1]
    button.click()
    playground.page.reload()
    assert root.get_attribute("data-theme") == "light"


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (800, 1000)])
def test_all_parts_are_in_sight(
    opened: Callable[..., PlaygroundPage], server: RunningServer, width: int, height: int
) -> None:
    playground = opened(server.url, viewport={"width": width, "height": height})
    playground.wait_for_first_answer()
    for part in ("#editor", "#keys", "#strip", "#map", "#detail", "#chart", "#total", "#theme"):
        box = playground.page.locator(part).bounding_box()
        assert box["x"] >= 0, part
        assert box["y"] >= 0, part
        assert box["x"] + box["width"] <= width, part
        assert box["y"] + box["height"] <= height, part
    assert playground.page.evaluate("document.documentElement.scrollWidth") == width


def test_a_file_is_opened_in_its_language(playground: PlaygroundPage, tmp_path: Path) -> None:
    path = tmp_path / "main.go"
    path.write_bytes(b"package main\r\n\r\nfunc main() {\r\n}\r\n")
    playground.page.set_input_files("#file", path)
    playground.wait_until("document.querySelector('#language').value === 'go'")
    asked = playground.press("x")
    assert asked.document == "xpackage main\n\nfunc main() {\n}\n"
    assert playground.page.locator(".tok-keyword").count() >= 1


def test_what_is_no_text_is_refused_and_leaves_the_text(
    playground: PlaygroundPage, tmp_path: Path
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    playground.page.set_input_files("#file", path)
    playground.page.wait_for_selector("#notice:not([hidden])")
    notice = playground.page.locator("#notice").text_content()
    assert notice == "image.png can't be opened: it is not text in UTF-8."
    playground.page.locator(".cm-content").focus()
    assert len(playground.press("x").document) > 500


def test_a_language_brings_its_sample_until_something_is_typed(playground: PlaygroundPage) -> None:
    with playground.page.expect_response("**/v1/completions") as answer:
        playground.page.select_option("#language", "rust")
    assert "impl Rectangle" in answer.value.request.post_data_json["prompt"]
    answer.value.finished()
    playground.page.locator(".cm-content").focus()
    typed = playground.press("x")
    playground.page.select_option("#language", "cpp")
    playground.page.locator(".cm-content").focus()
    assert playground.press("Alt+\\").document == typed.document


def test_the_sample_can_be_had_again(playground: PlaygroundPage) -> None:
    sample = playground.last_asked().document
    playground.press("x")
    with playground.page.expect_response("**/v1/completions") as answer:
        playground.page.click("#sample")
    answer.value.finished()
    asked = playground.last_asked()
    assert asked.document == sample
    assert playground.press("y").document == f"{asked.prefix}y{asked.body['suffix']}"


def is_cleared(playground: PlaygroundPage) -> bool:
    """Whether the map has nothing of a document."""
    counts = [
        playground.page.locator(f"#count-{kind}").text_content()
        for kind in ("cached", "computed", "generated")
    ]
    empty = playground.page.locator("#map .empty").count() == 1
    assert empty == (counts == ["0"] * 3) == (playground.page.locator(".token").count() == 0)
    return empty


def test_the_map_is_cleared_with_the_document(playground: PlaygroundPage, tmp_path: Path) -> None:
    playground.press("x")
    assert not is_cleared(playground)
    playground.page.keyboard.press("Control+a")
    playground.page.keyboard.press("Delete")
    playground.page.wait_for_timeout(300)  # an answer on its way would be shown by then
    assert is_cleared(playground)
    playground.press("x")
    playground.wait_until("document.querySelector('.token') !== null")
    path = tmp_path / "words.txt"
    path.write_text("one\ntwo\n")
    playground.page.set_input_files("#file", path)
    playground.wait_until("document.querySelector('#map .empty') !== null")
    assert is_cleared(playground)
    playground.page.route("**/v1/completions", lambda route: None)  # no answer ever comes
    playground.page.click("#sample")
    assert is_cleared(playground)


def test_the_headline_waits_for_ten_requests_and_leaves_out_first_ones(
    playground: PlaygroundPage,
) -> None:
    total = playground.page.locator("#total")

    def press(number: int) -> int:
        """Type a letter; return what its request computed."""
        report = playground.press("abcdefghijklmnop"[number]).midfill
        playground.wait_until(f"document.querySelectorAll('#chart g').length === {number + 2}")
        return report["computed_tokens"] + report["report"]["healed_tokens"]

    assert total.text_content().startswith("What was saved is told after 10 more requests;")
    computed = [press(number) for number in range(9)]
    assert total.text_content().startswith("What was saved is told after 1 more request;")
    computed.append(press(9))
    assert f" 10 requests computed {sum(computed)} tokens;" in total.text_content()
    with playground.page.expect_response("**/v1/completions"):
        playground.page.select_option("#language", "go")
        playground.page.click("#sample")
    playground.wait_until("document.querySelectorAll('#chart .cold').length === 2")
    assert f" 10 requests computed {sum(computed)} tokens;" in total.text_content()


def test_words_say_what_they_mean_where_they_stand(
    playground: PlaygroundPage, server: RunningServer
) -> None:
    page = playground.page
    playground.insert("    " * 250)
    explanation = page.locator("#explanation")
    planner = server.get("/planner").text
    for word in page.locator(".term").all():
        word.hover()
        explanation.wait_for()
        link = explanation.locator("a").get_attribute("href")
        path, _, anchor = link.partition("#")
        assert path == "/planner"
        assert f'id="{anchor}"' in planner
        page.mouse.move(5, 5)
        explanation.wait_for(state="detached")
    words = page.locator(".term").all_text_contents()
    assert {"suffix", "increment"} <= set(words)
    assert "<fim_suffix>" in words


def test_meanings_are_reached_by_keyboard(playground: PlaygroundPage) -> None:
    page, explanation = playground.page, playground.page.locator("#explanation")
    playground.press("x")
    page.locator("#map").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.classList.contains('term')")
    explanation.wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')").startswith("/planner#")
    page.wait_for_timeout(300)  # it stays while the link has the focus
    assert explanation.count() == 1
    page.keyboard.press("Escape")
    assert explanation.count() == 0


def test_what_the_server_refuses_is_said_in_one_line(playground: PlaygroundPage) -> None:
    error = {"error": {"message": "the prompt is too long", "code": "context_length_exceeded"}}
    playground.page.route(
        "**/v1/completions", lambda route: route.fulfill(status=400, body=json.dumps(error))
    )
    with playground.page.expect_response("**/v1/completions"):
        playground.page.keyboard.press("x")
    playground.page.wait_for_selector("#notice:not([hidden])")
    assert playground.page.locator("#notice").text_content() == "The prompt is too long."
    playground.complaints.clear()  # the browser's own line about the status
    playground.page.unroute("**/v1/completions")
    playground.press("y")
    assert not playground.page.locator("#notice").is_visible()


def test_a_server_with_keys_is_used_with_one(
    opened: Callable[..., PlaygroundPage], tiny_folder: Path
) -> None:
    with start(tiny_folder, "--kv-memory", "4MB", "--api-key", "secret") as server:
        playground = opened(server.url)
        page = playground.page
        page.wait_for_selector("#key:focus")
        assert page.locator("#key-label").text_content() == "This server needs an API key:"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        playground.wait_until(
            "document.querySelector('#key-label').textContent.includes(\"doesn't know\")"
        )
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        playground.wait_for_first_answer()
        assert not page.locator("#key-form").is_visible()
        assert playground.press("x").answer == playground.ghost()
        page.reload()
        playground.wait_for_first_answer()  # the tab remembers the key


def test_a_page_left_open_recovers_when_the_server_restarts(
    opened: Callable[..., PlaygroundPage], tiny_folder: Path
) -> None:
    options = ("--kv-memory", "4MB", "--port", str(lasting_port()))
    with start(tiny_folder, *options) as server:
        playground = opened(server.url)
        playground.wait_for_first_answer()
        typed = playground.press("x")
    page = playground.page
    page.wait_for_selector("#notice:not([hidden])")
    notice = page.locator("#notice").text_content()
    assert notice.startswith("The server doesn't answer.")
    page.keyboard.type("yz")
    with start(tiny_folder, *options):
        page.wait_for_selector("#notice", state="hidden")
        playground.wait_until("document.querySelectorAll('#chart g').length >= 3")
        assert playground.press("!").prefix == typed.prefix + "yz!"


def test_a_page_left_open_recovers_when_the_engine_restarts(
    opened: Callable[..., PlaygroundPage], tiny_folder: Path, tmp_path: Path
) -> None:
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    shutil.copytree(tiny_folder, model)
    with start(model, "--kv-memory", "4MB") as server:
        playground = opened(server.url)
        playground.wait_for_first_answer()
        model.rename(elsewhere)  # so that it takes as long as the page does to notice
        os.kill(server.engine_process(), signal.SIGKILL)
        page = playground.page
        page.keyboard.press("x")
        page.wait_for_selector("#notice:not([hidden])")
        assert "starting again" in page.locator("#notice").text_content()
        elsewhere.rename(model)
        page.wait_for_selector("#notice", state="hidden")
        assert playground.press("y").prefix.endswith("xy")
