"""Targets: the files of a model, which somebody else has made."""

import json
import math
import os
from functools import cache
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from fuzzing.target import Target, scratch, split
from midfill.errors import MidfillError
from midfill.frontend.chat import ChatTemplate
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.adapter import LoraConfig
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.gguf import GgufCheckpoint
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.checkpoints.huggingface import HuggingFaceCheckpoint
from midfill.models.checkpoints.model_record import read_needs
from midfill.models.checkpoints.safetensors_file import SafetensorsFile
from midfill.models.config import tensor_shapes
from midfill.models.families import config_from_huggingface, huggingface_names
from midfill.models.tokens.gguf_tokenizer import build_tokenizer
from midfill.models.tokens.huggingface_tokenizer import load_folder, read_json
from midfill.models.tokens.tokenizer import Tokenizer

_SIZE = 32  # hidden size, and the width of everything else
_TOKENS = ["<s>", "</s>", "a", "b", "ab", "Ġ", "Ċ", "<fim_prefix>"]
_TEXT = "ab a\n<s>\U0001f642"


def _write(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.write_bytes(data)
    return path


def _parse_gguf_header(data: bytes) -> None:
    file = GgufFile(_write("header.gguf", data))
    for name in file.tensors:
        file.data(name)


def _parse_gguf(data: bytes) -> None:
    _use(GgufCheckpoint(_write("model.gguf", data)))


def _use(checkpoint: Checkpoint) -> None:
    """Do with a checkpoint what loading and serving it does, but for the forward pass."""
    for name in checkpoint.names():
        checkpoint.tensor(name).to_float32()
    _use_tokenizer(checkpoint.tokenizer)
    encoder = PromptEncoder(checkpoint, fim_format(checkpoint, None), 64)
    encoder.infill(InfillRequest(prefix="ab a", suffix="b"))


@cache
def _gguf() -> bytes:
    """A whole model of a few kilobytes."""
    path = scratch() / "seed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(_SIZE)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_SIZE)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0].content }}")
    half = _SIZE // 2
    shapes = {
        "token_embd": (len(_TOKENS), _SIZE), "blk.0.attn_q": (_SIZE, _SIZE),
        "blk.0.attn_k": (half, _SIZE), "blk.0.attn_v": (half, _SIZE),
        "blk.0.attn_output": (_SIZE, _SIZE), "blk.0.ffn_gate": (_SIZE, _SIZE),
        "blk.0.ffn_up": (_SIZE, _SIZE), "blk.0.ffn_down": (_SIZE, _SIZE),
    }  # fmt: skip
    for name, shape in shapes.items():
        blocks = gguf.quants.quantize(np.ones(shape, np.float32), GGMLQuantizationType.Q4_0)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_0)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_SIZE, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def _parse_safetensors(data: bytes) -> None:
    file = SafetensorsFile(_write("weights.safetensors", data))
    for name in file.entries:
        file.data(name)


