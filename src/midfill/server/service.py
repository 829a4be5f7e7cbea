"""ModelService: one served model; what every dialect calls to get text for prompts."""

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from midfill.engine.client import EngineClient
from midfill.errors import InvalidRequestError
from midfill.frontend.answer import AnswerDelta
from midfill.frontend.prompts import Prompt, PromptEncoder
from midfill.frontend.response import Response, Usage
from midfill.frontend.sampling import SamplingParams
from midfill.infill.formats import FimFormat
from midfill.server.errors import ApiError
from midfill.server.metrics import Metrics
from midfill.tokens.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

T = TypeVar("T")


class ModelService:
    """One model behind all dialects.

    Attributes:
        name: what clients call the model.
        created: when it was loaded, in seconds since 1970.
        engine: that runs it.
        tokenizer: the model's.
        metrics: of this server.
        max_body_bytes: longest request body.
    """

    def __init__(
        self,
        name: str,
        engine: EngineClient,
        tokenizer: Tokenizer,
        prompts: PromptEncoder,
        max_body_bytes: int,
        *,
        idle_prefill: bool = True,
        stream_interval: float = 0.0,
    ) -> None:
        """Serve ``engine``.

        Args:
            prompts: the encoder of the model's prompts.
            idle_prefill: compute expected prompts while the engine has nothing to do.
            stream_interval: seconds for which tokens of a streamed answer may be held back.

        The other arguments are the attributes'.
        """
        self.name = name
        self.created = int(time.time())
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_body_bytes = max_body_bytes
        self.metrics = Metrics(name, engine)
        self._prompts = prompts
        # One thread: the encoder remembers documents. A long text must not stop the event loop.
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="prompt encoding")
        self._idle_prefill = idle_prefill
        self._stream_interval = stream_interval
        self._prefills: dict[str, asyncio.Task[None]] = {}  # by document

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self._prompts.context

    @property
    def fim_format(self) -> FimFormat | None:
        """The model's FIM tokens and their order; None where none are known."""
        return self._prompts.format

    def check_model(self, model: str | None) -> None:
        """Refuse requests for another model; None asks for whatever is served.

        Raises:
            ApiError: 404.
        """
        if model is not None and model != self.name:
            raise ApiError(
                404, f"there is no model {model!r}; this server has {self.name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def encode(self, make: Callable[[PromptEncoder], T]) -> T:
        """Make prompts on the encoding thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, make, self._prompts)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, tenant: str, *, streamed: bool
    ) -> "Generation":
        """Answers to some prompts; the engine starts when they are asked for.

        Of answers that are not ``streamed``, nobody reads anything before their end.
        """
        interval = self._stream_interval if streamed else math.inf
        return Generation(self, prompts, sampling, tenant, interval)

    def prepare_next(self, document: str, tenant: str) -> None:
        """Have the prompt computed that this document will probably ask for next.

        It waits until the engine is idle, and changes nothing but how long the next answer takes;
        what was being prepared for the document before is given up.
        """
        if not self._idle_prefill:
            return
        self._give_up_prefill(document)
        task = asyncio.create_task(self._prefill(document, tenant), name="idle prefill")
        self._prefills[document] = task
        task.add_done_callback(lambda _: self._forget_prefill(document, task))

    def _give_up_prefill(self, document: str) -> None:
        task = self._prefills.pop(document, None)
        if task is not None:
            task.cancel()

    def _forget_prefill(self, document: str, task: "asyncio.Task[None]") -> None:
        if self._prefills.get(document) is task:
            del self._prefills[document]

    async def _prefill(self, document: str, tenant: str) -> None:
        try:
            expected = await self.encode(lambda encoder: encoder.expected_prompt(document))
            if expected is None:
                return
            request_id = f"prefill-{uuid.uuid4().hex}"
            with self.engine.submit(expected.request(request_id, tenant)) as outputs:
                ended = {output.finish_reason async for output in outputs}
            if "stop" in ended:
                await self.encode(lambda encoder: encoder.record_computed(expected))
        except Exception as error:
            # Nobody asked for it, so nobody hears of it.
            _log.debug("idle prefill failed: %s", error)

    def close(self) -> None:
        """End idle prefills and the encoding thread."""
        for document in list(self._prefills):
            self._give_up_prefill(document)
        self._encoding.shutdown(cancel_futures=True)


class Generation:
    """The answers to one API request, in the making.

    Attributes:
        responses: one a prompt.
    """

    def __init__(
        self,
        service: ModelService,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        tenant: str,
        stream_interval: float,
    ) -> None:
        self._service = service
        identity = uuid.uuid4().hex
        self._tenant = tenant
        self._requests = [
            prompt.request(f"{identity}-{index}", sampling, tenant, stream_interval)
            for index, prompt in enumerate(prompts)
        ]
        self.responses = [Response(prompt, sampling, service.tokenizer) for prompt in prompts]
        self._answers = sampling.n
        self._started = time.perf_counter()
        self._last_token: dict[tuple[int, int], float] = {}

    @property
    def usage(self) -> Usage:
        """The cost of all prompts so far."""
        return sum((response.usage for response in self.responses), Usage())

    async def deltas(self) -> AsyncGenerator[tuple[int, AnswerDelta], None]:
        """What the answers grow by, as (prompt index, delta), until all are complete.

        Closing it early ends the requests in the engine.

        Raises:
            InvalidRequestError: the engine can never run one of the prompts.
            GenerationError: the engine gave up on one.
            EngineDeadError: the engine is not there.
        """
        places = {request.request_id: i for i, request in enumerate(self._requests)}
        complete = 0
        try:
            with self._service.engine.submit(*self._requests) as outputs:
                async for output in outputs:
                    place = places[output.request_id]
                    response = self.responses[place]
                    if output.token_ids:
                        self._time(place, output.index, len(output.token_ids))
                    delta = response.push(output)
                    if delta is None:
                        continue
                    if delta.finish_reason is not None:
                        if output.finish_reason is None:
                            # A stop string ends an answer before the engine knows.
                            outputs.cancel(output.request_id, output.index)
                        complete += 1
                        self._service.metrics.answer_finished(delta.finish_reason)
                        if response.finished:
                            self._count(response)
                    yield place, delta
            for response in self.responses:
                report = response.prompt.report
                if report is not None and report.document is not None:
                    self._service.prepare_next(report.document, self._tenant)
        finally:
            for _ in range(len(self._requests) * self._answers - complete):
                self._service.metrics.answer_finished("abort")

    def _time(self, place: int, index: int, tokens: int) -> None:
        """Note that so many tokens of an answer came."""
        now = time.perf_counter()
        metrics = self._service.metrics
        before = self._last_token.get((place, index))
        if before is not None:
            metrics.next_tokens(now - before, tokens)
        elif index == 0:
            metrics.first_token(now - self._started)
        self._last_token[place, index] = now

    def _count(self, response: Response) -> None:
        usage = response.usage
        self._service.metrics.request_finished(
            time.perf_counter() - self._started,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
        )


def most_choices(prompts: int, answers: int, limit: int = 1024) -> None:
    """Refuse requests for an absurd number of answers.

    Raises:
        InvalidRequestError: more than ``limit``.
    """
    if prompts * answers > limit:
        raise InvalidRequestError(
            f"{prompts} prompts with {answers} answers each are too many;"
            f" at most {limit} answers a request",
            param="prompt" if prompts > answers else "n",
        )
