"""SamplingParams: how an answer is generated, as users of the API write it."""

import warnings
from collections.abc import Mapping

import msgspec

from midfill.engine.request import EngineSamplingParams
from midfill.engine.validation import check_parameter, check_sampling_ranges
from midfill.frontend.post_processing import PostProcessing

MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 1024


class SamplingParams(EngineSamplingParams, frozen=True, kw_only=True):
    """How an answer is generated: the engine's parameters, and three that concern text.

    ``max_tokens`` 0 scores the prompt: with ``prompt_logprobs`` its tokens are reported, and the
    answer is empty.

    Attributes:
        stop: strings that end the answer.
        include_stop_str_in_output: keep the stop string (or the stop token's text) in the answer.
        post_processing: where to cut the answer, and how to complete it.
        trimming: the former name of ``post_processing``, for one release.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    post_processing: PostProcessing = PostProcessing()
    trimming: PostProcessing | None = None

    def __post_init__(self) -> None:
        if self.trimming is not None:
            warnings.warn(
                "SamplingParams(trimming=...) is now SamplingParams(post_processing=...)",
                DeprecationWarning,
                stacklevel=2,
            )
            msgspec.structs.force_setattr(self, "post_processing", self.trimming)
            msgspec.structs.force_setattr(self, "trimming", None)

    @property
    def stops(self) -> tuple[str, ...]:
        """Return all strings that end the answer."""
        return (*self.stop, *self.post_processing.stop)

    @property
    def stop_bytes(self) -> bytes:
        """Return the bytes that may show that the answer has ended; see ``EngineRequest``."""
        last = {stop.encode()[-1] for stop in self.stops if stop}
        return bytes(last | set(b"\n" if self.post_processing.ends_at_lines else b""))

    def for_engine(
        self, end_tokens: tuple[int, ...] = (), healed: int = 0, end_bias: float = 0.0
    ) -> EngineSamplingParams:
        """Return the parameters that concern tokens.

        Args:
            end_tokens: further tokens that end the answer, unless ``ignore_eos`` is set.
            healed: number of bytes at the prompt's end that the answer writes again; as many
                tokens are allowed in addition to ``max_tokens``.
            end_bias: added to the logits of ``end_tokens``; those that have a bias of the client's
                keep it.
        """
        fields = {name: getattr(self, name) for name in EngineSamplingParams.__struct_fields__}
        stops = (*self.stop_token_ids, *(() if self.ignore_eos else end_tokens))
        fields["stop_token_ids"] = tuple(dict.fromkeys(stops))
        if end_bias and not self.ignore_eos:
            fields["logit_bias"] = {**dict.fromkeys(end_tokens, end_bias), **self.logit_bias}
        fields["max_tokens"] = min(max(self.max_tokens, 1) + healed, 2**31 - 1)
        return EngineSamplingParams(**fields)


def check_sampling(
    sampling: SamplingParams, vocab_size: int, names: Mapping[str, str] | None = None
) -> None:
    """Refuse sampling parameters that are out of range.

    Args:
        sampling: of the right types already.
        vocab_size: number of tokens of the model.
        names: the client's names of fields, where they differ.

    Raises:
        InvalidRequestError: names the first field that is out of range.
    """

    def check(field: str, holds: bool, meaning: str) -> None:
        check_parameter(sampling, field, holds, meaning, names)

    if sampling.max_tokens == 0 and sampling.prompt_logprobs is not None:
        sampling = msgspec.structs.replace(sampling, max_tokens=1)
    biases = len(sampling.logit_bias)
    check("logit_bias", biases <= MAX_LOGIT_BIASES, f"of at most {MAX_LOGIT_BIASES} entries")
    check_sampling_ranges(sampling, vocab_size, MAX_LOGPROBS, names)
    stop_tokens = len(sampling.stop_token_ids)
    check("stop_token_ids", stop_tokens <= MAX_STOP_TOKENS, f"of at most {MAX_STOP_TOKENS} entries")
    for token_id in sampling.stop_token_ids:
        known = 0 <= token_id < vocab_size
        check("stop_token_ids", known, f"of token ids from 0 to {vocab_size - 1}")
    stops = len(sampling.stop)
    check("stop", stops <= MAX_STOP_STRINGS, f"of at most {MAX_STOP_STRINGS} entries")
    for stop in sampling.stop:
        sized = 1 <= len(stop) <= MAX_STOP_CHARACTERS
        check("stop", sized, f"of strings of 1 to {MAX_STOP_CHARACTERS} characters")
