"""Hyper-parameters that methods share: budgets in tokens, observation windows."""

import math

from midfill.errors import InvalidRequestError


def check_budget(budget: float, window: int) -> None:
    """Check a budget against the tokens that a method always keeps.

    Args:
        budget: tokens per layer, or a share of the prompt if it is below 1.
        window: tokens that are always kept.

    Raises:
        InvalidRequestError: it is not positive, not whole, or leaves nothing to choose.
    """
    if not 0 < budget < math.inf:
        raise InvalidRequestError(f"budget must be above 0, not {budget:g}", param="method")
    if budget >= 1 and budget != int(budget):
        raise InvalidRequestError(
            f"budget must be a whole number of tokens, or a share below 1, not {budget:g}",
            param="method",
        )
    if 1 <= budget <= window:
        raise InvalidRequestError(
            f"budget must be above the {window} tokens that are always kept, not {budget:g}",
            param="method",
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
    if window < least:
        raise InvalidRequestError(f"window must be at least {least}, not {window}", param="method")
    if kernel < 1 or kernel % 2 == 0:
        raise InvalidRequestError(
            f"kernel must be a positive odd number, not {kernel}", param="method"
        )


def check_cascade(cascade: int) -> None:
    """Check whether prompts are trimmed while they are prefilled.

    Raises:
        InvalidRequestError: it is neither 0 nor 1.
    """
    if cascade not in (0, 1):
        raise InvalidRequestError(f"cascade must be 0 or 1, not {cascade}", param="method")


def check_interval(interval: int) -> None:
    """Check after how many tokens of an answer a method decides again.

    Raises:
        InvalidRequestError: it is negative.
    """
    if interval < 0:
        raise InvalidRequestError(
            f"interval must be 0 or more tokens, not {interval}", param="method"
        )


def budget_tokens(budget: float, prompt: int, window: int) -> int:
    """Return how many of a prompt's tokens to keep per layer.

    Args:
        budget: see ``check_budget``.
        prompt: tokens of the prompt.
        window: tokens that are always kept; a share that asks for fewer keeps one more than these.
    """
    return int(budget) if budget >= 1 else max(window + 1, round(budget * prompt))
