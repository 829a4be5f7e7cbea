"""Hyper-parameters that methods share: budgets in tokens, observation windows."""

import math

from midfill.errors import InvalidRequestError


def require(holds: bool, message: str, method: str = "") -> None:
    """Refuse the hyper-parameters of a method that don't fulfil a condition.

    Args:
        holds: whether they do.
        message: what they have to be.
        method: name that the message begins with, if any.

    Raises:
        InvalidRequestError: they don't.
    """
    if not holds:
        message = f"{method}: {message}" if method else message
        raise InvalidRequestError(message, param="method")


def check_budget(budget: float, window: int) -> None:
    """Check a budget against the tokens that a method always keeps.

    Args:
        budget: tokens per layer, or a share of the prompt if it is below 1.
        window: tokens that are always kept.

    Raises:
        InvalidRequestError: it is not positive, not whole, or leaves nothing to choose.
    """
    require(0 < budget < math.inf, f"budget must be above 0, not {budget:g}")
    require(
        budget < 1 or budget == int(budget),
        f"budget must be a whole number of tokens, or a share below 1, not {budget:g}",
    )
    require(
        not (1 <= budget <= window),
        f"budget must be above the {window} tokens that are always kept, not {budget:g}",
    )


def check_observation(window: int, kernel: int, least: int = 1) -> None:
    """Check an observation window and the kernel of a pooling.

    Args:
        window: rows.
        kernel: tokens.
        least: smallest window.

    Raises:
        InvalidRequestError: the window is too small, or the kernel is no positive odd number.
    """
    require(window >= least, f"window must be at least {least}, not {window}")
    require(kernel >= 1 and kernel % 2 == 1, f"kernel must be a positive odd number, not {kernel}")


def check_cascade(cascade: int) -> None:
    """Check whether prompts are trimmed while they are prefilled.

    Raises:
        InvalidRequestError: it is neither 0 nor 1.
    """
    require(cascade in (0, 1), f"cascade must be 0 or 1, not {cascade}")


def check_interval(interval: int) -> None:
    """Check after how many tokens of an answer a method decides again.

    Raises:
        InvalidRequestError: it is negative.
    """
    require(interval >= 0, f"interval must be 0 or more tokens, not {interval}")


def budget_tokens(budget: float, prompt: int, window: int) -> int:
    """Return how many of a prompt's tokens to keep per layer.

    Args:
        budget: see ``check_budget``.
        prompt: tokens of the prompt.
        window: tokens that are always kept; a share that asks for fewer keeps one more than these.
    """
    return int(budget) if budget >= 1 else max(window + 1, round(budget * prompt))
