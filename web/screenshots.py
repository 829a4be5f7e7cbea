"""Make the pictures of docs/playground.md.

    midfill serve &
    python web/screenshots.py http://127.0.0.1:8080 docs/

The server should be fresh: what it has cached already looks better than it is. Needs the packages
of the extra ``dev`` and Chromium.
"""

import sys
from io import BytesIO
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))

from playground_page import PlaygroundPage, open_browser

SIZES = {1280: 800, 800: 960}
# Each picture types another text, so that none finds the prompts of the one before in the cache.
TYPED = {
    ("light", 1280): ("python", "top = max(point.y "),
    ("dark", 1280): ("rust", "self.top.m"),
    ("light", 800): ("go", "largest = m"),
    ("dark", 800): ("javascript", "max = Math.m"),
}


def main(url: str, folder: Path) -> None:
    with open_browser() as browser:
        for (scheme, width), (language, typed) in TYPED.items():
            viewport = {"width": width, "height": SIZES[width]}
            playground = PlaygroundPage(browser, url, color_scheme=scheme, viewport=viewport)
            playground.wait_for_first_answer()
            if language != "python":
                playground.page.select_option("#language", language)
            playground.page.wait_for_timeout(3000)
            playground.page.locator(".cm-content").focus()
            for key in typed:
                playground.press(key)
            playground.page.wait_for_timeout(1500)
            image = Image.open(BytesIO(playground.page.screenshot())).convert("RGB")
            path = folder / f"playground-{scheme}-{width}.png"
            _with_palette(image).save(path, optimize=True)
            print(path, path.stat().st_size)
            playground.close()


def _with_palette(image: Image.Image) -> Image.Image:
    """Return the image in its 256 most frequent colours: areas keep theirs exactly."""
    frequent = sorted(image.getcolors(image.width * image.height), reverse=True)[:256]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for _, colour in frequent for part in colour])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"), Path(sys.argv[2]))
