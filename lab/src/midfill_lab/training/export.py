"""Export: folders with a LoRA adapter or a whole model, midfill's record of it and a model card."""

import json
import math
import shutil
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from midfill.infill.formats import FimFormat
from midfill.models.checkpoints.checkpoint import FRAGMENTS_KEY, Checkpoint
from midfill.models.checkpoints.lora_update import DEFAULT_ROUNDING, Rounding
from midfill.models.checkpoints.model_record import RECORD_FILE, RECORD_FORMAT
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.system.files import write_folder
from midfill_lab.training.recipe import AdapterPrecision

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_TRAINED_ROWS_KEY = "trainable_tokens_delta"
_FLOAT8 = torch.finfo(torch.float8_e4m3fn)
_SAVE_ERRORS = (RuntimeError, SafetensorError)  # of torch and safetensors, e.g. on a full disk

_CARD_HEAD = """---
library_name: {library}
base_model: {base}
license: {licence}
pipeline_tag: text-generation
tags: [code, infilling, fill-in-the-middle]
---

# {base}, taught to infill

Completes at a caret between a prefix and a suffix. Made from {base} by `midfill train fim`;
{serving}

{prompt} {fragments}
"""
_SERVE_ADAPTER = (
    "`midfill serve {base} --adapter FOLDER` merges this adapter into its base when it starts."
)
_SERVE_MODEL = "`midfill serve FOLDER` runs it."
_PROMPT = (
    "Prompt: `{prefix}` prefix[:k] `{suffix}` suffix `{middle}` prefix[k:], for any k; the answer\n"
    "ends with `{stop}`."
)
_OWN_PROMPT = "Prompts are in the base's own infilling format."
_FRAGMENTS = (
    "Trained on text tokenised in fragments (EFIM, arXiv 2505.21889), so the caret and k may be "
    "inside a word."
)
_WHOLE_TEXT = "Trained on text tokenised as a whole."


def adapter_record(
    checkpoint: Checkpoint,
    format: FimFormat,
    end_token_id: int,
    fragments: bool,
    rounding: Rounding = DEFAULT_ROUNDING,
    *,
    name: str | None = None,
    **sections: object,
) -> dict[str, Any]:
    """Return the content of midfill.json: the base, the sentinels, and how the adapter was made.

    Args:
        checkpoint: the base.
        format, end_token_id: what was taught.
        fragments: whether text was tokenised in fragments.
        rounding: the rounding rule for merging into a quantised base.
        name: the base's public name; None takes the name in its own metadata.
        sections: further sections (recipe, data, training), plain values.
    """
    record: dict[str, Any] = {
        "format": RECORD_FORMAT,
        "base": {
            "name": name or str(checkpoint.metadata.get("general.name") or checkpoint.path.stem),
            "digest": checkpoint.content_digest,
            "licence": checkpoint.metadata.get("general.license"),
        },
    }
    # A suffix-first format is always the model's own and needs no naming.
    if format.order == "psm" and format.middle is not None:
        record["fim"] = {
            "prefix": format.prefix.text,
            "suffix": format.suffix.text,
            "middle": format.middle.text,
            "stop": [checkpoint.tokenizer.token_text(end_token_id)],
        }
    return {**record, "fragments": fragments, "rounding": rounding, **sections}


def write_adapter(
    folder: Path,
    model: Any,
    record: Mapping[str, Any],
    card: str,
    precision: AdapterPrecision = "bf16",
) -> None:
    """Write a PEFT adapter, midfill.json and the model card.

    Args:
        folder: is written as a whole.
        model: PEFT's wrapper of a model.
        record: made by ``adapter_record``.
        card: made by ``model_card``.
        precision: "fp8" stores LoRA's factors in float8 (E4M3), multiplied by powers of two that
            use its range; ``lora_alpha`` divides by them. Embedding rows stay in bfloat16.

    Raises:
        MidfillError: the folder can't be written; its old content is unchanged.
    """

    def write(temporary: Path) -> None:
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        stored = torch.bfloat16 if precision == "bf16" else torch.float32
        weights = {
            name: each.detach().to("cpu", stored).contiguous()
            for name, each in get_peft_model_state_dict(model, save_embedding_layers=False).items()
            # A tied output layer repeats the embedding's rows; readers use the embedding's.
            if not (name.endswith(_TRAINED_ROWS_KEY) and ".lm_head." in name)
        }
        configuration = copy(model.peft_config["default"])
        configuration.inference_mode = True
        if precision == "fp8":
            weights, factor = _in_float8(weights)
            configuration.lora_alpha /= factor
        save_file(weights, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        configuration.save_pretrained(str(temporary))
        _write_record(temporary, record, card)

    write_folder(folder, write, errors=_SAVE_ERRORS)


def _in_float8(weights: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], float]:
    """Return an adapter's weights with its factors in float8, and what their product gained."""
    rounded = {name: each.bfloat16() for name, each in weights.items()}
    gained = 1.0
    for side in ("lora_A", "lora_B"):
        names = [name for name in weights if f".{side}." in name]
        largest = max((float(weights[name].abs().max()) for name in names), default=0.0)
        power = 2.0 ** math.floor(math.log2(_FLOAT8.max / largest)) if largest else 1.0
        rounded |= {name: (weights[name] * power).to(torch.float8_e4m3fn) for name in names}
        gained *= power
    return rounded, gained


