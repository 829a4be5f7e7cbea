"""Response: all answers to one prompt, and what they cost."""

from dataclasses import dataclass

from midfill.engine.request import EngineOutput
from midfill.frontend.answer import Answer, AnswerDelta
from midfill.frontend.prompts import Prompt
from midfill.frontend.sampling import SamplingParams
from midfill.frontend.stops import StopStrings
from midfill.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """What requests cost, in tokens.

    Attributes:
        prompt_tokens: of the prompts.
        completion_tokens: generated; tokens of nothing but healed bytes are not counted.
        cached_tokens: of the prompt tokens, the ones found in the cache and not computed.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.cached_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


class Response:
    """Turns the engine's outputs for one request into text.

    Attributes:
        prompt: what was asked.
    """

    def __init__(self, prompt: Prompt, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self.prompt = prompt
        trimming = sampling.trimming
        stops = StopStrings(sampling.stops)
        healed = len(prompt.begins_with)
        trim = self._trimmed if trimming else None
        self._answers = [
            Answer(index, tokenizer, sampling, stops, healed=healed, trim=trim)
            for index in range(sampling.n)
        ]
        self._trimming = trimming
        self._cached_tokens = 0

    @property
    def finished(self) -> bool:
        """Whether every answer is complete; the engine may still be at work on some."""
        return all(answer.finished for answer in self._answers)

    @property
    def usage(self) -> Usage:
        """The cost so far; complete once ``finished``."""
        generated = sum(answer.tokens for answer in self._answers)
        return Usage(len(self.prompt.token_ids), generated, self._cached_tokens)

    def push(self, output: EngineOutput) -> AnswerDelta | None:
        """Take one output; None when it gives nothing to tell yet.

        Raises:
            GenerationError: the engine gave up on the request.
        """
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens)
        return self._answers[output.index].push(output)

    def _trimmed(self, answer: str) -> str:
        return self._trimming.apply(answer, self.prompt.prefix, self.prompt.suffix)
