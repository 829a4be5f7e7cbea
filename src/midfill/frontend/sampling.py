"""SamplingParams: how an answer is generated, cut and completed, as users of the API write it."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import msgspec

from midfill.engine.request import EngineSamplingParams
from midfill.engine.validation import check_parameter, check_sampling_ranges
from midfill.errors import InvalidRequestError
from midfill.infill.candidates import MAX_CANDIDATES
from midfill.infill.confidence import TOP_TOKENS
from midfill.infill.trim import Brackets, Lines, Trimmer

MAX_LOGPROBS = 20


MAX_LOGIT_BIASES = 1024


MAX_STOP_STRINGS = 64


MAX_STOP_CHARACTERS = 256


MAX_STOP_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PostProcessing:
    """What to change in an answer.

    Attributes:
        overlap: end the answer where it begins to repeat the suffix. None does so if the request is
            one for infilling, and not for a raw prompt.
        lines: "single" ends the answer at its first line break; "block" ends it where the block
            around the caret ends, by indentation. Generation stops there, too.
        min_indent: end the answer before its first line that is indented by fewer characters; the
            caret's own line and blank lines don't count.
        max_seconds: once so many seconds have passed since its first token, end the answer at its
            next line break. It never ends inside a line for that reason.
        soft_max_tokens: the same once the answer has so many tokens; 0 is off.
        brackets: "close" closes the brackets that the answer leaves open and the suffix does not
            close.
        suggestion: of an answer that isn't streamed, return the part that is worth showing to
            somebody who didn't ask for it, see ``infill/suggestion.py``.

    Raises:
        InvalidRequestError: an unknown mode, or a negative number.
    """

    overlap: bool | None = None
    lines: Lines = "all"
    min_indent: int = 0
    max_seconds: float = math.inf
    soft_max_tokens: int = 0
    brackets: Brackets = "keep"
    suggestion: bool = False

    def __post_init__(self) -> None:
        for field in ("min_indent", "max_seconds", "soft_max_tokens"):
            if not getattr(self, field) >= 0:
                raise InvalidRequestError.of_field(field, "must be at least 0")
        for field, modes in (("lines", get_args(Lines)), ("brackets", get_args(Brackets))):
            if getattr(self, field) not in modes:
                names = " or ".join(map(repr, modes))
                raise InvalidRequestError(f"{field} must be {names}", param=field)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop strings that end generation where nothing after them would be kept."""
        return ("\n", "\r\n") if self.lines == "single" else ()

    @property
    def ends_at_lines(self) -> bool:
        """Whether a line break can show that the answer has ended."""
        limited = self.max_seconds < math.inf or self.soft_max_tokens > 0
        return self.lines != "all" or self.min_indent > 0 or limited

    def trimmer(self, prefix: str, suffix: str, *, infilling: bool) -> Trimmer | None:
        """Return what changes an answer while it arrives; None if nothing does.

        Args:
            prefix, suffix: the text before and after the answer.
            infilling: whether the request is one for infilling.
        """
        overlap = infilling if self.overlap is None else self.overlap
        if not overlap and not self.ends_at_lines and self.brackets == "keep":
            return None
        return Trimmer(
            prefix,
            suffix,
            lines=self.lines,
            min_indent=self.min_indent,
            overlap=overlap,
            brackets=self.brackets,
        )

    def apply(self, answer: str, prefix: str, suffix: str, *, broken_off: bool = False) -> str:
        """Return a whole answer to an infilling request as it is shown.

        Args:
            answer: what the model wrote.
            prefix, suffix: the text before and after it.
            broken_off: whether the answer reached its maximum length.
        """
        trimmer = self.trimmer(prefix, suffix, infilling=True)
        if trimmer is None:
            return answer
        return trimmer.push(answer) + trimmer.finish(broken_off=broken_off)


class SamplingParams(EngineSamplingParams, frozen=True, kw_only=True):
    """How an answer is generated: the engine's parameters, and some that concern text.

    ``max_tokens`` 0 scores the prompt: with ``prompt_logprobs`` its tokens are reported, and the
    answer is empty.

    Attributes:
        stop: strings that end the answer.
        include_stop_str_in_output: keep the stop string (or the stop token's text) in the answer.
        post_processing: where to cut the answer, and how to complete it.
        min_confidence: an answer to an infilling request is empty where the estimate that its first
            line is right is below (``infill/confidence.py``); 0 only estimates, None doesn't. A
            model without a ``ConfidenceRule`` has no estimate, and no such answers.
        candidates: how many answers to an infilling request may be tried, of which the one with
            the most probable first line is kept (``infill/candidates.py``); 1 tries no others.
            Streamed answers, and several to one prompt, have no candidates.
        trimming: the former name of ``post_processing``, for one release.
    """

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    post_processing: PostProcessing = PostProcessing()
    min_confidence: float | None = None
    candidates: int = 1
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
        ends_at_lines = self.post_processing.ends_at_lines or bool(self.min_confidence)
        return bytes(last | set(b"\n" if ends_at_lines else b""))

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
        if self.min_confidence is not None or self.candidates > 1:
            fields["logprobs"] = max(self.logprobs or 0, TOP_TOKENS)
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
    sure = sampling.min_confidence is None or 0.0 <= sampling.min_confidence <= 1.0
    check("min_confidence", sure, "a number from 0 to 1")
    check("candidates", 1 <= sampling.candidates <= MAX_CANDIDATES, f"from 1 to {MAX_CANDIDATES}")
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
