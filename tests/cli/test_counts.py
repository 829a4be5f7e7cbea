"""Lists of counts are positive whole numbers with commas between."""

import pytest
import typer

from midfill.cli.counts import parse_counts


@pytest.mark.parametrize(("text", "counts"), [("5", (5,)), ("512, 1500", (512, 1500))])
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "1,", "0", "5,-1", "1.5"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no list of numbers like 512,1500"):
        parse_counts(text)