def _safetensors(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def _safetensors_seeds() -> list[bytes]:
    entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
    other = {"dtype": "BF16", "shape": [], "data_offsets": [32, 34]}
    return [
        _safetensors({}),
        _safetensors({"__metadata__": {"format": "pt"}, "a": entry, "b": other}),
        b"",
    ]


def _parse_folder(data: bytes) -> None:
    """A folder: config.json, generation_config.json, midfill.json, and the weights' header."""
    config, generation, record, header = split(data, 4)
    folder = scratch() / "folder"
    folder.mkdir(exist_ok=True)
    for name, content in {
        "config.json": config,
        "generation_config.json": generation,
        "midfill.json": record,
        "model.safetensors": len(header).to_bytes(8, "little") + header + bytes(_DATA_BYTES),
        "tokenizer.json": split(_tokenizer_seeds()[0], 4)[0],
    }.items():
        (folder / name).write_bytes(content)
    _use(HuggingFaceCheckpoint(folder))


_DATA_BYTES = 40_000  # enough for each seed's tensors


def _header(config: dict[str, object]) -> bytes:
    """The header of a model's weights, whose tensors may lie upon each other."""
    model = config_from_huggingface(config)
    shapes = tensor_shapes(model)
    entries = {
        theirs: {
            "dtype": "F16",
            "shape": shapes[name],
            "data_offsets": [0, 2 * math.prod(shapes[name])],
        }
        for name, theirs in huggingface_names(model).items()
        if name in shapes
    }
    return json.dumps(entries).encode()


_CONFIGS = (
    {"model_type": "llama", "rms_norm_eps": 1e-5},
    {"model_type": "granite", "rms_norm_eps": 1e-5, "embedding_multiplier": 2.0,
     "residual_multiplier": 0.5, "attention_multiplier": 0.5, "logits_scaling": 2},
    {"model_type": "qwen2", "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    {"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 16},
    {"model_type": "starcoder2", "norm_epsilon": 1e-5, "use_bias": True, "sliding_window": 8},
    {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 8},
    {"model_type": "gemma", "rms_norm_eps": 1e-6, "head_dim": 16},
    {"model_type": "gemma3_text", "rms_norm_eps": 1e-6, "head_dim": 16, "sliding_window": 8,
     "layer_types": ["full_attention"], "query_pre_attn_scalar": 16, "rope_local_base_freq": 1e4},
    {"model_type": "gemma3n_text", "rms_norm_eps": 1e-6, "head_dim": 16, "sliding_window": 8,
     "layer_types": ["full_attention"], "num_kv_shared_layers": 0, "laurel_rank": 8,
     "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 8, "rope_scaling": None,
     "activation_sparsity_pattern": [0.5], "final_logit_softcapping": 30.0},
    {"model_type": "olmo3", "rms_norm_eps": 1e-5, "sliding_window": 8,
     "layer_types": ["full_attention"]},
    {"model_type": "deepseek_v2", "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
     "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 2, "n_shared_experts": 1,
     "num_experts_per_tok": 1, "moe_intermediate_size": 16, "rope_scaling": None},
)  # fmt: skip


def _folder_seeds() -> list[bytes]:
    sizes = {
        "vocab_size": 8, "hidden_size": _SIZE, "intermediate_size": _SIZE, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "rope_theta": 10000.0, "bos_token_id": 0, "eos_token_id": [1, 2], "hidden_act": "silu",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    }  # fmt: skip
    generation = b'{"eos_token_id": 1}'
    configs = [{**sizes, **config} for config in _CONFIGS]
    return [
        b"\n===\n".join([json.dumps(config).encode(), generation, _RECORD, _header(config)])
        for config in configs
    ]


_RECORD = json.dumps(
    {
        "format": 1,
        "cut": {"least_increment": 400},
        "window": {"before": 1200, "after": 400},
        "snippets": {"characters": 2000},
        "end": {"logit_bias": 2.0},
        "empty": {"threshold": 0.15},
        "line_start": {"opens_line": True},
    }
).encode()


def _parse_record(data: bytes) -> None:
    path = _write("midfill.json", data)
    read_needs(path, read_json(path))


def _parse_lora_config(data: bytes) -> None:
    config = LoraConfig(_write("adapter_config.json", data))
    for module in ("model.layers.0.self_attn.q_proj", "model.embed_tokens"):
        config.scale(module)
    config.token_ids("model.embed_tokens")


_LORA = json.dumps(
    {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "use_rslora": True,
        "init_lora_weights": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"k": 2.0},
        "trainable_token_indices": {"embed_tokens": [1, 2]},
    }
).encode()  # fmt: skip


def _parse_gguf_tokenizer(data: bytes) -> None:
    """A tokenizer's metadata, as JSON."""
    path = _write("metadata.json", data)
    _use_tokenizer(build_tokenizer(read_json(path)))


def _gguf_tokenizer_seeds() -> list[bytes]:
    common = {
        "tokenizer.ggml.tokens": _TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1, 1, 3],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    }
    byte_level = {
        **common,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.merges": ["a b"],
    }
    sentencepiece = {
        **common,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0, 0.0, -1, -2, -3, -4, -5, 0],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
    }
    return [json.dumps(each).encode() for each in (byte_level, sentencepiece)]


def _parse_tokenizer_folder(data: bytes) -> None:
    """A folder: tokenizer.json, tokenizer_config.json, config.json and chat_template.jinja."""
    names = ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja")
    folder = scratch() / "tokenizer"
    folder.mkdir(exist_ok=True)
    for name, content in zip(names, split(data, len(names)), strict=True):
        if content:
            (folder / name).write_bytes(content)
        elif (folder / name).exists():
            os.unlink(folder / name)
    _use_tokenizer(load_folder(folder))


