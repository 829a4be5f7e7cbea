"""Which tokenizer and FIM format prompts are made with, for a model that other servers run."""

import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat, custom_format, find_format
from midfill.models.checkpoints.model_record import folder_metadata
from midfill.models.tokens.huggingface_tokenizer import load_folder, read_json
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.serving.gateway.calls import UpstreamFailedError
from midfill.serving.gateway.character_tokenizer import CharacterTokenizer
from midfill.serving.gateway.discovery import ServedModel, special_tokens
from midfill.serving.gateway.model_names import tokens_by_name
from midfill.serving.gateway.options import GatewayOptions
from midfill.serving.gateway.spelled_tokens import family_tokens
from midfill.serving.gateway.upstream import Upstream

_log = logging.getLogger(__name__)

_TOKENIZER_FILE = "tokenizer.json"


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
    by_name = {text: tokens[text] for text in tokens_by_name(model.name) if text in tokens}
    return find_format("", by_name, metadata) or find_format("", tokens, metadata)


def _local_folder(upstream: Upstream, model: ServedModel) -> Path | None:
    """Return the model's folder, if the server is on this machine and names one."""
    if not model.root or not _is_local(upstream.address):
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


def _is_local(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
