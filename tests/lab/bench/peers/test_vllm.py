"""vLLM: its dtypes, and the folder that it is given."""

from pathlib import Path

import numpy as np
import pytest

from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.bench.peers.convert import convert
from midfill_lab.bench.peers.servers import ComparedModel
from midfill_lab.bench.peers.vllm import default_dtypes


def test_vllm_is_measured_in_bfloat16_where_the_chip_multiplies_it() -> None:
    assert default_dtypes(["avx2", "avx512f"]) == ("float32",)
    for feature in ("avx512_bf16", "amx_bf16"):
        assert default_dtypes(["avx512f", feature]) == ("float32", "bfloat16")


def test_a_gguf_file_becomes_a_folder_with_the_same_weights_and_tokens(
    gguf_model: ComparedModel, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    assert gguf_model.gguf is not None
    convert(gguf_model.gguf, tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    assert folder.config.tied_embeddings
    for name in gguf_model.checkpoint.names():
        stored = gguf_model.checkpoint.tensor(name).to_float32()
        np.testing.assert_array_equal(folder.tensor(name).to_float32(), stored)
    text = "def caf\u00e9(x):\n    return [x, 2]\n<fim_prefix>"
    for parse in (False, True):
        assert folder.tokenizer.encode(text, parse_special=parse) == (
            gguf_model.checkpoint.tokenizer.encode(text, parse_special=parse)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