def _tokenizer_seeds() -> list[bytes]:
    vocabulary = {token: number for number, token in enumerate(_TOKENS)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<fim_prefix>"])
    settings = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": True,
        "added_tokens_decoder": {"8": {"content": "<new>", "special": True}},
        "additional_special_tokens": ["<fim_prefix>"],
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    }
    whole = [backend.to_str().encode(), json.dumps(settings).encode(), b'{"eos_token_id": [1, 2]}']
    return [b"\n===\n".join(whole), b"\n===\n".join([*whole, b"{{ messages[0].content }}"])]


def _use_tokenizer(tokenizer: Tokenizer) -> None:
    """Do with a tokenizer what loading and serving a model does."""
    ids = [*tokenizer.encode(_TEXT), *tokenizer.encode(_TEXT, parse_special=True)]
    for token_id in {*ids, *range(min(tokenizer.vocab_size, 16)), *tokenizer.eos_token_ids}:
        tokenizer.token_bytes(token_id)
        tokenizer.token_text(token_id)
    if tokenizer.chat_template is not None:
        _render(tokenizer.chat_template, tokenizer)


def _render(source: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(source, tokenizer, {"bos_token": "<s>"})
    template.encode([{"role": "user", "content": _TEXT}, {"role": "assistant", "content": "b"}])


@cache
def _small_tokenizer() -> Tokenizer:
    return build_tokenizer(json.loads(_gguf_tokenizer_seeds()[0]))


def _parse_chat_template(data: bytes) -> None:
    try:
        source = data.decode()
    except UnicodeDecodeError:
        raise MidfillError("no text") from None
    if b"range" in data or b"*" in data or b"%%" in data:
        return  # what takes all its time, or memory, takes the fuzzer's, too
    _render(source, _small_tokenizer())


_TEMPLATES = (
    b"{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message['content'] | trim }}"
    b"<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    b"{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    b"{% set ns.n = ns.n + 1 %}{% else %}{% break %}{% endif %}{{ m.content.split('a')[-1] }}"
    b"{% endfor %}{{ raise_exception('no') if ns.n > 2 }}",
    b"{% macro show(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{{ show(messages) }}"
    b"{{ strftime_now('%d') }}{{ ''.__class__ }}{{ messages.append(1) }}",
)
_JSON_WORDS = (
    b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"[]", b"{}", b'""',
    b"9" * 25, b"9" * 400, b"\\ud800", b'"\\u0000"', b"1.5", b"\n===\n",
)  # fmt: skip
_GGUF_WORDS = (b"GGUF", b"\xff" * 8, bytes(8), b"\x09\0\0\0", b"\x08\0\0\0", b"general.alignment")

TARGETS = {
    "gguf-header": Target(
        _parse_gguf_header,
        lambda: [_gguf()[:1200], _gguf(), b"GGUF\x03\0\0\0" + bytes(16)],
        8192,
        _GGUF_WORDS,
    ),
    "gguf": Target(
        _parse_gguf,
        lambda: [_gguf()],
        8192,
        _GGUF_WORDS,
    ),
    "safetensors": Target(
        _parse_safetensors,
        _safetensors_seeds,
        2048,
        (*_JSON_WORDS, b'"dtype"', b'"F16"', b'"shape"', b'"data_offsets"'),
    ),
    "model-folder": Target(_parse_folder, _folder_seeds, 8192, _JSON_WORDS),
    "midfill-json": Target(_parse_record, lambda: [_RECORD], 1024, _JSON_WORDS),
    "lora-config": Target(_parse_lora_config, lambda: [_LORA], 1024, _JSON_WORDS),
    "gguf-tokenizer": Target(_parse_gguf_tokenizer, _gguf_tokenizer_seeds, 4096, _JSON_WORDS),
    "tokenizer-folder": Target(_parse_tokenizer_folder, _tokenizer_seeds, 8192, _JSON_WORDS),
    "chat-template": Target(
        _parse_chat_template,
        lambda: list(_TEMPLATES),
        1024,
        (b"{{", b"}}", b"{%", b"%}", b"{#", b"|", b"loop.index0", b"messages", b"__class__"),
    ),
}
