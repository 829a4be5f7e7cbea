"""Discovery: what an upstream is, which model it serves, and which special tokens that has."""

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midfill.config import FimTokens
from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat, custom_format, find_format
from midfill.models.checkpoints.model_record import folder_metadata
from midfill.models.tokens.huggingface_tokenizer import load_folder, read_json
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.serving.gateway.character_tokenizer import (
    CharacterTokenizer,
    family_tokens,
    tokens_by_name,
)
from midfill.serving.gateway.options import ApiName, GatewayOptions
from midfill.serving.gateway.upstream import Kind, Upstream
from midfill.serving.gateway.upstream_api import UpstreamFailedError, error_text
from midfill.system.machine import is_local

_OWNERS: Mapping[str, Kind] = {
    "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "midfill": "midfill",
}  # fmt: skip
_AT_ONCE = 8  # requests to one upstream
_OTHER_BYTES, _MAX_ID_BYTES = 65_536, 64  # of an answer of ids; vLLM may name their texts, too
_MAX_NAME = 1000  # characters of a model's name
_BLOCK = "block_size="

_log = logging.getLogger(__name__)

_TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that an upstream lists.

    Attributes:
        name: what it calls it.
        context: maximum tokens of a prompt and its answer; None if it doesn't say.
        root: where the model was loaded from, or another name; "" if it doesn't say.
        owner: what the upstream calls itself.
        fim_tokens: its PRE, SUF and MID tokens, where a midfill tells them.
    """

    name: str
    context: int | None = None
    root: str = ""
    owner: str = ""
    fim_tokens: FimTokens | None = None


async def find_models(upstream: Upstream) -> list[ServedModel]:
    """Return the models that an upstream lists.

    Raises:
        UpstreamFailedError: it can't be reached, or its list makes no sense.
    """
    body = await upstream.ask("/v1/models")
    if body is None:
        raise UpstreamFailedError("has no /v1/models; is it an OpenAI-style server?")
    entries = body.get("data") if isinstance(body, Mapping) else None
    if not isinstance(entries, list):
        raise UpstreamFailedError("answers /v1/models with something else than a list of models")
    return [
        ServedModel(
            entry["id"],
            _number(entry.get("max_model_len")),
            _text(entry.get("root")),
            _text(entry.get("owned_by")).lower(),
            _fim_tokens(entry.get("midfill")),
        )
        for entry in entries
        if isinstance(entry, Mapping) and 0 < len(_text(entry.get("id"))) <= _MAX_NAME
    ]


async def discover(upstream: Upstream, api: ApiName, model: str | None) -> ServedModel:
    """Find out what an upstream is, and record it there.

    Args:
        upstream: the server.
        api: which one it is; "auto" finds out.
        model: the model to use; None takes the only one, or the first.

    Returns:
        Its model.

    Raises:
        UpstreamFailedError: it can't be reached, speaks no known API, or lacks the model.
    """
    models = await find_models(upstream)
    found = [each for each in models if model in (None, each.name)]
    if not found:
        raise UpstreamFailedError(f"serves {join_names(models)}, not {model}")
    chosen = found[0]
    upstream.model = chosen.name
    upstream.known = True
    upstream.kind = _OWNERS.get(chosen.owner, "openai") if api == "auto" else api
    if upstream.kind == "llama.cpp":
        chosen = await _read_props(upstream, chosen)
    if upstream.kind == "vllm":
        upstream.block_tokens = await _block_size(upstream)
    return chosen


def join_names(models: Sequence[ServedModel]) -> str:
    """Return the names of models for a message; of many the first."""
    return error_text(", ".join(model.name for model in models)) or "no model"


async def token_ids(
    upstream: Upstream, text: str, *, special: bool, bos: bool = False
) -> list[int]:
    """Have an upstream tokenise a text.

    Args:
        upstream: the server.
        text: the text.
        special: whether special tokens in it are parsed; some servers always do.
        bos: whether to add what begins a sequence.

    Raises:
        UpstreamFailedError: it can't.
    """
    if upstream.kind in ("llama.cpp", "midfill"):
        body: dict[str, Any] = {"content": text, "add_special": bos, "parse_special": special}
    else:
        body = {"model": upstream.model, "prompt": text, "add_special_tokens": bos}
    most = _OTHER_BYTES + _MAX_ID_BYTES * len(text.encode())
    answer = await upstream.ask("/tokenize", body, most)
    ids = answer.get("tokens") if isinstance(answer, Mapping) else None
    if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise UpstreamFailedError("can't tokenise")
    return ids


async def special_tokens(upstream: Upstream, texts: Iterable[str]) -> dict[str, int]:
    """Return those of the texts that are tokens of an upstream's model, and their ids.

    Raises:
        UpstreamFailedError: it can't tokenise.
    """
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def ids_of(text: str) -> tuple[str, list[int]]:
        async with at_once:
            return text, await token_ids(upstream, text, special=True)

    # Alone at first: an upstream that can't is asked once.
    first, *others = [*texts]
    found = [await ids_of(first), *await asyncio.gather(*map(ids_of, others))]
    return {text: ids[0] for text, ids in found if len(ids) == 1}


async def _read_props(upstream: Upstream, model: ServedModel) -> ServedModel:
    """Return what llama.cpp says of its model; its slots are recorded."""
    props = await upstream.ask("/props")
    if not isinstance(props, Mapping):
        return model
    upstream.slots = _number(props.get("total_slots")) or upstream.slots
    settings = props.get("default_generation_settings")
    context = _number(settings.get("n_ctx")) if isinstance(settings, Mapping) else None
    return dataclasses.replace(model, context=context or model.context)


async def _block_size(upstream: Upstream) -> int | None:
    """Return the tokens of a block of vLLM's cache, which its metrics tell."""
    text = await upstream.text("/metrics")
    _, found, rest = text.partition(_BLOCK)
    digits = rest[1:].partition('"')[0]
    return int(digits) if found and digits.isdecimal() and len(digits) < 9 else None


