"""Response: all answers to one prompt, and what they cost."""

from dataclasses import dataclass

from midfill.engine.request import EngineOutput
from midfill.frontend.answer import Answer, AnswerDelta
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompt_tokens import PromptToken, prompt_tokens
from midfill.frontend.sampling import SamplingParams
from midfill.frontend.stops import StopStrings
from midfill.models.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """What requests cost.

    Attributes:
        prompt_tokens: tokens of the prompts.
        completion_tokens: generated tokens, without those that stand for healed bytes only.
        cached_tokens: prompt tokens that were found in the prefix cache and not computed.
        reused_tokens: further prompt tokens whose KV a method of reuse took from elsewhere.
        knows_cached: whether the engine has told ``cached_tokens``, which is 0 otherwise. A server
            behind a gateway may tell them at an answer's end only, or not at all.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reused_tokens: int = 0
    knows_cached: bool = True

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed in all layers."""
        return self.prompt_tokens - self.cached_tokens - self.reused_tokens

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reused_tokens + other.reused_tokens,
            self.knows_cached and other.knows_cached,
        )


class Response:
    """All answers to one prompt: turns the engine's outputs into text.

    Attributes:
        prompt: the prompt.
        prompt_tokens: its tokens, if their log probabilities were asked for; empty until the first
            output.
    """

    def __init__(self, prompt: Prompt, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self.prompt = prompt
        self.prompt_tokens: tuple[PromptToken, ...] = ()
        self._tokenizer = tokenizer
        stops = StopStrings(sampling.stops)
        healed = len(prompt.begins_with)
        trims = sampling.post_processing
        # A client whose stop string is a line break doesn't want to see one.
        unwanted = any(stop in prompt.line_break for stop in sampling.stop)
        self._answers = [
            Answer(
                index,
                tokenizer,
                sampling,
                stops,
                healed=healed,
                line_break="" if unwanted else prompt.line_break,
                trimmer=trims.trimmer(prompt.prefix, prompt.suffix, infilling=prompt.infilling),
            )
            for index in range(sampling.n)
        ]
        self._cached_tokens = self._reused_tokens = 0
        self._knows_cached = True
        self._counted_prompt: int | None = None
        self._counted_completion: int | None = None
        self._empty_probability: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every answer is complete. The engine may not know yet, after a stop string."""
        return all(answer.finished for answer in self._answers)

    @property
    def usage(self) -> Usage:
        """The cost so far; final once ``finished``."""
        prompt, generated = self._counted_prompt, self._counted_completion
        if prompt is None:
            prompt = len(self.prompt.token_ids)
        if generated is None:
            generated = sum(answer.tokens for answer in self._answers)
        return Usage(
            prompt, generated, self._cached_tokens, self._reused_tokens, self._knows_cached
        )

    @property
    def empty_probability(self) -> float | None:
        """How probable an empty answer was, see ``EngineOutput``."""
        return self._empty_probability

    def best_answers(self, count: int) -> list[int]:
        """Return the indices of the answers with the highest log probability per token.

        Best first; or all in their order, if there are no more.
        """
        if count >= len(self._answers):
            return [answer.index for answer in self._answers]
        ranked = sorted(self._answers, key=lambda answer: answer.mean_logprob, reverse=True)
        return [answer.index for answer in ranked[:count]]

    def abandon(self, reason: str) -> list[AnswerDelta]:
        """End what is unfinished, without the text that is held back; return the last deltas."""
        return [answer.abandon(reason) for answer in self._answers if not answer.finished]

    def push(self, output: EngineOutput) -> AnswerDelta | None:
        """Take an output; return what is new, or None if nothing can be shown yet.

        Raises:
            GenerationError: the engine failed on the request.
        """
        self._knows_cached = output.cached_tokens is not None
        self._cached_tokens = max(self._cached_tokens, output.cached_tokens or 0)
        self._reused_tokens = max(self._reused_tokens, output.reused_tokens)
        if output.prompt_tokens is not None:
            self._counted_prompt = output.prompt_tokens
        if output.completion_tokens is not None:
            self._counted_completion = output.completion_tokens
        if output.empty_probability is not None:
            self._empty_probability = output.empty_probability
        if output.prompt_logprobs is not None:
            prompt = self.prompt
            self.prompt_tokens = prompt_tokens(
                prompt.token_ids, prompt.text, output.prompt_logprobs, self._tokenizer
            )
        return self._answers[output.index].push(output)
