"""ZipCache and KIVI on the default model: KL from full KV beside as many bytes spent otherwise.

Texts are source files of installed libraries, whose next tokens are known. Differences are paired,
text by text; -s shows all of it.
"""

import os
import random
from dataclasses import dataclass

import numpy as np
import pytest
from default_model import DefaultModel

from midfill.methods.evict.accumulated_attention import ObservationMemory
from midfill.methods.method import Method
from midfill.methods.quantize.kivi import Kivi
from midfill.methods.quantize.zipcache import ZipCache
from midfill.methods.served_model import ServedModel
from midfill_lab.bench.methods.fewer_bits import UniformPerToken
from midfill_lab.bench.methods.nulls import NULLS, make_null
from midfill_lab.bench.methods.probes import names

pytestmark = [
    pytest.mark.slow, pytest.mark.quality, pytest.mark.real_model, pytest.mark.timeout(900),
]  # fmt: skip

TEXTS, TOKENS, ANSWER = int(os.environ.get("TEXTS", "10")), 512, 17
STUDENT = {10: 2.262, 20: 2.093}[TEXTS]
"""97.5% quantile of Student's distribution with ``TEXTS`` - 1 degrees of freedom."""
NEEDLES, NEEDLE_TOKENS = 5, 1000


@dataclass(frozen=True)
class Compared:
    """Answers under a method beside those with full KV, without their first tokens.

    The first token sees the whole prompt under every method.

    Attributes:
        divergence: [texts], mean KL per token.
        agreement: [texts], share of tokens at which the most likely token is the same.
    """

    divergence: np.ndarray
    agreement: np.ndarray


def methods(served: ServedModel) -> dict[str, Method]:
    """What is compared."""
    found: dict[str, Method] = {"zipcache": ZipCache()}
    found |= {
        f"zipcache, {title}": make_null("zipcache", title, served) for title in NULLS["zipcache"]
    }
    found |= {
        "zipcache, a quarter of float16": ZipCache(salient=0.8),
        "4 bits per token": UniformPerToken(salient=1),
        "zipcache, 8 bits": ZipCache(salient=1, high=8),
        "kivi, 2 bits": Kivi(),
        "kivi, 2 bits, keys per token": make_null("kivi", "keys per token", served),
        "kivi, 4 bits": Kivi(bits=4),
    }
    return share_memory(found)


@pytest.fixture(scope="module")
def compared(default_model: DefaultModel) -> dict[str, Compared]:
    return compare(default_model, methods(default_model.served))