def write_model(
    folder: Path,
    model: Any,
    checkpoint: Checkpoint,
    format: FimFormat,
    record: Mapping[str, Any],
    card: str,
) -> None:
    """Write a Hugging Face folder that names its FIM tokens, with LoRA updates merged in.

    ``model`` can't be trained on afterwards.

    Raises:
        MidfillError: the folder can't be written; its old content is unchanged.
    """
    merged = model.merge_and_unload() if hasattr(model, "peft_config") else model

    def write(temporary: Path) -> None:
        merged.save_pretrained(temporary)
        _write_tokenizer(temporary, checkpoint, format, record)
        _write_record(temporary, record, card)

    write_folder(folder, write, errors=_SAVE_ERRORS)


def model_card(record: Mapping[str, Any], *, adapter: bool) -> str:
    """Return a model card: Markdown for readers and for the Hugging Face hub's index.

    Args:
        record: made by ``adapter_record``.
        adapter: whether the card is for an adapter's folder, not a whole model's.
    """
    base, fim = record["base"], record.get("fim")
    prompt = _OWN_PROMPT
    if fim is not None:
        prompt = _PROMPT.format(**{**fim, "stop": fim["stop"][0]})
    parts = [
        _CARD_HEAD.format(
            library="peft" if adapter else "transformers",
            base=base["name"],
            licence=str(base.get("licence") or "unknown").lower(),
            serving=(_SERVE_ADAPTER if adapter else _SERVE_MODEL).format(base=base["name"]),
            prompt=prompt,
            fragments=_FRAGMENTS if record["fragments"] else _WHOLE_TEXT,
        )
    ]
    for title in ("training", "data", "recipe"):
        rows = _card_rows(record.get(title, {}))
        if rows:
            parts.append(f"\n## {title.capitalize()}\n\n| | |\n| --- | --- |\n{rows}")
    return "".join(parts)


def _write_tokenizer(
    folder: Path, checkpoint: Checkpoint, format: FimFormat, record: Mapping[str, Any]
) -> None:
    """Write the base's tokenizer files, with the sentinels named in tokenizer_config.json."""
    tokenizer = checkpoint.tokenizer
    if checkpoint.path.is_dir() and (checkpoint.path / _TOKENIZER_FILES[0]).is_file():
        for name in _TOKENIZER_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copy(checkpoint.path / name, folder / name)
    else:
        tokenizer.save(folder / "tokenizer.json")
    path = folder / "tokenizer_config.json"
    settings: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8"))
        if path.is_file()
        else _tokenizer_config(tokenizer)
    )
    sentinels = {
        "prefix_token": format.prefix,
        "suffix_token": format.suffix,
        "middle_token": format.middle,
    }
    settings |= {key: each.text for key, each in sentinels.items() if each is not None}
    if "fim" in record:
        settings["eot_token"] = record["fim"]["stop"][0]
    if record["fragments"]:
        settings[FRAGMENTS_KEY] = True
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return tokenizer_config.json for a base that has none."""
    begin, ends = tokenizer.bos_token_id, tokenizer.eos_token_ids
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if begin is None else tokenizer.token_text(begin),
        "eos_token": tokenizer.token_text(ends[0]) if ends else None,
        "add_bos_token": tokenizer.add_bos,
        "chat_template": tokenizer.chat_template,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _write_record(folder: Path, record: Mapping[str, Any], card: str) -> None:
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card, encoding="utf-8")


def _card_rows(values: Mapping[str, Any], prefix: str = "") -> str:
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append(_card_rows(value, f"{prefix}{name}."))
        else:
            lines.append(f"| {prefix}{name} | {value} |\n")
    return "".join(lines)
