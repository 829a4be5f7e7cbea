"""Pages in a real browser: what a user would press, and what the playground then asks."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60_000  # milliseconds; busy machines are slow


_CONTRASTS = """() => {
    const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
    const parts = colour => {  // of any notation; red, green and blue from 0 to 255, alpha to 1
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
        return [red, green, blue, alpha / 255];
    };
    const over = (above, below) => [0, 1, 2].map(
        part => above[part] * above[3] + below[part] * (1 - above[3]));
    const groundOf = element => {
        if (element === null) return [255, 255, 255];
        return over(parts(getComputedStyle(element).backgroundColor),
            groundOf(element.parentElement));
    };
    const opacityOf = element => element === null ? 1
        : getComputedStyle(element).opacity * opacityOf(element.parentElement);
    const luminance = colour => {  // relative, of WCAG 2.2
        const [red, green, blue] = colour.map(part => part / 255).map(
            part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = [];
    while (texts.nextNode()) {
        const {data, parentElement} = texts.currentNode;
        if (!data.trim() || !parentElement.checkVisibility()) continue;
        const style = getComputedStyle(parentElement);
        const ground = groundOf(parentElement);
        const own = parts(parentElement instanceof SVGElement ? style.fill : style.color);
        own[3] *= opacityOf(parentElement);
        const shades = [luminance(over(own, ground)), luminance(ground)];
        const [dark, light] = shades.sort((a, b) => a - b);
        const name = `${parentElement.tagName}.${parentElement.getAttribute("class") ?? ""}`;
        found.push([(light + 0.05) / (dark + 0.05), `${name}: ${data.trim()}`]);
    }
    return found;
}"""


@contextmanager
def open_browser() -> Iterator[Any]:
    """A headless Chromium; the test that asks for it is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


def as_edited(text: str) -> str:
    """Return a text with its line breaks as an editor has them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True)
class Asked:
    """A request of the page with its whole answer."""

    body: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def prefix(self) -> str:
        return self.body["prompt"]  # type: ignore[no-any-return]

    @property
    def document(self) -> str:
        return self.prefix + self.body["suffix"]  # type: ignore[no-any-return]

    @property
    def answer(self) -> str:
        return as_edited("".join(event["choices"][0]["text"] for event in self.events))

    @property
    def midfill(self) -> dict[str, Any]:
        return self.events[0]["midfill"]  # type: ignore[no-any-return]


class OpenedPage:
    """One page of a server.

    Attributes:
        page: the browser's page.
        complaints: what the browser wrote to its console as an error.
        elsewhere: requests that went to another server.
    """

    def __init__(self, browser: Any, url: str, path: str, **context: Any) -> None:
        options = {"viewport": {"width": 1280, "height": 800}, **context}
        self._context = browser.new_context(**options)
        self._context.set_default_timeout(PATIENCE)
        self.page = self._context.new_page()
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self._finished: list[Any] = []
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._watch(request.url, url))
        self.page.on("requestfinished", lambda request: self._finished.append(request))
        self.page.goto(url + path)

    def close(self) -> None:
        self._context.close()

    def wait_until(self, expression: str, value: object = None) -> None:
        """Wait until an expression or function of JavaScript is true.

        Playwright's own way evaluates it inside the page, which the page's policy forbids.
        """
        for _ in range(PATIENCE // 50):
            if self.page.evaluate(expression, value):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never true: {expression}")

    def contrasts(self) -> list[tuple[float, str]]:
        """The ratio of contrast of each visible text with its ground, and what it is.

        Grounds are colours: images and gradients behind a text are not seen.
        """
        return [(ratio, text) for ratio, text in self.page.evaluate(_CONTRASTS)]

    def _listen(self, message: Any) -> None:
        if message.type == "error":
            self.complaints.append(message.text)

    def _watch(self, requested: str, url: str) -> None:
        if not requested.startswith((f"{url}/", "data:")):
            self.elsewhere.append(requested)


class PlaygroundPage(OpenedPage):
    """One page of the playground."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        super().__init__(browser, url, "/", **context)

    def wait_for_first_answer(self) -> None:
        """Wait until the page has asked about its sample, and the answer's end was reported.

        The page draws an answer before the browser reports that its request has ended.
        """
        self.wait_until("document.querySelectorAll('#chart g').length === 1")
        self.wait_until("document.querySelector('.block-answer') !== null")
        for _ in range(PATIENCE // 50):
            if self._answered():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("the first answer never ended")

    def ghost(self) -> str:
        """The suggestion that is shown; "" if there is none."""
        shown = self.page.locator(".ghost")
        return shown.text_content() if shown.count() else ""  # type: ignore[no-any-return]

    def press(self, key: str) -> Asked:
        """Press a key that edits or asks; return what was asked, once its answer is shown."""
        return self._asked_by(lambda: self.page.keyboard.press(key))

    def choose_lines(self, lines: str) -> Asked:
        """Choose how far suggestions go, which asks again."""
        return self._asked_by(lambda: self.page.select_option("#lines", lines))

    def insert(self, text: str) -> Asked:
        """Insert a text at once, as pasting does."""
        return self._asked_by(lambda: self.page.keyboard.insert_text(text))

    def _asked_by(self, act: Callable[[], object]) -> Asked:
        """Do what asks; return what was asked, once its answer is shown.

        What the page has asked before, as after an engine's restart, is given up then and has no
        answer.
        """
        with self.page.expect_request("**/v1/completions") as request:
            act()
        return self._shown(request.value.response())

    def type_until(self, wanted: str) -> Asked:
        """Type digits until a suggestion matches a regular expression of JavaScript."""
        for digit in "12345678901234567890":
            asked = self.press(digit)
            if self.page.evaluate(f"text => {wanted}.test(text)", self.ghost()):
                return asked
        raise AssertionError(f"no suggestion like {wanted}")

    def last_asked(self) -> Asked:
        """The last request that was answered to its end."""
        return _asked(self._answered()[-1].response())

    def _answered(self) -> list[Any]:
        """The requests for a completion that were answered to their end."""
        return [one for one in self._finished if one.url.endswith("/v1/completions")]

    def _shown(self, response: Any) -> Asked:
        asked = _asked(response)
        self.wait_until(
            "text => (document.querySelector('.ghost')?.textContent ?? '') === text",
            asked.answer,
        )
        return asked


def _asked(response: Any) -> Asked:
    lines = response.text().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return Asked(response.request.post_data_json, events)
