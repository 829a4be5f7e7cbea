"""Real source files to measure with: Python's own standard library, found where it is installed."""

import random
import sysconfig
from pathlib import Path


def standard_library_documents(
    count: int, *, seed: int = 0, shortest: int = 6000, longest: int = 9000
) -> list[str]:
    """``count`` files of the standard library with between so many characters, a seeded choice.

    Raises:
        ValueError: there are not that many such files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or not shortest <= path.stat().st_size <= 2 * longest:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if shortest <= len(text) <= longest:
            texts.append(text)
    if len(texts) < count:
        raise ValueError(f"only {len(texts)} of {count} wanted files are in {root}")
    return random.Random(seed).sample(texts, count)
