"""LLM: a model in this process, for Python programs. No server, no second process."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from midfill.config import Backend, KvDtype, ModelOptions, WeightsOption
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineOutput, EngineStats
from midfill.frontend.answer import AnswerDelta, TokenLogprob
from midfill.frontend.prompts import LayoutReport, Prompt, PromptEncoder, fim_format
from midfill.frontend.response import Response, Usage
from midfill.frontend.sampling import SamplingParams, check_sampling
from midfill.infill.context import ContextFile
from midfill.infill.layout import PromptLayout
from midfill.infill.request import InfillRequest, RequestedLayout
from midfill.models.adapted_checkpoint import open_model
from midfill.models.hub import DEFAULT_MODEL, resolve, resolve_adapter

DEFAULT_SAMPLING = SamplingParams(temperature=0.0, max_tokens=128)


@dataclass(frozen=True)
class GeneratedAnswer:
    """One answer.

    Attributes:
        text: without the prompt.
        token_ids: its tokens, the one that ended it and those of healed bytes included.
        finish_reason: "stop" or "length".
        stop_reason: the stop string or stop token id that ended it, if one did.
        logprobs: one entry a token of the text; empty when not asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class GenerationResult:
    """All answers to one prompt.

    Attributes:
        answers: ``SamplingParams.n`` of them.
        usage: what they cost; ``usage.cached_tokens`` of the prompt were not computed.
        layout: how the prompt was laid out; None for token ids.
    """

    answers: tuple[GeneratedAnswer, ...]
    usage: Usage
    layout: LayoutReport | None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.answers[0].text


class AnswerStream(Iterator[AnswerDelta]):
    """The answers to one prompt, piece by piece. Closing it ends the request."""

    def __init__(
        self, response: Response, deltas: Generator[tuple[int, AnswerDelta], None, None]
    ) -> None:
        self._response = response
        self._deltas = deltas

    def __next__(self) -> AnswerDelta:
        return next(self._deltas)[1]

    @property
    def usage(self) -> Usage:
        """What it has cost so far."""
        return self._response.usage

    @property
    def layout(self) -> LayoutReport | None:
        """How the prompt was laid out; None for token ids."""
        return self._response.prompt.report

    def close(self) -> None:
        """End the request; nothing more comes."""
        self._deltas.close()


