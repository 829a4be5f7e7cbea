"""SentenceEncoder: texts as vectors, by a BERT encoder from a sentence-transformers folder.

Source: Reimers and Gurevych, "Sentence-BERT", EMNLP 2019, arXiv 1908.10084; all-MiniLM-L6-v2 is
such a model of six layers. A text's vector is the mean of its tokens' last hidden rows, of length
1. Plain NumPy: texts are short, and few.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from midfill.arrays import Float32Array
from midfill.errors import CheckpointError


class SentenceEncoder:
    """Makes vectors of texts.

    Args:
        weights: tensors by BERT's names.
        config: the model's config.json.
        tokenizer: adds special tokens and no padding, and leaves out what follows the most tokens
            that the model takes.

    Attributes:
        size: of a vector.
    """

    def __init__(
        self,
        weights: Mapping[str, Float32Array],
        config: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> None:
        self._weights, self._tokenizer = weights, tokenizer
        self._layers: int = config["num_hidden_layers"]
        self._heads: int = config["num_attention_heads"]
        self._epsilon = np.float32(config["layer_norm_eps"])
        self.size: int = config["hidden_size"]

    @classmethod
    def open(cls, folder: Path) -> "SentenceEncoder":
        """Read a sentence-transformers folder of a BERT model with mean pooling.

        Raises:
            CheckpointError: a file is missing or can't be read, or the model is another.
        """
        try:
            config = json.loads((folder / "config.json").read_bytes())
            weights = load_file(folder / "model.safetensors")
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            limits = folder / "sentence_bert_config.json"
            longest = json.loads(limits.read_bytes())["max_seq_length"] if limits.exists() else 512
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise CheckpointError(f"{folder} is no folder of a sentence encoder: {error}") from None
        if (config.get("model_type"), config.get("hidden_act")) != ("bert", "gelu"):
            raise CheckpointError(f"{folder}: sentence encoders must be BERT models with GELU")
        last = f"encoder.layer.{config['num_hidden_layers'] - 1}.output.dense.weight"
        if last not in weights:
            raise CheckpointError(f"{folder} is no folder of a sentence encoder: it lacks {last}")
        tokenizer.no_padding()
        tokenizer.enable_truncation(longest)
        return cls(weights, config, tokenizer)

    def encode(self, text: str) -> Float32Array:
        """Return a text's vector: float32 [size], of length 1."""
        tokens = np.array(self._tokenizer.encode(text).ids)
        weights = self._weights
        rows = (
            weights["embeddings.word_embeddings.weight"][tokens]
            + weights["embeddings.position_embeddings.weight"][: len(tokens)]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        rows = self._norm(rows, "embeddings.LayerNorm")
        for layer in range(self._layers):
            name = f"encoder.layer.{layer}."
            attended = self._linear(self._attention(rows, name), f"{name}attention.output.dense")
            rows = self._norm(rows + attended, f"{name}attention.output.LayerNorm")
            inner = _gelu(self._linear(rows, f"{name}intermediate.dense"))
            outer = self._linear(inner, f"{name}output.dense")
            rows = self._norm(rows + outer, f"{name}output.LayerNorm")
        mean = rows.mean(axis=0)
        found: Float32Array = mean / np.linalg.norm(mean)
        return found

    def _attention(self, rows: Float32Array, name: str) -> Float32Array:
        count, hidden = rows.shape
        query, key, value = (
            self._linear(rows, f"{name}attention.self.{part}")
            .reshape(count, self._heads, -1)
            .transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(hidden // self._heads))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        attended: Float32Array = (scores @ value).transpose(1, 0, 2).reshape(count, hidden)
        return attended

    def _linear(self, rows: Float32Array, name: str) -> Float32Array:
        return rows @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, rows: Float32Array, name: str) -> Float32Array:
        centred = rows - rows.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        scaled: Float32Array = centred / np.sqrt(variance + self._epsilon)
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]


def _gelu(values: Float32Array) -> Float32Array:
    """Return x times the share of the normal distribution below x.

    The error function comes from a polynomial (Abramowitz and Stegun, 7.1.26), within 2e-7.
    """
    size = np.abs(values) * np.float32(np.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * size)
    factors = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    polynomial = np.zeros_like(values)
    for factor in np.array(factors, np.float32):
        polynomial = (polynomial + factor) * t
    error = np.copysign(1 - polynomial * np.exp(-np.square(size)), values)
    found: Float32Array = values * (1 + error) / 2
    return found
