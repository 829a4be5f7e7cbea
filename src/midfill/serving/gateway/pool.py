"""UpstreamPool: the upstreams, which of them may be used, and which of them gets a request."""

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from midfill.engine.request import EngineSamplingParams
from midfill.engine.routing import choose
from midfill.errors import MidfillError, QueueFullError, UpstreamError
from midfill.serving.gateway.discovery import discover, find_models, join_names
from midfill.serving.gateway.options import ApiName
from midfill.serving.gateway.upstream import Upstream
from midfill.serving.gateway.upstream_api import Call, UpstreamFailedError

_log = logging.getLogger(__name__)

HEALTH_SECONDS = 5.0  # between two checks of an upstream
_SLOW_CHECKS = 3  # in a row, after which a server is not only busy

_TRIAL_START = "Qz"  # no model writes it unasked
_TRIAL_TOKENS = 8
_TRIAL_BIAS = 100.0  # logit bias: as good as certain, where the token is allowed


async def forces_start(upstream: Upstream, end_token: int | None) -> bool:
    """Return whether an upstream forces a start and then lets any token end the answer.

    Then the half word that was taken off a prompt costs no second request where the model would
    go on otherwise. vLLM and SGLang take a regular expression for the whole answer; but some
    versions then let no token end it but the tokenizer's own end, and the answers of FIM models
    end with others. No version number tells, so it is tried out.

    Args:
        upstream: the server.
        end_token: a token that ends answers and that is not the tokenizer's own end; None if no id
            of one is known.
    """
    if upstream.kind == "llama.cpp":
        return True  # its grammars allow all tokens that end an answer
    if upstream.kind not in ("vllm", "sglang") or end_token is None:
        return False
    call = Call(
        model=upstream.model,
        prompt="1",
        sampling=EngineSamplingParams(
            max_tokens=_TRIAL_TOKENS,
            temperature=0.0,
            logit_bias={end_token: _TRIAL_BIAS},
            stop_token_ids=(end_token,),
        ),
        begins_with=_TRIAL_START,
    )
    text, reason = "", None
    try:
        async with aclosing(upstream.pieces(call, short=True)) as pieces:
            async for piece in pieces:
                text += piece.text
                reason = piece.finish_reason or reason
    except MidfillError as error:
        _log.info("%s can't be made to begin answers with a text: %s", upstream.address, error)
        return False
    return text.startswith(_TRIAL_START) and reason == "stop"


class UpstreamPool:
    """All upstreams. They serve the same model.

    Args:
        upstreams: as they were discovered.
        api: which servers later ones are.
        model: the model that all serve.
        end_token: what ``forces_start`` tries upstreams with.

    Attributes:
        upstreams: those in use, and those that are draining.
    """

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        api: ApiName = "auto",
        model: str | None = None,
        end_token: int | None = None,
    ) -> None:
        self.upstreams = list(upstreams)
        self._api: ApiName = api
        self._model = model
        self._end_token = end_token
        self._known = {each.address: each.fault for each in upstreams}

    @property
    def ready(self) -> bool:
        """Whether any upstream may be used."""
        return any(each.usable for each in self.upstreams)

    @property
    def retry_after(self) -> int:
        """Seconds until it makes sense to try again."""
        waits = [each.breaker.retry_after for each in self.upstreams if not each.draining]
        return max(1, math.ceil(min(waits, default=1.0)))

    @property
    def max_answers(self) -> int:
        """Maximum number of answers that every upstream gives to one call."""
        return min(each.api.max_answers for each in self.upstreams)

    def choose(self, document: str, tried: Iterable[Upstream] = ()) -> Upstream | None:
        """Return the upstream for a request; None if there is no other one.

        Args:
            document: ``engine.routing.document_key`` of its document.
            tried: those that have failed on the request.
        """
        given_up = set(tried)
        usable = [each for each in self.upstreams if each.usable and each not in given_up]
        return choose(document, usable)

    def error(self, failed: Sequence[tuple[Upstream, UpstreamFailedError]]) -> Exception:
        """Return the error of a request that no upstream has answered.

        Args:
            failed: those that were tried, and why they failed.
        """
        if failed and all(failure.busy for _, failure in failed):
            upstream, failure = failed[-1]
            return QueueFullError(f"{upstream.address} {failure}", retry_after=1)
        if not failed:
            return UpstreamError(
                f"no server behind the gateway can be used now: {self.describe_faults()}",
                retry_after=self.retry_after,
            )
        reasons = "; ".join(f"{upstream.address} {failure}" for upstream, failure in failed)
        return UpstreamError(reasons, retry_after=self.retry_after)

    def describe_faults(self) -> str:
        """Return what is the matter with each upstream, on one line."""
        return "; ".join(f"{each.address} {_state(each)}" for each in self.upstreams) or "none"

    def replace(self, upstreams: Sequence[Upstream]) -> None:
        """Use these from now on. Those that are left out finish what they have begun."""
        kept = {each.address for each in upstreams}
        leaving = [each for each in self.upstreams if each.address not in kept and each.running]
        for each in leaving:
            each.draining = True
        self.upstreams = [*upstreams, *leaving]

    async def try_out(self) -> None:
        """Find out what the upstreams that have answered can do."""
        await asyncio.gather(*(self._try_out(each) for each in self.upstreams if each.known))

    async def _try_out(self, upstream: Upstream) -> None:
        upstream.forces_start = await forces_start(upstream, self._end_token)

    async def watch(self) -> None:
        """Check the upstreams' health again and again."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Check all upstreams' health once, and log what has changed."""
        self.upstreams = [each for each in self.upstreams if each.running or not each.draining]
        await asyncio.gather(*(self._check(each) for each in self.upstreams))

    async def _check(self, upstream: Upstream) -> None:
        try:
            await upstream.check_health()
            if not upstream.known:
                await discover(upstream, self._api, self._model)
                await self._try_out(upstream)
            models = await find_models(upstream)
            if upstream.model not in [model.name for model in models]:
                raise UpstreamFailedError(
                    f"serves {join_names(models)} now instead of {upstream.model}"
                )
            upstream.fault, upstream.slow_checks = None, 0
        except UpstreamFailedError as failure:
            upstream.slow_checks += failure.busy
            if failure.busy and upstream.fault is None and upstream.slow_checks < _SLOW_CHECKS:
                return
            upstream.fault = str(failure)
        if self._known.get(upstream.address) != upstream.fault:
            self._known[upstream.address] = upstream.fault
            if upstream.fault is None:
                _log.warning("%s is well again", upstream.address)
            else:
                _log.warning("%s %s; it gets no requests", upstream.address, upstream.fault)


def _state(upstream: Upstream) -> str:
    if upstream.fault is not None:
        return upstream.fault
    if upstream.draining:
        return "is draining"
    return "has failed several times" if not upstream.breaker.allows else "is well"
