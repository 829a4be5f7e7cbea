"""GGUF files as checkpoints: small ones written by the gguf library, and the default model."""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midfill.errors import CheckpointError, ModelNotFoundError
from midfill.models.checkpoints.gguf import GgufCheckpoint
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import tensor_shapes

Float32Array = npt.NDArray[np.float32]
Tensors = dict[str, npt.NDArray[Any]]

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 2, 4, 2, 16, 96, 256
QUERY, KEY = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
HIDDEN = 64


def weights(*, hidden: int = HIDDEN, biased: bool = False) -> Tensors:
    """Random tensors of a tiny model, in a file's names and row order."""
    layer_shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (QUERY, hidden),
        "attn_k.weight": (KEY, hidden),
        "attn_v.weight": (KEY, hidden),
        "attn_output.weight": (hidden, QUERY),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (FFN, hidden),
        "ffn_up.weight": (FFN, hidden),
        "ffn_down.weight": (hidden, FFN),
    }
    if biased:
        layer_shapes |= {"attn_q.bias": (QUERY,), "attn_k.bias": (KEY,), "attn_v.bias": (KEY,)}
    shapes = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    tensors: Tensors,
    *,
    architecture: str = "llama",
    hidden: int = HIDDEN,
    types: Mapping[str, GGMLQuantizationType] | None = None,
    more: Mapping[str, int] | None = None,
) -> Path:
    """Write a GGUF file.

    Args:
        types: of the tensors that are given as raw blocks.
        more: further metadata.
    """
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "context_length": 128,
        "embedding_length": hidden,
        "block_count": LAYERS,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    for name, value in (more or {}).items():
        writer.add_uint32(name, value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [chr(0x100 + i) for i in range(VOCAB - 2)]
    writer.add_token_list([*tokens, tokens[0] + tokens[1], tokens[2] + tokens[3]])
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}", f"{tokens[2]} {tokens[3]}"])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf", weights())


def interleaved_rotary(head: Float32Array, angles: Float32Array) -> Float32Array:
    """Rotate the neighbours (0, 1), (2, 3), ... of one head: GGML's NORM order."""
    out = np.empty_like(head)
    for pair, angle in enumerate(angles):
        x, y = head[2 * pair], head[2 * pair + 1]
        out[2 * pair] = x * math.cos(angle) - y * math.sin(angle)
        out[2 * pair + 1] = x * math.sin(angle) + y * math.cos(angle)
    return out


def halves_rotary(head: Float32Array, angles: Float32Array) -> Float32Array:
    """Rotate the first half against the second: NEOX order."""
    x, y = np.split(head, 2)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([x * cos - y * sin, x * sin + y * cos])


