"""The tokenizer of a Hugging Face folder: tokenizer.json and the files beside it.

tokenizer.json defines the ids. tokenizer_config.json, generation_config.json and config.json say
which tokens begin and end a sequence.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from midfill.errors import CheckpointError
from midfill.models.tokens.tokenizer import Tokenizer

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape that may be half a character


def load_folder(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Raises:
        CheckpointError: tokenizer.json is missing or a file is broken.
    """
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    backend = _load_backend(folder / "tokenizer.json")
    _add_listed_tokens(backend, settings, folder)
    bos = _token_id(backend, settings.get("bos_token"))
    if bos is None:
        bos = next(_ids_in_config(folder, "bos_token_id"), None)
    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bos is not None and backend.encode("a").ids[:1] == [bos]
    eos = _token_id(backend, settings.get("eos_token"))
    return Tokenizer(
        backend,
        bos_token_id=bos,
        add_bos=adds_bos,
        eos_token_ids=[
            *([] if eos is None else [eos]),
            *_ids_in_config(folder, "eos_token_id"),
        ],
        chat_template=_chat_template(folder, settings),
    )


def read_json(path: Path, *, optional: bool = False) -> dict[str, object]:
    """Read a JSON object from a file; {} for a missing file if it is optional.

    Its texts are whole Unicode characters, so that they can be tokenised and written anywhere.

    Raises:
        CheckpointError: the file is missing, unreadable or no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        if optional:
            return {}
        raise CheckpointError(f"{path}: the file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return value


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path}: the file is missing; save the model's fast tokenizer there "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics on some files, which is no Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from None


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, settings: Mapping[str, object], folder: Path
) -> None:
    """Add the tokens that only tokenizer_config.json lists, as transformers does."""
    listed = settings.get("added_tokens_decoder")
    known_texts = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = listed if isinstance(listed, Mapping) else {}
    for key in sorted((key for key in entries if key.isdecimal()), key=int):
        entry = entries[key]
        text = _content(entry)
        if text is None or text in known_texts:
            continue
        special = isinstance(entry, Mapping) and entry.get("special") is True
        backend.add_tokens([AddedToken(text, normalized=False, special=special)])
        if backend.token_to_id(text) != int(key):
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: added token {text!r} can't have id {key} "
                f"with this tokenizer.json, it gets {backend.token_to_id(text)}"
            )
    more = settings.get("additional_special_tokens")
    named = [settings.get("bos_token"), settings.get("eos_token")]
    named += more if isinstance(more, list) else []
    texts = {text for text in map(_content, named) if text is not None} - known_texts
    # Only pieces of the vocabulary: the embedding has no row for a new id.
    pieces = sorted(text for text in texts if backend.token_to_id(text) is not None)
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in pieces])


def _content(token: object) -> str | None:
    """Return the text of a token given as a string or as an object with ``content``."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) and text else None


def _token_id(backend: tokenizers.Tokenizer, token: object) -> int | None:
    text = _content(token)
    return None if text is None else backend.token_to_id(text)


def _ids_in_config(folder: Path, key: str) -> Iterator[int]:
    """Yield the token ids (one or a list) under a key of generation_config.json and config.json."""
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name, optional=True).get(key)
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0:
                yield token_id


def _chat_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """Return chat_template.jinja, or the (default) template in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text in UTF-8"
            raise CheckpointError(f"{path}: can't be read: {reason}") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
