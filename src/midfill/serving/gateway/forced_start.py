"""Whether an upstream can be made to begin an answer with a given text.

Then the half word that was taken off a prompt costs no second request where the model would go on
otherwise. vLLM and SGLang take a regular expression for the whole answer; but some versions then
let no token end it but the tokenizer's own end, and the answers of FIM models end with others. No
version number tells, so it is tried out.
"""

import logging
from contextlib import aclosing

from midfill.engine.request import EngineSamplingParams
from midfill.errors import MidfillError
from midfill.serving.gateway.calls import Call
from midfill.serving.gateway.upstream import Upstream

_log = logging.getLogger(__name__)

_START = "Qz"  # no model writes it unasked
_MAX_TOKENS = 8
_PREFERENCE = 100.0  # logit bias: as good as certain, where the token is allowed


async def forces_start(upstream: Upstream, end_token: int | None) -> bool:
    """Return whether an upstream forces a start and then lets any token end the answer.

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
            max_tokens=_MAX_TOKENS,
            temperature=0.0,
            logit_bias={end_token: _PREFERENCE},
            stop_token_ids=(end_token,),
        ),
        begins_with=_START,
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
    return text.startswith(_START) and reason == "stop"