class LLM:
    """A loaded model. Its prefix cache lives as long as it does, so edits of a text cost little.

    It computes only while it is called: the server's prefill in idle time has no counterpart here.

    Any thread may call it; all share the engine, whose steps they take turns in running.

    Attributes:
        fim_format: the model's FIM tokens and their order; None where it has none, and ``infill``
            sees the prefix alone.
        info: what computes, memory, load time, and ``info.context``, the most tokens of a prompt
            and its answer.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        backend: Backend = "auto",
        device: str | None = None,
        weights: WeightsOption = "auto",
        threads: int | None = None,
        context: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: KvDtype = "auto",
        adapter: str | Path | None = None,
        speculation: bool = True,
        fim_tokens: tuple[str, str, str] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Load a model, fetching it first if need be.

        Args:
            model: a path, ORG/NAME on the Hugging Face hub, or a name ``midfill models`` lists.
            backend, device, weights, threads, context, kv_memory, kv_dtype, speculation: see
                ``midfill.config.ModelOptions``.
            adapter: folder of a LoRA adapter to merge into it, or "none"; None takes the one that
                midfill ships for a model of this name, if it does.
            fim_tokens: the prefix, suffix and middle token, where midfill doesn't know them.
            progress: hears (stage, done, total).

        Raises:
            MidfillError: the model can't be found or loaded.
        """
        folder = resolve_adapter(model, None if adapter is None else str(adapter))
        options = ModelOptions(
            backend=backend,
            device=device,
            weights=weights,
            threads=threads,
            context=context,
            kv_memory=kv_memory,
            kv_dtype=kv_dtype,
            adapter=None if folder is None else str(folder),
            speculation=speculation,
        )
        started = time.perf_counter()
        checkpoint = open_model(resolve(model, progress), folder, weights)
        self.fim_format = fim_format(checkpoint, fim_tokens)
        self._tokenizer = checkpoint.tokenizer
        self._engine, self._runner, self.info = load_engine(checkpoint, options, progress, started)
        self._prompts = PromptEncoder(checkpoint, self.fim_format, self.info.context)
        self._numbers = itertools.count()
        self._mailboxes: dict[str, deque[EngineOutput]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model's threads; its memory goes with the object."""
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._tokenizer.vocab_size

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        with self._lock:
            return self._engine.stats()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
    ) -> list[GenerationResult]:
        """Go on from each prompt, all at once.

        Args:
            prompts: a text, texts, or lists of token ids. Special tokens in texts are parsed.
            sampling: how; greedy, up to 128 tokens, when None.

        Returns:
            One result a prompt, in order.

        Raises:
            InvalidRequestError: a prompt or a parameter that can't be.
        """
        items = [prompts] if isinstance(prompts, str) else prompts
        return self._results([self._prompt(item) for item in items], self._checked(sampling))

    def generate_stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> AnswerStream:
        """Go on from a prompt, piece by piece; closing the stream ends the request."""
        return self._stream(self._prompt(prompt), self._checked(sampling))

    def infill(
        self,
        prefix: str,
        suffix: str,
        sampling: SamplingParams | None = None,
        *,
        layout: RequestedLayout = "auto",
        document: str | None = None,
        context: Sequence[ContextFile] = (),
        path: str = "",
        repository: str = "",
        healing: bool = True,
    ) -> GenerationResult:
        """Fill in between two texts; special tokens in them stay text.

        Args:
            prefix, suffix: the text before and after the caret.
            sampling: how; greedy, up to 128 tokens, when None.
            layout, document, context, path, repository: see
                ``midfill.infill.request.InfillRequest``.
            healing: let the model write an unfinished last word again instead of going on right
                at the caret; the answer's text is what comes after the caret either way.

        Raises:
            InvalidRequestError: a text or a parameter that can't be.
        """
        request = InfillRequest(
            prefix=prefix,
            suffix=suffix,
            layout=layout,
            document=document,
            context=tuple(context),
            path=path,
            repository=repository,
        )
        sampling = self._checked(sampling)
        prompt = self._infill_prompt(request, healing, sampling)
        return self._results([prompt], sampling)[0]

    def infill_all(
        self,
        items: Sequence[InfillRequest | PromptLayout],
        sampling: SamplingParams | None = None,
        *,
        healing: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[GenerationResult]:
        """Fill in many holes, all at once.

        Args:
            items: each one a request for the planner, or a layout to be used as it is.
            sampling: how; greedy, up to 128 tokens, when None.
            healing: see ``infill``.
            progress: hears (answered, total).

        Returns:
            One result an item, in order.

        Raises:
            InvalidRequestError: an item or a parameter that can't be.
        """
        sampling = self._checked(sampling)
        prompts = [self._infill_prompt(item, healing, sampling) for item in items]
        return self._results(prompts, sampling, progress)

    def infill_stream(
        self,
        prefix: str,
        suffix: str,
        sampling: SamplingParams | None = None,
        *,
        layout: RequestedLayout = "auto",
        document: str | None = None,
        context: Sequence[ContextFile] = (),
        path: str = "",
        repository: str = "",
        healing: bool = True,
    ) -> AnswerStream:
        """Fill in between two texts, piece by piece; closing the stream ends the request."""
        request = InfillRequest(
            prefix=prefix,
            suffix=suffix,
            layout=layout,
            document=document,
            context=tuple(context),
            path=path,
            repository=repository,
        )
        sampling = self._checked(sampling)
        return self._stream(self._infill_prompt(request, healing, sampling), sampling)

    def _prompt(self, prompt: str | Sequence[int]) -> Prompt:
        with self._lock:
            if isinstance(prompt, str):
                return self._prompts.raw(prompt)
            return self._prompts.tokens(prompt)

    def _infill_prompt(
        self, item: InfillRequest | PromptLayout, healing: bool, sampling: SamplingParams
    ) -> Prompt:
        stops = sampling.stop_token_ids
        with self._lock:
            if isinstance(item, PromptLayout):
                return self._prompts.laid_out(item, healing=healing, stop_token_ids=stops)
            return self._prompts.infill(item, healing=healing, stop_token_ids=stops)

    def _checked(self, sampling: SamplingParams | None) -> SamplingParams:
        sampling = sampling or DEFAULT_SAMPLING
        check_sampling(sampling, self._tokenizer.vocab_size)
        return sampling

    def _results(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[GenerationResult]:
        responses = [Response(prompt, sampling, self._tokenizer) for prompt in prompts]
        deltas: list[list[list[AnswerDelta]]] = [[[] for _ in range(sampling.n)] for _ in prompts]
        finished = 0
        for place, delta in self._deltas(responses, sampling):
            deltas[place][delta.index].append(delta)
            if responses[place].finished:
                finished += 1
                if progress is not None:
                    progress(finished, len(prompts))
        return [
            GenerationResult(
                tuple(_join(answer) for answer in answers), response.usage, response.prompt.report
            )
            for response, answers in zip(responses, deltas, strict=True)
        ]

    def _stream(self, prompt: Prompt, sampling: SamplingParams) -> AnswerStream:
        response = Response(prompt, sampling, self._tokenizer)
        return AnswerStream(response, self._deltas([response], sampling))

    def _deltas(
        self, responses: Sequence[Response], sampling: SamplingParams
    ) -> Generator[tuple[int, AnswerDelta], None, None]:
        """Run prompts to their end, as (place in ``responses``, delta)."""
        places = {f"{next(self._numbers)}": place for place in range(len(responses))}
        try:
            for request_id, place in places.items():
                self._add(request_id, responses[place].prompt, sampling)
            while not all(response.finished for response in responses):
                for output in self._step_until_news(places):
                    place = places[output.request_id]
                    delta = responses[place].push(output)
                    if delta is not None:
                        yield place, delta
                        if delta.finish_reason is not None and output.finish_reason is None:
                            self._end(output.request_id, output.index)
                    if responses[place].finished:
                        self._drop(output.request_id)
        finally:
            for request_id in places:
                self._drop(request_id)

    def _add(self, request_id: str, prompt: Prompt, sampling: SamplingParams) -> None:
        with self._lock:
            self._engine.add(prompt.request(request_id, sampling))
            self._mailboxes[request_id] = deque()

    def _end(self, request_id: str, index: int) -> None:
        """End an answer: a stop string was found in it before the engine knows."""
        with self._lock:
            self._engine.cancel(request_id, index)

    def _drop(self, request_id: str) -> None:
        """End a request, wherever it is."""
        with self._lock:
            if self._mailboxes.pop(request_id, None) is not None:
                self._engine.cancel(request_id)

    def _step_until_news(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Outputs for these requests; runs a step if none has come yet.

        A step also brings outputs for other callers, which are put where they look for them.
        """
        with self._lock:
            news = self._collect(request_ids)
            if not news:
                for output in self._engine.step():
                    mailbox = self._mailboxes.get(output.request_id)
                    if mailbox is not None:
                        mailbox.append(output)
                news = self._collect(request_ids)
            return news

    def _collect(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        news: list[EngineOutput] = []
        for request_id in request_ids:
            mailbox = self._mailboxes.get(request_id)
            if mailbox:
                news += mailbox
                mailbox.clear()
        return news


def _join(deltas: Sequence[AnswerDelta]) -> GeneratedAnswer:
    """All of an answer from its pieces."""
    return GeneratedAnswer(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=deltas[-1].finish_reason or "",
        stop_reason=deltas[-1].stop_reason,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )
