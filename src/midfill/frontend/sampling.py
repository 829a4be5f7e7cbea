"""SamplingParams as users write them: the engine's, plus what needs text; and their checks."""

import math
from collections.abc import Mapping

from midfill.engine.request import SamplingParams as TokenSampling
from midfill.errors import InvalidRequestError
from midfill.frontend.trimming import Trimming

MAX_ANSWERS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 1024


class SamplingParams(TokenSampling, frozen=True, kw_only=True):
    """How an answer is generated; the engine's fields and three more.

    Attributes:
        stop: strings that end the answer.
        include_stop_str_in_output: keep the stop string (or stop token's text) that ended it.
        trimming: what to cut off it.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    trimming: Trimming = Trimming()

    @property
    def stops(self) -> tuple[str, ...]:
        """All strings that end the answer."""
        return (*self.stop, *self.trimming.stop)

    def for_engine(self, end_tokens: tuple[int, ...] = (), healed: int = 0) -> TokenSampling:
        """The part the engine understands.

        Args:
            end_tokens: end this prompt's answer like the model's own end tokens: unless
                ``ignore_eos``.
            healed: bytes of the prompt that the answer writes again; the tokens for them come on
                top of ``max_tokens``.
        """
        fields = {name: getattr(self, name) for name in TokenSampling.__struct_fields__}
        stops = (*self.stop_token_ids, *(() if self.ignore_eos else end_tokens))
        fields["stop_token_ids"] = tuple(dict.fromkeys(stops))
        fields["max_tokens"] = self.max_tokens + healed
        return TokenSampling(**fields)


def check_sampling(
    sampling: SamplingParams, vocab_size: int, spelled: Mapping[str, str] | None = None
) -> None:
    """Refuse values that mean nothing.

    Args:
        sampling: of the right types already.
        vocab_size: tokens of the model.
        spelled: what the client called a field where its name differs.

    Raises:
        InvalidRequestError: naming the first field that is out of range.
    """
    names = spelled or {}

    def check(field: str, holds: bool, wanted: str) -> None:
        if not holds:
            name = names.get(field, field)
            value = _short(getattr(sampling, field))
            raise InvalidRequestError(f"{name} must be {wanted}, not {value}", param=name)

    finite = math.isfinite
    check("max_tokens", 1 <= sampling.max_tokens < 2**31, "at least 1")
    check("n", 1 <= sampling.n <= MAX_ANSWERS, f"from 1 to {MAX_ANSWERS}")
    check(
        "temperature",
        finite(sampling.temperature) and 0 <= sampling.temperature <= 100,
        "a number from 0 to 100",
    )
    check("top_k", 0 <= sampling.top_k < 2**31, "0 (all tokens) or more")
    check("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1")
    check("min_p", 0 <= sampling.min_p <= 1, "from 0 to 1")
    check("typical_p", 0 < sampling.typical_p <= 1, "above 0 and at most 1")
    for field in ("presence_penalty", "frequency_penalty"):
        check(field, -2 <= getattr(sampling, field) <= 2, "from -2 to 2")
    check("repetition_penalty", 0 < sampling.repetition_penalty <= 100, "above 0 and at most 100")
    check(
        "seed",
        sampling.seed is None or -(2**63) <= sampling.seed < 2**63,
        "a 64-bit whole number",
    )
    check(
        "logprobs",
        sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_LOGPROBS,
        f"from 0 to {MAX_LOGPROBS}",
    )
    check("logit_bias", len(sampling.logit_bias) <= MAX_LOGIT_BIASES, _at_most(MAX_LOGIT_BIASES))
    for token_id, bias in sampling.logit_bias.items():
        check("logit_bias", 0 <= token_id < vocab_size, f"of token ids from 0 to {vocab_size - 1}")
        check("logit_bias", -100 <= bias <= 100, "of values from -100 to 100")
    check("stop_token_ids", len(sampling.stop_token_ids) <= MAX_STOP_TOKENS, _at_most(1024))
    for token_id in sampling.stop_token_ids:
        valid = 0 <= token_id < vocab_size
        check("stop_token_ids", valid, f"of token ids from 0 to {vocab_size - 1}")
    check("stop", len(sampling.stop) <= MAX_STOP_STRINGS, _at_most(MAX_STOP_STRINGS))
    for stop in sampling.stop:
        sized = 1 <= len(stop) <= MAX_STOP_CHARACTERS
        check("stop", sized, f"of strings of 1 to {MAX_STOP_CHARACTERS} characters")


def _at_most(count: int) -> str:
    return f"of at most {count} entries"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
