"""Documents to train on, and the FIM tokens of the tiny models."""

import random

FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def source_text(number: int) -> str:
    """Return a source file that has little in common with any other number's."""
    draw = random.Random(number)

    def name() -> str:
        return "".join(draw.choices("abcdefgh", k=7))

    lines = [f"# module {number} of the corpus"]
    for _ in range(30):
        first, second = name(), name()
        lines += [
            f"def {name()}({first}, {second}):",
            f"    return {first} * {draw.randrange(1000)} + {second} - {draw.randrange(1000)}",
            "",
        ]
    return "\n".join(lines)
