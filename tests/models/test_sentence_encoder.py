"""SentenceEncoder beside transformers, and folders that it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from midfill.errors import CheckpointError
from midfill.models.sentence_encoder import SentenceEncoder

WORDS = ("[UNK]", "[CLS]", "[SEP]", "the", "soup", "was", "salty", "who", "cooked", "it", "?")
TEXTS = ("", "the soup was salty", "who cooked it ?", "who ? " * 40, "words unknown to it")
LONGEST = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random model of two layers whose weights are large enough to matter."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=40, max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    model = BertModel(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norms, which begin as 0 and 1
            parameter.data += torch.randn(parameter.shape) * 0.3
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_padding(length=64)  # as in all-MiniLM-L6-v2's file
    tokenizer.save(str(folder / "tokenizer.json"))
    limits = {"max_seq_length": LONGEST, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(limits))
    return folder


def test_vectors_are_the_mean_rows_of_transformers_of_length_1(folder: Path) -> None:
    import torch
    from transformers import BertModel

    model = BertModel.from_pretrained(folder).eval()
    encoder = SentenceEncoder.open(folder)
    assert encoder.size == 24
    for text in TEXTS:
        words = [WORDS.index(word) if word in WORDS else 0 for word in text.split()]
        tokens = torch.tensor([[1, *words[: LONGEST - 2], 2]])
        with torch.no_grad():
            mean = model(tokens).last_hidden_state[0].mean(dim=0).numpy()
        found = encoder.encode(text)
        np.testing.assert_allclose(found, mean / np.linalg.norm(mean), atol=2e-6)
        assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


def test_folders_of_something_else_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path} is no folder of a sentence")):
        SentenceEncoder.open(tmp_path)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(CheckpointError, match="must be BERT models with GELU"):
        SentenceEncoder.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="is no folder of a sentence encoder: it lacks"):
        SentenceEncoder.open(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match="is no folder of a sentence encoder"):
        SentenceEncoder.open(tmp_path)
