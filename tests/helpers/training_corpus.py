"""Documents and recipes to train tiny models with, and their FIM tokens."""

import random
from importlib.util import find_spec

from midfill_lab.training.recipe import DataRecipe, TrainingRecipe

SHORT = DataRecipe(
    prefix_characters=(5, 40), suffix_characters=(5, 30), long_share=0.0, span_characters=20
)
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


def short_recipe() -> TrainingRecipe:
    """Return a recipe of twelve small steps."""
    return TrainingRecipe(
        tokens=12 * 400,
        tokens_per_step=400,
        row_tokens=200,
        rank=4,
        alpha=8,
        learning_rate=5e-3,
        precision="fp32",
        data=SHORT,
    )


def reset_training() -> None:
    """Sum gradients in one order, on one thread; reset accelerate as in a new process."""
    if find_spec("torch") is None:
        return
    import torch
    from accelerate.state import AcceleratorState

    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
