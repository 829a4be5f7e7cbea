"""A model that writes what a test says: each of its tokens is followed by a given one."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tiny_checkpoints import tiny_tokenizer
from tokenizers import AddedToken

HIDDEN = 64
VOCAB = 384


def write_scripted(
    folder: Path, template: str, follows: Iterable[tuple[str, str]], special: Sequence[str] = ()
) -> Path:
    """Write a model without attention: its logits depend on the last token only.

    Args:
        folder: where.
        template: of its chats.
        follows: pairs of texts, each a token of its own, of which the second follows the first.
        special: texts of control tokens; the other texts stand for themselves.
    """
    pairs = list(follows)
    backend = tiny_tokenizer()
    backend.add_special_tokens(list(special))
    words = dict.fromkeys(text for pair in pairs for text in pair if text not in special)
    new = [word for word in words if backend.token_to_id(word) is None]
    backend.add_tokens([AddedToken(word, normalized=False) for word in new])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HIDDEN,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    (folder / "config.json").write_text(json.dumps(config))
    embed = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN), np.float32)
    head = np.zeros_like(embed)
    for before, after in pairs:
        head[backend.token_to_id(after)] += embed[backend.token_to_id(before)]
    square = np.zeros((HIDDEN, HIDDEN), np.float32)
    ones = np.ones(HIDDEN, np.float32)
    parts = [f"self_attn.{name}_proj" for name in "qkvo"]
    parts += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer: dict[str, np.ndarray] = dict.fromkeys(parts, square)
    layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), ones)
    weights = {f"model.layers.0.{name}.weight": weight.copy() for name, weight in layer.items()}
    outside = {"model.embed_tokens": embed, "model.norm": ones, "lm_head": head}
    weights |= {f"{name}.weight": weight for name, weight in outside.items()}
    save_file(weights, folder / "model.safetensors")
    return folder