class TestTensors:
    def test_tensors_have_canonical_names(self, path: Path) -> None:
        checkpoint = GgufCheckpoint(path)
        assert checkpoint.config.layers == LAYERS
        assert checkpoint.config.tied_embeddings
        expected = tensor_shapes(checkpoint.config)
        assert {name: checkpoint.tensor(name).shape for name in checkpoint.names()} == expected
        stored = weights()
        for name, theirs in [
            ("embed.weight", "token_embd.weight"),
            ("final_norm.weight", "output_norm.weight"),
            ("layers.1.o.weight", "blk.1.attn_output.weight"),
            ("layers.1.mlp_norm.weight", "blk.1.ffn_norm.weight"),
            ("layers.0.down.weight", "blk.0.ffn_down.weight"),
        ]:
            tensor = checkpoint.tensor(name)
            assert (tensor.name, tensor.kind) == (name, "f32")
            np.testing.assert_array_equal(tensor.to_float32(), stored[theirs])

    def test_an_untied_lm_head_is_found(self, tmp_path: Path) -> None:
        head = np.ones((VOCAB, HIDDEN), np.float32)
        checkpoint = GgufCheckpoint(write(tmp_path / "m", weights() | {"output.weight": head}))
        assert not checkpoint.config.tied_embeddings
        np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight").to_float32(), head)

    def test_a_tensor_of_rope_factors_is_part_of_the_configuration(self, tmp_path: Path) -> None:
        factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
        checkpoint = GgufCheckpoint(
            write(tmp_path / "m", weights() | {"rope_freqs.weight": factors})
        )
        assert checkpoint.config.rope_scaling.frequency_factors == tuple(factors.tolist())
        assert "rope_freqs.weight" not in checkpoint.names()

    @pytest.mark.parametrize(("module", "heads"), [("q", HEADS), ("k", KV_HEADS)])
    def test_llama_rows_are_put_into_neox_order(self, path: Path, module: str, heads: int) -> None:
        """Halves rotated after reading are what neighbours rotated in the file's order are."""
        x = np.random.default_rng(1).standard_normal(HIDDEN, np.float32)
        angles = np.linspace(0.1, 2.0, HEAD_DIM // 2, dtype=np.float32)
        theirs = (weights()[f"blk.1.attn_{module}.weight"] @ x).reshape(heads, HEAD_DIM)
        ours = GgufCheckpoint(path).tensor(f"layers.1.{module}.weight").to_float32() @ x
        for stored, head in zip(theirs, ours.reshape(heads, HEAD_DIM), strict=True):
            rotated = interleaved_rotary(stored, angles)
            in_neox_order = np.concatenate([rotated[0::2], rotated[1::2]])
            np.testing.assert_allclose(halves_rotary(head, angles), in_neox_order, rtol=1e-4)

    def test_qwen_rows_are_in_neox_order_already(self, tmp_path: Path) -> None:
        stored = weights(biased=True)
        checkpoint = GgufCheckpoint(write(tmp_path / "m", stored, architecture="qwen2"))
        for module in "qk":
            for leaf in ("weight", "bias"):
                ours = checkpoint.tensor(f"layers.0.{module}.{leaf}").to_float32()
                np.testing.assert_array_equal(ours, stored[f"blk.0.attn_{module}.{leaf}"])

    def test_biases_move_with_their_rows(self, tmp_path: Path) -> None:
        stored = weights(biased=True)
        stored["blk.0.attn_q.bias"] = stored["blk.0.attn_q.weight"][:, 0].copy()
        checkpoint = GgufCheckpoint(write(tmp_path / "m", stored))
        weight = checkpoint.tensor("layers.0.q.weight").to_float32()
        bias = checkpoint.tensor("layers.0.q.bias").to_float32()
        np.testing.assert_array_equal(bias, weight[:, 0])

    def test_quantised_rows_move_whole(self, tmp_path: Path) -> None:
        stored, name = weights(), "blk.0.attn_q.weight"
        kind = GGMLQuantizationType.Q8_0
        blocks = gguf.quants.quantize(stored[name], kind)
        rounded = stored | {name: gguf.quants.dequantize(blocks, kind)}
        plain = GgufCheckpoint(write(tmp_path / "plain", rounded))
        packed = GgufCheckpoint(write(tmp_path / "q8", stored | {name: blocks}, types={name: kind}))
        tensor = packed.tensor("layers.0.q.weight")
        assert (tensor.kind, tensor.data.shape) == ("q8_0", (QUERY, HIDDEN // 32 * 34))
        expected = plain.tensor("layers.0.q.weight").to_float32()
        np.testing.assert_array_equal(tensor.to_float32(), expected)

    @pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
    def test_small_blocks_are_dequantised_to_what_was_quantised(
        self, tmp_path: Path, kind: str
    ) -> None:
        stored, name = weights(), "token_embd.weight"
        type_ = GGMLQuantizationType[kind]
        blocks = gguf.quants.quantize(stored[name], type_)
        path = write(tmp_path / "m", stored | {name: blocks}, types={name: type_})
        tensor = GgufCheckpoint(path).tensor("embed.weight")
        assert (tensor.kind, tensor.shape) == (kind.lower(), (VOCAB, HIDDEN))
        assert tensor.to_float32().dtype == np.float32
        steps = 2 ** int(kind[1])
        largest_error = np.ptp(stored[name], axis=1).max() / (steps - 2)
        assert np.abs(tensor.to_float32() - stored[name]).max() < largest_error

    @pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
    def test_blocks_of_256_are_dequantised(self, tmp_path: Path, kind: str) -> None:
        name, hidden = "token_embd.weight", 512
        type_ = GGMLQuantizationType[kind]
        values, size = GGML_QUANT_SIZES[type_]
        # Bytes below 3C are finite scales wherever a block keeps its half-precision scales.
        blocks = np.random.default_rng(0).integers(0, 0x3C, (VOCAB, hidden // values * size))
        stored = weights(hidden=hidden) | {name: blocks.astype(np.uint8)}
        path = write(tmp_path / "m", stored, hidden=hidden, types={name: type_})
        tensor = GgufCheckpoint(path).tensor("embed.weight")
        assert (tensor.kind, tensor.shape) == (kind.lower(), (VOCAB, hidden))
        expected = gguf.quants.dequantize(stored[name], type_)
        np.testing.assert_array_equal(tensor.to_float32(), expected)

    def test_half_precision_is_read_unchanged(self, tmp_path: Path) -> None:
        stored = weights()
        half = stored["token_embd.weight"].astype(np.float16)
        brain = gguf.quants.quantize(stored["blk.0.attn_q.weight"], GGMLQuantizationType.BF16)
        stored |= {"token_embd.weight": half, "blk.0.attn_q.weight": brain}
        types = {"blk.0.attn_q.weight": GGMLQuantizationType.BF16}
        checkpoint = GgufCheckpoint(write(tmp_path / "m", stored, types=types))
        embed, query = (checkpoint.tensor(n) for n in ("embed.weight", "layers.0.q.weight"))
        assert (embed.kind, embed.data.dtype) == ("f16", np.float16)
        np.testing.assert_array_equal(embed.to_float32(), half.astype(np.float32))
        assert (query.kind, query.data.dtype) == ("bf16", np.uint16)
        exact = GgufCheckpoint(write(tmp_path / "f", weights())).tensor("layers.0.q.weight")
        np.testing.assert_allclose(query.to_float32(), exact.to_float32(), rtol=2**-8)

    def test_an_unknown_tensor_is_an_error(self, path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"tiny\.gguf: has no tensor 'lm_head\.weight'"):
            GgufCheckpoint(path).tensor("lm_head.weight")


class TestWhatElseItHolds:
    def test_metadata_omits_the_vocabulary(self, path: Path) -> None:
        metadata = GgufCheckpoint(path).metadata
        assert metadata["general.architecture"] == "llama"
        assert metadata["tokenizer.ggml.pre"] == "smollm"
        assert len(metadata["tokenizer.ggml.merges"]) == 2  # short lists stay
        big = [
            key for key, value in metadata.items() if isinstance(value, list) and len(value) > 1024
        ]
        assert not big

    def test_the_tokenizer_is_the_files(self, path: Path) -> None:
        assert GgufCheckpoint(path).tokenizer.vocab_size == VOCAB

    def test_the_fingerprint_follows_the_content(self, path: Path) -> None:
        first = GgufCheckpoint(path).fingerprint
        assert GgufCheckpoint(path).fingerprint == first
        before = path.stat()
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        changed = GgufCheckpoint(path).fingerprint
        assert changed != first
        os.utime(path, ns=(0, 0))
        assert GgufCheckpoint(path).fingerprint not in (first, changed)

    def test_a_folder_with_one_file_is_that_file(self, path: Path) -> None:
        assert open_checkpoint(path.parent).path == path
        shutil.copy(path, path.with_name("other.gguf"))
        with pytest.raises(ModelNotFoundError, match=r"name one of them: other\.gguf, tiny\.gguf"):
            open_checkpoint(path.parent)


def reason_not_to_open(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(path))
    return str(caught.value).removeprefix(f"{path}: ")


class TestBrokenFiles:
    def test_a_truncated_file_names_the_tensor_that_is_cut(self, path: Path) -> None:
        whole = GgufFile(path)
        names = list(whole.tensors)
        ends = [tensor.offset + tensor.size for tensor in whole.tensors.values()]
        data = path.read_bytes()
        for name, end in zip(names, ends, strict=True):
            path.write_bytes(data[: end - 1])
            reason = reason_not_to_open(path)
            assert reason.startswith(f"tensor '{name}' ends at byte {end:,} but the file has only")
            assert "truncated" in reason

    def test_a_header_cut_anywhere_is_an_error(self, path: Path) -> None:
        data = path.read_bytes()
        for end in range(0, GgufFile(path).header_bytes, 7):
            path.write_bytes(data[:end])
            assert reason_not_to_open(path)

    def test_other_kinds_of_files_are_recognised(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(b"PK\x03\x04 and so on")
        assert reason_not_to_open(path).startswith("not a GGUF file")
        path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(32))
        assert reason_not_to_open(path).startswith("GGUF version 1 can't be read")
        path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(32))
        assert reason_not_to_open(path).endswith("it is for big-endian machines")
        with pytest.raises(ModelNotFoundError, match="no such file or folder"):
            open_checkpoint(tmp_path / "nothing.gguf")

    def test_a_missing_tensor_is_named(self, path: Path) -> None:
        tensors = weights()
        del tensors["blk.1.ffn_up.weight"]
        write(path, tensors)
        assert reason_not_to_open(path) == "tensor 'layers.1.up.weight' is missing"

    def test_a_tensor_of_another_shape_is_named(self, path: Path) -> None:
        write(path, weights() | {"blk.1.ffn_up.weight": np.zeros((FFN, 32), np.float32)})
        assert reason_not_to_open(path) == (
            "tensor 'blk.1.ffn_up.weight' has shape [96, 32], the model's configuration asks for "
            "[96, 64]"
        )

    def test_tensors_that_would_change_the_result_are_not_ignored(self, path: Path) -> None:
        extra = {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32)}
        write(path, weights() | extra)
        assert reason_not_to_open(path).startswith(
            "tensor 'blk.0.attn_q_norm.weight' is no part of"
        )
        write(path, weights() | {"blk.0.time_mix_key.weight": np.ones(8, np.float32)})
        assert "'blk.0.time_mix_key.weight' is of a kind" in reason_not_to_open(path)

    def test_a_type_that_cannot_be_dequantised_is_named(self, path: Path) -> None:
        write(path, weights() | {"token_embd.weight": np.zeros((VOCAB, HIDDEN), np.float64)})
        assert "'token_embd.weight' has type 28, which can't be" in reason_not_to_open(path)

    def test_a_part_of_a_split_file_is_named_as_such(self, path: Path) -> None:
        write(path, weights(), more={"split.count": 3})
        assert reason_not_to_open(path).startswith("is one of 3 parts; merge them first")

    def test_more_layers_than_tensors_are_refused_at_once(self, path: Path) -> None:
        data = path.read_bytes()
        key = b"llama.block_count" + (4).to_bytes(4, "little")
        assert data.count(key) == 1
        claimed = key + (2**32 - 1).to_bytes(4, "little")
        path.write_bytes(data.replace(key + LAYERS.to_bytes(4, "little"), claimed))
        assert "too few for the 4294967295 layers" in reason_not_to_open(path)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
    @given(st.data())
    def test_flipped_bytes_cause_at_worst_a_clear_error(
        self, path: Path, tmp_path: Path, data: st.DataObject
    ) -> None:
        content = bytearray(path.read_bytes())
        size = GgufFile(path).header_bytes
        for at in data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=3)):
            content[at] = data.draw(st.integers(0, 255))
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(content)
        problem = None
        try:
            checkpoint = open_checkpoint(broken)
            for name in checkpoint.names():
                assert checkpoint.tensor(name).to_float32().shape
            assert checkpoint.tokenizer.vocab_size
        except CheckpointError as error:
            problem = str(error)
        assert problem is None or (str(broken) in problem and "\n" not in problem)


class PlainReader(gguf.GGUFReader):
    """The gguf library's reader with a plain array for the file.

    It keeps views of the file for each token and merge: 70 MB for the default model, and 160 MB
    where they are views of a ``memmap``, which have a dictionary each.
    """

    @property
    def data(self) -> npt.NDArray[Any]:
        return self._bytes

    @data.setter
    def data(self, file: npt.NDArray[Any]) -> None:
        self._bytes = np.asarray(file)


@pytest.mark.real_model
class TestDefaultModel:
    def test_the_real_model_opens(self) -> None:
        checkpoint = open_checkpoint(resolve(DEFAULT_MODEL))
        assert checkpoint.tokenizer.vocab_size == checkpoint.config.vocab == 49152
        assert len(checkpoint.fingerprint) == 64

    def test_metadata_and_tensors_are_what_the_gguf_library_reads(self) -> None:
        path = resolve(DEFAULT_MODEL)
        file, reference = GgufFile(path), PlainReader(path)
        own_fields = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
        theirs = {
            name: f.contents() for name, f in reference.fields.items() if name not in own_fields
        }
        assert file.metadata == theirs
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            ours = file.tensors[tensor.name]
            assert ours.type.kind == tensor.tensor_type.name.lower()
            assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
            # The same place in the file: to read 93 MB twice would show no more than rows do.
            data = file.data(tensor.name)
            assert (ours.offset, ours.size) == (tensor.data_offset, tensor.n_bytes)
            assert (data.dtype, data.shape) == (tensor.data.dtype, tensor.data.shape)
            assert np.array_equal(data[[0, -1]], tensor.data[[0, -1]])