def _fim_tokens(card: object) -> FimTokens | None:
    """Return the sentinels that a midfill's card of its model names."""
    named = card.get("fim_tokens") if isinstance(card, Mapping) else None
    if not isinstance(named, list) or len(named) != 3:
        return None
    return FimTokens(*map(str, named))


def _number(value: object) -> int | None:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31
    return value if fits and isinstance(value, int) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


@dataclass(frozen=True)
class DescribedUpstream:
    """A model for ``PromptEncoder``, and how its prompts are sent.

    Attributes:
        path: where its description comes from, for errors.
        metadata: see ``Checkpoint``.
        tokenizer: the model's own, or characters.
        format: its FIM format; None if it has none that is known.
        tokenizes: whether its servers can be asked for token ids.
    """

    path: Path
    tokenizer: Tokenizer
    format: FimFormat | None
    tokenizes: bool = False
    metadata: Mapping[str, object] = field(default_factory=dict)

    @property
    def end_token(self) -> int | None:
        """The model's id of a sentinel, which ends its answers; None if none is known."""
        if self.format is None:
            return None
        found = (self.format.middle or self.format.suffix).token_id
        if isinstance(self.tokenizer, CharacterTokenizer):
            known, _ = self.tokenizer.model_ids([found])
            return known[0] if known else None
        return found

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts are made of the model's own tokens."""
        return not isinstance(self.tokenizer, CharacterTokenizer)


async def describe(
    upstream: Upstream, model: ServedModel, options: GatewayOptions
) -> DescribedUpstream:
    """Describe the model of an upstream.

    Raises:
        MidfillError: the tokenizer can't be loaded, or lacks the FIM tokens that are named.
    """
    folder = options.tokenizer or _local_folder(upstream, model)
    if folder is not None:
        if folder.name == _TOKENIZER_FILE:
            folder = folder.parent
        tokenizer = load_folder(folder)
        settings = read_json(folder / "tokenizer_config.json", optional=True)
        metadata = {**settings, **folder_metadata(folder)}
        format = _find(tokenizer.special_tokens, metadata, options, model)
        return DescribedUpstream(folder, tokenizer, format, metadata=metadata)
    named = tuple(options.fim_tokens or model.fim_tokens or ())
    known: Mapping[str, int | None]
    try:
        known = await special_tokens(upstream, (*named, *family_tokens()))
        tokenizes = True
    except UpstreamFailedError:
        known, tokenizes = dict.fromkeys((*named, *tokens_by_name(model.name))), False
    characters = CharacterTokenizer(known)
    format = _find(characters.special_tokens, {}, options, model)
    return DescribedUpstream(Path(model.name), characters, format, tokenizes)


def _find(
    tokens: Mapping[str, int],
    metadata: Mapping[str, object],
    options: GatewayOptions,
    model: ServedModel,
) -> FimFormat | None:
    named = options.fim_tokens or model.fim_tokens
    if named is not None:
        return custom_format(*named, tokens)
    metadata = {"general.name": model.name, **metadata}
    by_name = {text: tokens[text] for text in tokens_by_name(model.name) if text in tokens}
    return find_format("", by_name, metadata) or find_format("", tokens, metadata)


def _local_folder(upstream: Upstream, model: ServedModel) -> Path | None:
    """Return the model's folder, if the server is on this machine and names one."""
    if not model.root or not is_local(upstream.address):
        return None
    folder = Path(model.root)
    try:
        if not folder.is_absolute() or not (folder / _TOKENIZER_FILE).is_file():
            return None
        load_folder(folder)
    except (OSError, MidfillError) as error:
        _log.warning("the tokenizer of %s can't be used: %s", upstream.address, error)
        return None
    return folder
