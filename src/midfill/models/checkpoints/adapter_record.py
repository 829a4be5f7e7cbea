"""AdapterRecord: midfill.json, what midfill notes beside an adapter that PEFT's files don't say."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from midfill.config import FimTokens
from midfill.errors import CheckpointError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_record import RECORD_FORMAT, read_needs
from midfill.models.checkpoints.quantized_update import DEFAULT_ROUNDING, Rounding
from midfill.models.tokens.huggingface_tokenizer import read_json


@dataclass(frozen=True)
class AdapterRecord:
    """The content of midfill.json; the defaults hold where the file or a field is missing.

    Attributes:
        fim_tokens: the sentinels that the adapter taught its model; None where it doesn't say.
        stop_tokens: special tokens that end an infilled answer.
        fragments: whether it was trained on text tokenised in fragments (EFIM).
        base_digest: ``Checkpoint.content_digest`` of the base; None where it doesn't say.
        rounding: how a merge into quantised weights is rounded. An adapter that was trained through
            that rounding depends on it.
        needs: what it says about prompts and answers, as the adapted model's metadata.
    """

    fim_tokens: FimTokens | None = None
    stop_tokens: tuple[str, ...] = ()
    fragments: bool = False
    base_digest: str | None = None
    rounding: Rounding = DEFAULT_ROUNDING
    needs: Mapping[str, object] = field(default_factory=dict)


def read_record(path: Path, base: Checkpoint) -> AdapterRecord:
    """Read midfill.json, and check it against the base.

    Args:
        path: the file; it may be missing.
        base: only its tokenizer and digest are looked at.

    Raises:
        CheckpointError: the file is malformed, or the adapter is for another base.
    """
    record = read_json(path, optional=True)
    if not record:
        return AdapterRecord()
    if record.get("format") != RECORD_FORMAT:
        raise CheckpointError(
            f"{path}: format {record.get('format')!r} is not known; this midfill reads "
            f"{RECORD_FORMAT}"
        )
    digest = _checked_digest(path, record.get("base"), base)
    fragments = record.get("fragments", False)
    if not isinstance(fragments, bool):
        raise CheckpointError(f"{path}: 'fragments' must be true or false")
    rounding = record.get("rounding", DEFAULT_ROUNDING)
    if rounding not in get_args(Rounding):
        raise CheckpointError(
            f"{path}: 'rounding' must be one of {', '.join(get_args(Rounding))}, not {rounding!r}"
        )
    fim_tokens, stop_tokens = _read_fim(path, record.get("fim"), base)
    return AdapterRecord(
        fim_tokens,
        stop_tokens,
        fragments,
        digest,
        cast(Rounding, rounding),
        read_needs(path, record),
    )


def _checked_digest(path: Path, trained_on: object, base: Checkpoint) -> str | None:
    """Return the digest of the base the adapter was trained on, which must be this one."""
    if trained_on is None:
        return None
    if not isinstance(trained_on, Mapping) or not isinstance(trained_on.get("digest"), str):
        raise CheckpointError(f"{path}: 'base' must be an object with a 'digest'")
    digest = str(trained_on["digest"])
    if digest != base.content_digest:
        named = trained_on.get("name") or "another model"
        raise CheckpointError(
            f"{path.parent}: was trained on {named} (digest {digest[:12]}), not on {base.path} "
            f"(digest {base.content_digest[:12]}); serve that model, or this one with "
            "--adapter none"
        )
    return digest


def _read_fim(
    path: Path, fim: object, base: Checkpoint
) -> tuple[FimTokens | None, tuple[str, ...]]:
    """Return the sentinels and the stop tokens."""
    if fim is None:
        return None, ()
    fields = dict(fim) if isinstance(fim, Mapping) else {}
    stop = fields.get("stop", [])
    texts = [fields.get("prefix"), fields.get("suffix"), fields.get("middle")]
    texts += stop if isinstance(stop, list) else [stop]
    known = base.tokenizer.special_tokens
    for text in texts:
        if not isinstance(text, str):
            raise CheckpointError(
                f"{path}: 'fim' must name the tokens 'prefix', 'suffix', 'middle' and a list 'stop'"
            )
        if text not in known:
            raise CheckpointError(
                f"{path}: the FIM token {text!r} is not a special token of {base.path}"
            )
    if len(set(texts[:3])) < 3:
        raise CheckpointError(f"{path}: the FIM tokens prefix, suffix and middle must differ")
    prefix, suffix, middle, *stops = (str(text) for text in texts)
    return FimTokens(prefix, suffix, middle), tuple(stops)
