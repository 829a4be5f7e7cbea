"""The likeliest token of each row, for runners whose forward pass doesn't find it."""

import torch

from midfill.runners.forward.likeliest import likeliest_tokens


def test_of_equal_logits_the_first_is_the_likeliest() -> None:
    assert likeliest_tokens(torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])) == [1, 0]


def test_a_row_whose_largest_logit_is_not_finite_has_none() -> None:
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[0.0, nan, 1.0], [inf, 0.0, 1.0], [-inf, -inf, -inf], [-inf, 0.0, -1.0]])
    assert likeliest_tokens(rows) == [-1, -1, -1, 1]


def test_there_may_be_no_row() -> None:
    assert likeliest_tokens(torch.empty(0, 8)) == []
