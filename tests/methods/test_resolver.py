"""Which methods requests may choose, and how they are made ready for a model."""

from dataclasses import dataclass

import pytest
from fake_keys import CONFIG

from midfill.errors import InvalidRequestError, OptionError
from midfill.methods.evict.cake import Cake
from midfill.methods.evict.snapkv import SnapKV
from midfill.methods.registry import METHODS, MethodEntry
from midfill.methods.resolver import (
    AllowedMethods,
    MethodResolver,
    default_method,
    infilling_method,
)
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.served_model import ServedModel

MODEL = ServedModel(config=CONFIG)


def resolver(*names: str, default: str = "none") -> MethodResolver:
    return MethodResolver(lambda: MODEL, AllowedMethods(names, default))


@pytest.mark.parametrize(
    ("method", "parts", "chosen"),
    [("none", 2, "tpla"), ("none", None, "none"), ("snapkv", 2, "snapkv"), ("tpla", 4, "tpla")],
)
def test_latents_in_parts_have_a_method_of_their_own(
    method: str, parts: int | None, chosen: str
) -> None:
    assert default_method(method, parts) == chosen


def test_requests_may_use_what_is_allowed() -> None:
    assert resolver("snapkv").find("snapkv:budget=64") == SnapKV(budget=64)
    assert resolver("any").find("cake") == Cake()
    assert resolver("any").find("none") is None
    assert resolver("none", default="cake").find("none") is None


def test_the_default_may_always_be_named_as_it_is() -> None:
    one = resolver(default="cake:budget=100")
    assert one.default == one.find("cake:budget=100") == Cake(budget=100)
    with pytest.raises(InvalidRequestError, match="may not use 'cake' here"):
        one.find("cake:budget=101")
    assert resolver().find("none") is None


@pytest.mark.parametrize(
    ("allowed", "asked", "error"),
    [
        ((), "snapkv", "may not use 'snapkv' here; .* allow it with --allow-method snapkv"),
        (("cake", "snapkv"), "streamingllm", "here; they may use cake, snapkv; "),
        (("cake",), "snapk", "no method 'snapk'; did you mean 'snapkv'"),
        (("cake",), "cake:budjet=2", "no option 'budjet'; did you mean 'budget'"),
        ((), "cake:budget=3", "above the 32 tokens"),
    ],
)
def test_other_methods_are_refused(allowed: tuple[str, ...], asked: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error) as caught:
        resolver(*allowed).find(asked)
    assert caught.value.param == "method"


def test_names_that_are_allowed_must_exist() -> None:
    with pytest.raises(InvalidRequestError, match="no method 'snapk'; did you mean 'snapkv'"):
        AllowedMethods(("snapk",))
    with pytest.raises(InvalidRequestError, match="no method 'anyone'"):
        AllowedMethods(default="anyone")


@dataclass(frozen=True)
class ForOneModel:
    """A method that suits one model only."""

    ready: bool = False

    @property
    def observed_rows(self) -> int:
        return 0

    def for_model(self, model: ServedModel) -> "ForOneModel":
        if model.backend != "cpu":
            raise InvalidRequestError("picky needs the CPU kernels", param="method")
        return ForOneModel(ready=True)


def test_methods_are_made_ready_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = MethodEntry("picky", "evict", "Picky", "nowhere", __name__, "ForOneModel")
    monkeypatch.setattr(MethodEntry, "load", lambda self: ForOneModel)
    monkeypatch.setitem(METHODS, "picky", entry)
    found = resolver("picky").find("picky")
    assert found == ForOneModel(ready=True)
    assert resolver(default="picky").default == found
    other = ServedModel(config=CONFIG, backend="torch")
    with pytest.raises(InvalidRequestError, match="needs the CPU kernels"):
        MethodResolver(lambda: other, AllowedMethods(("any",))).find("picky")


def test_a_default_that_does_not_suit_the_model_is_a_wrong_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = MethodEntry("picky", "evict", "Picky", "nowhere", __name__, "ForOneModel")
    monkeypatch.setattr(MethodEntry, "load", lambda self: ForOneModel)
    monkeypatch.setitem(METHODS, "picky", entry)
    other = ServedModel(config=CONFIG, backend="torch")
    with pytest.raises(OptionError, match="--method picky: picky needs the CPU kernels"):
        MethodResolver(lambda: other, AllowedMethods(default="picky"))


def test_many_specifications_are_not_all_remembered() -> None:
    one = resolver("cake")
    for budget in range(100, 300):
        assert one.find(f"cake:budget={budget}") == Cake(budget=budget)
    assert len(one._found) <= 64


BLEND = "cacheblend:ratio=0.4,order=caret"


@pytest.mark.parametrize(
    ("reuse", "method", "stated", "found"),
    [
        ("auto", "none", "off", "none"),
        ("auto", "none", BLEND, BLEND),
        ("auto", "cake", BLEND, "none"),
        ("off", "none", BLEND, "none"),
        (BLEND, "none", "off", BLEND),
        (BLEND, "cake", "kvshare", BLEND),
    ],
)
def test_infilling_requests_have_what_the_option_or_the_model_says(
    reuse: str, method: str, stated: str, found: str
) -> None:
    assert infilling_method(reuse, method, stated) == found


@pytest.mark.parametrize(
    ("reuse", "stated", "error"),
    [
        ("cake", "off", "--reuse cake: cake takes no KV from elsewhere, as cacheblend, "),
        ("cachblend", "off", "--reuse cachblend: there is no method 'cachblend'; did you mean"),
        ("auto", "cacheblend:ratio=2", "reuse.method in the midfill.json: cacheblend: ratio must"),
        ("auto", "cake", "reuse.method in the midfill.json: cake takes no KV from elsewhere"),
        ("kvshare+cacheblend", "off", "takes no KV from elsewhere"),
    ],
)
def test_what_is_no_method_of_reuse_is_a_wrong_option(reuse: str, stated: str, error: str) -> None:
    with pytest.raises(OptionError, match=error):
        infilling_method(reuse, "none", stated)


def test_the_method_of_infilling_requests_may_be_named() -> None:
    one = MethodResolver(lambda: MODEL, AllowedMethods(infilling=BLEND))
    assert one.default is None
    assert one.infilling == one.find(BLEND) == CacheBlend(ratio=0.4, order="caret")
    with pytest.raises(InvalidRequestError, match="may not use 'cacheblend' here"):
        one.find("cacheblend")
    deep = AllowedMethods(infilling=f"cacheblend:check_layer={CONFIG.layers}")
    with pytest.raises(OptionError, match=r"--reuse .*check_layer must be below"):
        MethodResolver(lambda: MODEL, deep)