def compare(default_model: DefaultModel, named: dict[str, Method]) -> dict[str, Compared]:
    """Ask for what follows each text, under methods of which one is "zipcache"."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
    with default_model.forced_answers(TEXTS * TOKENS + 3000, {"": None, **named}) as answers:
        for number in range(TEXTS):
            text = default_model.haystacks.hide(100 + number, TOKENS + 64, [])
            asked = text[:TOKENS], text[TOKENS : TOKENS + ANSWER]
            answers.logprobs("zipcache", *asked)  # computes the prompt, which is cached from here
            exact = answers.logprobs("", *asked)
            for name in named:
                other = answers.logprobs(name, *asked)
                divergence = (np.exp(exact) * (exact - other)).sum(axis=1)
                agreement = exact.argmax(axis=1) == other.argmax(axis=1)
                found[name].append((divergence[1:].mean(), agreement[1:].mean()))
    result = {name: Compared(*np.array(pairs).T) for name, pairs in found.items()}
    print()
    for name, one in result.items():
        radius = interval(one.divergence)
        print(f"{name:34} {one.divergence.mean():.4f} ±{radius:.4f}  {one.agreement.mean():.3f}")
    return result


def share_memory(named: dict[str, Method]) -> dict[str, Method]:
    """Have methods with the same probes share what these have observed."""
    memory = ObservationMemory()
    for method in named.values():
        if isinstance(method, ZipCache) and method.recent == ZipCache().recent:
            vars(method)["memory"] = memory
    return named


def interval(numbers: np.ndarray) -> float:
    """Return the half width of the 95% interval of a mean."""
    return float(STUDENT * numbers.std(ddof=1) / np.sqrt(len(numbers)))


def is_nearer(compared: dict[str, Compared], one: str, other: str) -> bool:
    """Whether one is nearer to full KV by more than the interval of the mean difference."""
    difference = compared[other].divergence - compared[one].divergence
    print(f"\n{one} beside {other}: {-difference.mean():+.4f} ±{interval(difference):.4f}", end="")
    return bool(difference.mean() > interval(difference))


def test_zipcache_is_nearer_to_full_kv_than_as_many_bytes_spent_otherwise(
    compared: dict[str, Compared],
) -> None:
    """Beside uniform bits with its own quantisers, there are too few texts to tell."""
    nearer = {
        title: is_nearer(compared, "zipcache", f"zipcache, {title}") for title in NULLS["zipcache"]
    }
    assert [title for title, found in nearer.items() if not found] in ([], ["uniform bits"])


def test_a_quarter_of_float16_is_no_farther_from_full_kv_than_4_bits_per_token(
    compared: dict[str, Compared],
) -> None:
    """63 bytes per token and head with zipcache, 72 with scales and zeros per token."""
    assert not is_nearer(compared, "4 bits per token", "zipcache, a quarter of float16")


def test_8_bits_leave_the_most_likely_token(compared: dict[str, Compared]) -> None:
    assert compared["zipcache, 8 bits"].agreement.mean() > 0.95
    assert compared["zipcache, 8 bits"].divergence.mean() < 0.005


KEYS = "zipcache, all keys at 4 bits"


def test_with_all_keys_at_4_bits_a_quarter_of_float16_loses_no_more_than_4_bits_for_all(
    default_model: DefaultModel,
) -> None:
    """63 bytes per token and head with all keys at 4 bits, 69 where all values have them, too, and
    72 with scales and zeros per token. As many bytes in classes of 8 and 3 bits gain nothing."""
    named: dict[str, Method] = {"zipcache": ZipCache(), KEYS: ZipCache(keys=4)}
    named |= {
        f"{KEYS}, {title}": make_null("zipcache:keys=4", title, default_model.served)
        for title in ("random split", "accumulated score", "uniform bits")
    }
    named |= {
        "4 bits for all": ZipCache(salient=1),
        "4 bits per token": UniformPerToken(salient=1),
        "8 bits for a fifth, 3 for others": ZipCache(salient=0.2, high=8, low=3),
    }
    found = compare(default_model, share_memory(named))
    assert is_nearer(found, KEYS, "zipcache")
    assert is_nearer(found, KEYS, "4 bits per token")
    assert is_nearer(found, KEYS, f"{KEYS}, random split")
    for title in ("accumulated score", "uniform bits"):  # nearly beyond the interval of ten texts
        is_nearer(found, KEYS, f"{KEYS}, {title}")
        assert found[KEYS].divergence.mean() < found[f"{KEYS}, {title}"].divergence.mean()
    is_nearer(found, KEYS, "8 bits for a fifth, 3 for others")
    difference = found[KEYS].divergence - found["4 bits for all"].divergence
    assert difference.mean() < interval(difference)


def test_kivi_is_nearer_to_full_kv_than_keys_per_token(compared: dict[str, Compared]) -> None:
    assert is_nearer(compared, "kivi, 2 bits", "kivi, 2 bits, keys per token")
    assert is_nearer(compared, "kivi, 4 bits", "kivi, 2 bits")


def test_needles_in_the_last_half_are_told(default_model: DefaultModel) -> None:
    """Accumulated attention ranks late tokens low; scores are those of a code's further tokens."""
    served, tokenizer = default_model.served, default_model.checkpoint.tokenizer
    per_token = make_null("zipcache", "uniform bits per token", served)
    named = {
        "zipcache": ZipCache(),
        "full KV": None,
        "accumulated": make_null("zipcache", "accumulated score", served),
        "3 bits per token": per_token,
    }
    vars(per_token)["memory"] = vars(named["zipcache"])["memory"] = ObservationMemory()
    found: dict[str, list[float]] = {name: [] for name in named}
    with default_model.forced_answers(NEEDLES * NEEDLE_TOKENS + 3000, named) as answers:
        for number in range(NEEDLES):
            rng = random.Random(number)
            (name,), code = names(1, rng), rng.randrange(1_000, 10_000)
            asked = tokenizer.encode_continuation(f"\n# The pass code of the {name} is")
            needle = 0.5 + 0.45 * number / NEEDLES, f"# The pass code of the {name} is {code}.\n"
            text = default_model.haystacks.hide(number, NEEDLE_TOKENS - len(asked), [needle])
            answer = tokenizer.encode_continuation(f" {code}.\n")
            for one in named:
                rows = answers.logprobs(one, [*text, *asked], answer)
                found[one].append(float(rows[np.arange(len(rows)), answer][1:].mean()))
            print("\n", *(f"{one} {scores[-1]:.3f}" for one, scores in found.items()), end="")
    means = {name: float(np.mean(scores)) for name, scores in found.items()}
    print("\nmeans", *(f"{name} {mean:.3f}" for name, mean in means.items()))
    assert means["zipcache"] > means["full KV"] - 0.2
    assert means["zipcache"] > means["accumulated"]
