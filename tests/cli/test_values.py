"""Option values: sizes in bytes, lists of counts, FIM tokens, windows, methods."""

import pytest
import typer

from midfill.cli.values import (
    parse_counts,
    parse_fim_tokens,
    parse_method,
    parse_names,
    parse_size,
    parse_window,
)
from midfill.config import FimTokens
from midfill.errors import OptionError
from midfill.serving.options import WindowSize


@pytest.mark.parametrize(
    ("text", "count"), [("2GB", 2**31), ("512 MiB", 2**29), ("1.5g", 3 * 2**29), ("4096", 4096)]
)
def test_sizes_have_units_of_1024(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "two", "1 GBB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a size; write it like 2GB"):
        parse_size(text)


@pytest.mark.parametrize(("text", "counts"), [("5", (5,)), ("512, 1500", (512, 1500))])
def test_counts_are_separated_by_commas(text: str, counts: tuple[int, ...]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "1,", "0", "5,-1", "1.5"])
def test_what_is_no_list_of_counts_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no list of numbers like 512,1500"):
        parse_counts(text)


def test_names_are_those_that_are_known_in_their_order() -> None:
    layouts = ("fim", "efim", "native")
    assert parse_names("native, fim", layouts, "--layouts") == ("fim", "native")
    with pytest.raises(OptionError, match="--layouts names psm; there are fim, efim, native"):
        parse_names("fim,psm", layouts, "--layouts")
    with pytest.raises(OptionError, match="--layouts names nothing"):
        parse_names(",", layouts, "--layouts")


def test_fim_tokens_are_three_texts() -> None:
    assert parse_fim_tokens("<P>,<S>,<M>") == FimTokens("<P>", "<S>", "<M>")


@pytest.mark.parametrize("text", ["", "<P>", "<P>,<S>", "<P>,<S>,", "<P>,,<M>", "a,b,c,d"])
def test_fewer_or_more_fim_tokens_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="name three tokens"):
        parse_fim_tokens(text)


def test_a_window_is_two_numbers() -> None:
    assert parse_window("1200, 400") == WindowSize(before=1200, after=400)
    assert parse_window("1,0") == WindowSize(before=1, after=0)


@pytest.mark.parametrize("text", ["", "1200", "a,b", "1,2,3", "0,5", "5,-1", "1.5,2"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="window"):
        parse_window(text)


@pytest.mark.parametrize("text", ["none", "snapkv", "cake:budget=0.5,window=16"])
def test_methods_are_named_with_their_options(text: str) -> None:
    assert parse_method(text) == text


def test_unknown_methods_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(typer.BadParameter, match="did you mean 'snapkv'"):
        parse_method("snapk")
