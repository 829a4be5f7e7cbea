"""Measure the playground in Chromium: milliseconds from a keystroke to its ghost text.

    midfill serve &
    python web/measure.py http://127.0.0.1:8080

Types into the middle of the sample, a key after each complete answer, so that none is missing.
Needs the packages of the extra ``dev`` and Chromium.
"""

import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

from playground_page import PlaygroundPage, open_browser

TEXT = "top = max(point.y for point in points) + min(point.x for point"
MEASURES = "performance.getEntriesByName('keystroke to ghost text').map(one => one.duration)"


def main(url: str) -> None:
    with open_browser() as browser:
        playground = PlaygroundPage(browser, url)
        playground.wait_for_first_answer()
        playground.page.wait_for_timeout(1000)
        playground.page.evaluate("performance.clearMeasures()")
        first_tokens = []
        for key in TEXT:
            playground.press("Space" if key == " " else key)
            shown = playground.page.locator("#first-token").text_content()
            first_tokens.append(float(shown.removesuffix(" ms")))
        measured = playground.page.evaluate(MEASURES)
    for name, values in (("keystroke to ghost text", measured), ("first token", first_tokens)):
        tenths = statistics.quantiles(values, n=10)
        middle = statistics.median(values)
        print(f"{name}: p50 {middle:.0f} ms, p90 {tenths[-1]:.0f} ms, {len(values)} keystrokes")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
