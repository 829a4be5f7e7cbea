"""Next edits as Zed asks for them: the answer repeats a region, so most of it is drafted right."""

from collections.abc import Iterator

import pytest

from midfill import LLM, SamplingParams
from midfill.config import ModelOptions
from midfill.engine import loading
from midfill.engine.scheduling.drafting import AcceptanceRates
from midfill.engine.scheduling.policies.smart_spec import SmartSpec
from midfill.engine.step.speculation import Speculation
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from serving import FixedCost

pytestmark = pytest.mark.real_model

ABOVE = (
    "import math\n\n\nclass Circle:\n"
    "    def __init__(self, radius):\n        self.radius = radius\n\n"
)
REGION = (
    "    def area(self):\n        return math.pi * self.radius ** 2\n\n"
    "    def perimeter(self):\n        return 2 * math.pi * self.radius\n\n    def dia"
)
BELOW = "\n\ncircle = Circle(2)\nprint(circle.area())\nprint(circle.perimeter())\n"
ZETA_2 = (
    f"<[fim-suffix]>{BELOW}<[fim-prefix]><filename>edit_history\n--- a/circle.py\n+++ b/circle.py\n"
    "@@ -12,3 +12,4 @@\n+    def dia{typed}\n\n<filename>circle.py\n"
    f"{ABOVE}<<<<<<< CURRENT\n{REGION}{{typed}}<|user_cursor|>\n=======\n<[fim-middle]>"
)
ZETA_2_1 = (
    f"<[fim-suffix]>{BELOW}<[fim-prefix]><filename>circle.py\n{ABOVE}<|marker_1|>{REGION}{{typed}}"
    "<|user_cursor|>\n<|marker_2|>\n<[fim-middle]>"
)


@pytest.fixture(scope="module")
def model() -> Iterator[LLM]:
    """The default model without an adapter, on a machine where further rows cost little.

    What they cost is otherwise measured, and decides which drafts run.
    """

    def speculation(options: ModelOptions) -> Speculation:
        return Speculation(SmartSpec(options.step_tokens), AcceptanceRates(), FixedCost())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "speculation", speculation)
        llm = LLM(DEFAULT_MODEL, adapter="none", kv_memory=1 << 28)
    with llm:
        yield llm


@pytest.mark.parametrize(("prompt", "cached"), [(ZETA_2, 70), (ZETA_2_1, 110)])
def test_next_edits_are_speculated_and_reuse_what_precedes_the_change(
    model: LLM, prompt: str, cached: int
) -> None:
    """The region's first line is given, as no model of next edits is here."""
    sampling = SamplingParams(
        max_tokens=60, temperature=0.0, ignore_eos=True, stop=(">>>>>>> UPDATED",)
    )
    for typed in ("", "mete", "meter(sel"):
        accepted = model.stats.accepted_tokens
        given = prompt.format(typed=typed) + REGION.partition("\n")[0] + "\n"
        (result,) = model.generate(given, sampling)
        assert result.layout is not None
        assert result.layout.layout == "verbatim"
        if typed:
            assert result.usage.cached_tokens >= cached
        accepted = model.stats.accepted_tokens - accepted
        assert accepted >= 0.4 * result.usage.completion_tokens
