"""What llama.cpp tells of its model: GET /props and /slots, POST /tokenize and /detokenize."""

from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.errors import InvalidRequestError
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.llama_cpp import error_body
from midfill.serving.server.responses import ApiError
from midfill.serving.server.service import ModelService
from midfill.version import __version__

MAX_TOKENIZED_BYTES = 1 << 20
_PART = 4096  # tokens


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]


def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
    """Return the router of the endpoints."""
    router = APIRouter(dependencies=[Depends(tenant_of)])
    tokenizer, limit = service.tokenizer, service.max_body_bytes

    @router.get("/props")
    async def props() -> Response:
        """Describe the server and its model."""
        return json_response(
            {
                "default_generation_settings": {**_slot(service, 0), "params": {}},
                "total_slots": _slot_count(service),
                "model_alias": service.name,
                "model_path": service.name,
                "chat_template": tokenizer.chat_template or "",
                "modalities": {"vision": False, "audio": False},
                "bos_token": _name(tokenizer, tokenizer.bos_token_id),
                "eos_token": _name(tokenizer, next(iter(tokenizer.eos_token_ids), None)),
                "build_info": f"midfill {__version__}",
                "is_sleeping": False,
            }
        )

    @router.get("/slots")
    async def slots(fail_on_no_slot: str | None = None) -> Response:
        """List as many slots as answers can be generated at a time, busy ones first.

        They are no parts of the cache: midfill keeps one cache for all requests.
        """
        count = _slot_count(service)
        if fail_on_no_slot and service.engine.stats.running >= count:
            raise ApiError(503, "no slot available")
        return json_response([_slot(service, number) for number in range(count)])

    @router.post("/tokenize", openapi_extra=body_reference(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        """Turn a text into tokens."""
        body = await read_json(request, TokenizeBody, limit, any_content_type=True)
        size = len(body.content.encode(errors="replace"))
        if size > MAX_TOKENIZED_BYTES:
            raise InvalidRequestError.of_field(
                "content", f"has {size} bytes; at most {MAX_TOKENIZED_BYTES} are accepted"
            )
        content = await service.call_apart(tokenized, tokenizer, body, service.raw_bos)
        return Response(content, media_type="application/json")

    @router.post("/detokenize", openapi_extra=body_reference(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        """Turn tokens into their text; special tokens show as their names."""
        body = await read_json(request, DetokenizeBody, limit, any_content_type=True)
        content = await service.call_apart(detokenized, tokenizer, body.tokens)
        return Response(content, media_type="application/json")

    return router


def tokenized(tokenizer: Tokenizer, body: TokenizeBody, raw_bos: int | None) -> bytes:
    """Return the answer of /tokenize, put together from short pieces; see ``call_apart``."""
    ids = tokenizer.encode(body.content, parse_special=body.parse_special is not False)
    if body.add_special and raw_bos is not None:
        ids = [raw_bos, *ids]
    parts = []
    for start in range(0, len(ids), _PART):
        part: list[object] = list(ids[start : start + _PART])
        if body.with_pieces:
            part = [{"id": i, "piece": _piece(tokenizer, i)} for i in ids[start : start + _PART]]
        parts.append(msgspec.json.encode(part)[1:-1])
    return b'{"tokens":[' + b",".join(parts) + b"]}"


def detokenized(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    """Return the answer of /detokenize.

    Raises:
        InvalidRequestError: the model doesn't have one of the tokens.
    """
    parts = []
    for token_id in ids:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise InvalidRequestError(
                f"tokens holds {token_id}; this model's ids go from 0 to"
                f" {tokenizer.vocab_size - 1}",
                param="tokens",
            )
        parts.append(_bytes(tokenizer, token_id))
    text = b"".join(parts).decode(errors="replace")
    return msgspec.json.encode({"content": text})


def _slot_count(service: ModelService) -> int:
    return 1 if service.engine.info is None else service.engine.info.max_running


def _slot(service: ModelService, number: int) -> dict[str, Any]:
    return {
        "id": number,
        "n_ctx": service.context,
        "speculative": False,
        "is_processing": number < service.engine.stats.running,
    }


def _name(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    return tokenizer.token_bytes(token_id) or tokenizer.token_text(token_id).encode()


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """Return a token's text, or its bytes where they are only a part of a character."""
    raw = _bytes(tokenizer, token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


DIALECT = Dialect(routes=routes, bodies=(TokenizeBody, DetokenizeBody), error_body=error_body)
