"""Methods by name: what a specification means, and what is refused."""

import pytest

from midfill.errors import InvalidRequestError
from midfill.methods.evict.cake import Cake
from midfill.methods.method import ModelSpecific
from midfill.methods.registry import METHODS, resolve_method


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_made_with_its_defaults(name: str) -> None:
    method = resolve_method(name)
    assert method == METHODS[name].load()(**METHODS[name].options())
    if METHODS[name].kind == "evict":
        assert isinstance(method, ModelSpecific) or method.observed_rows >= 0


def test_options_follow_the_name() -> None:
    assert resolve_method("cake:budget=0.25,window=16") == Cake(budget=0.25, window=16)


@pytest.mark.parametrize("text", ["", "none"])
def test_no_method_can_be_asked_for(text: str) -> None:
    assert resolve_method(text) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("snapvk", "no method 'snapvk'; did you mean 'snapkv'"),
        ("SNAPKV", "did you mean 'snapkv'"),
        ("xyz", "there are cake, "),
        ("none:budget=3", "no method 'none'"),
        ("cake:budjet=3", "no option 'budjet'; did you mean 'budget'"),
        ("cake:window=1.5", "window must be a whole number, not '1.5'"),
        ("cake:budget=", "budget must be a number, not ''"),
        ("cake:budget", "write budget=VALUE"),
        ("cake:budget=0", "above 0"),
        ("cake:budget=-3", "above 0"),
        ("cake:budget=32", "above the 32 tokens"),
        ("cake:budget=100.5", "whole number of tokens"),
        ("cake:budget=nan", "above 0"),
        ("cake:tau1=0", "tau1 must be above 0"),
        ("snapkv:window=0", "window"),
        ("snapkv:kernel=4", "kernel"),
        ("razorattention:induction=1.5", "induction must be from 0 to 1"),
        ("razorattention:mean=2", "mean must be 0 or 1"),
        ("razorattention:sinks=-1", "sinks must be at least 0"),
        ("razorattention:share=1", "share must be from 0 to below 1"),
        ("razorattention:interval=-1", "interval must be at least 0"),
    ],
)
def test_nonsense_is_refused_with_the_nearest_match(text: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        resolve_method(text)
