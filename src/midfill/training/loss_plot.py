"""The loss curve of a run as a picture."""

from pathlib import Path

import numpy as np

from midfill.training.loss_log import read_loss_log


def plot_loss(log: Path, picture: Path) -> None:
    """Draw a loss log: every step, and a running mean over a twentieth of the run.

    Args:
        log: JSON lines with "tokens" and "loss".
        picture: a file whose ending names its format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_loss_log(log)
    tokens = np.array([line["tokens"] for line in lines]) / 1000
    losses = np.array([line["loss"] for line in lines])
    width = max(1, len(losses) // 20)
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(tokens, losses, color="0.8", linewidth=0.8, label="each step")
    axes.plot(tokens[width - 1 :], smooth, color="tab:blue", label=f"mean of {width} steps")
    axes.set(xlabel="thousand tokens trained on", ylabel="loss, nats a token", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)
