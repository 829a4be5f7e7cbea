"""AdaptedCheckpoint: the same answers as PEFT on transformers, in the base's size and kinds."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from requantized_checkpoint import RequantizedCheckpoint
from tiny_adapters import (
    END_OF_TEXT,
    FIM,
    MIDDLE,
    edit_config,
    edit_tensors,
    reference_adapted,
    write_adapter,
    write_record,
)
from tiny_checkpoints import VOCAB, write_tiny, write_variant

from midfill.errors import CheckpointError
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.adapter import Adapter, AdapterRecord, load_adapter
from midfill.models.checkpoints.checkpoint import (
    EMPTY_THRESHOLD_KEY,
    END_BIAS_KEY,
    LEAST_INCREMENT_KEY,
    OPENS_LINES_KEY,
    RAW_BOS_KEY,
    WINDOW_AFTER_KEY,
    Checkpoint,
)
from midfill.models.checkpoints.lora_merge import BLOCK_LAYOUTS, update_matrix
from midfill.models.checkpoints.opening import AdaptedCheckpoint, open_checkpoint, open_model
from midfill.runners.cpu.packed_model import load_packed
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from midfill.runners.torch.runner import load_torch_runner

Q_UP = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
TOKENS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
IDS = [1, 7, 3, 200, 45, 2, 9, 310, 17, 64, 5, 3, 128, 90]
ROWS = [3, 1, 200]


def stored_as(base: Checkpoint, kind: str) -> RequantizedCheckpoint:
    return RequantizedCheckpoint(base, lambda _: kind)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "tiny-fim"
    write_adapter(base, folder, size=0.02, trainable_token_indices=ROWS)
    write_record(folder, base)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, folder: Path) -> Adapter:
    return load_adapter(folder, open_checkpoint(base))


def runners(checkpoint: Checkpoint) -> Iterator[Runner]:
    yield load_torch_runner(checkpoint, slots=64)
    runner = CpuRunner.load(checkpoint, slots=64, threads=1)
    yield runner
    runner.close()


VARIANTS: Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"trainable_token_indices": ROWS}),
    "tied": ("llama", {"tie_word_embeddings": True}, {"trainable_token_indices": ROWS}),
    "head rows": (
        "llama", {}, {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": [4, 300]}},
    ),
    "head": ("llama", {}, {"target_modules": ["lm_head", "o_proj"]}),
    "patterns": (
        "llama",
        {},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"mlp.*": 3}},
    ),
    "qwen2": ("qwen2", {}, {"trainable_token_indices": ROWS}),
    "qwen3": ("qwen3", {}, {}),
    "starcoder2": (
        "starcoder2", {}, {"target_modules": ["q_proj", "k_proj", "v_proj", "c_fc", "c_proj"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_peft(variant: str, tmp_path: Path) -> None:
    family, overrides, settings = VARIANTS[variant]
    base = write_tiny(family, tmp_path / "base", **overrides)
    folder = write_adapter(base, tmp_path / "lora", **settings)
    with torch.inference_mode():
        expected = reference_adapted(base, folder)(torch.tensor([IDS])).logits[0].numpy()
        plain = Stepper(load_torch_runner(open_checkpoint(base), slots=64)).prefill(
            Sequence([*IDS])
        )
    assert np.abs(plain - expected).max() > 0.1  # the adapter does something
    for runner in runners(open_model(base, folder)):
        logits = Stepper(runner).prefill(Sequence([*IDS]))
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


class TestQuantisedBases:
    @pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
    def test_a_merged_tensor_keeps_its_kind_and_size(
        self, base: Path, adapter: Adapter, kind: str
    ) -> None:
        quantised = stored_as(open_checkpoint(base), kind)
        adapted = AdaptedCheckpoint(quantised, adapter)
        exact = AdaptedCheckpoint(quantised, adapter, exact=True)
        assert adapted.names() == quantised.names()
        for name in adapted.names():
            before, after = quantised.tensor(name), adapted.tensor(name)
            assert (after.name, after.shape, after.kind) == (name, before.shape, before.kind)
            assert adapted.kind(name) == after.kind
            assert exact.kind(name) == exact.tensor(name).kind
            assert after.data.shape == before.data.shape
            changed = name in adapter.updates or name in adapter.rows
            assert (after.data != before.data).any() == changed
            if name in adapter.updates:
                wanted = exact.tensor(name)
                assert wanted.kind == "f32"
                update = update_matrix(adapter.updates[name])
                np.testing.assert_array_equal(wanted.data, before.to_float32() + update)
                # Over a row the update is all there, though most of it is below a grid step.
                lost = (after.to_float32() - wanted.data).sum(axis=1)
                step = np.ptp(before.to_float32(), axis=1) / (2 ** int(kind[1]) - 2)
                assert (np.abs(lost) <= 1.5 * step).all()

    @pytest.mark.parametrize("kind", BLOCK_LAYOUTS)
    def test_replaced_rows_are_all_that_changes_of_the_embedding(
        self, base: Path, adapter: Adapter, kind: str
    ) -> None:
        quantised = stored_as(open_checkpoint(base), kind)
        before = quantised.tensor("embed.weight")
        after = AdaptedCheckpoint(quantised, adapter).tensor("embed.weight")
        others = np.setdiff1d(np.arange(VOCAB), ROWS)
        np.testing.assert_array_equal(after.data[others], before.data[others])
        values = adapter.rows["embed.weight"].values
        step = np.ptp(values) / (2 ** int(kind[1]) - 1)
        assert np.abs(after.to_float32()[ROWS] - values).max() <= 1.1 * step

    @pytest.mark.parametrize("kind", ["q4_k", "q6_k"])
    def test_kinds_with_blocks_of_256_become_q8_0(self, tmp_path: Path, kind: str) -> None:
        sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
        base = write_tiny("llama", tmp_path / "base", **sizes)
        settings = {"target_modules": ["down_proj"], "trainable_token_indices": ROWS}
        folder = write_adapter(base, tmp_path / "lora", size=0.001, **settings)
        quantised = stored_as(open_checkpoint(base), kind)
        adapter = load_adapter(folder, quantised)
        adapted = AdaptedCheckpoint(quantised, adapter)
        assert adapted.tensor("layers.0.up.weight").kind == kind
        exact = AdaptedCheckpoint(quantised, adapter, exact=True)
        for name in ("layers.0.down.weight", "embed.weight"):
            tensor, wanted = adapted.tensor(name), exact.tensor(name)
            assert tensor.kind == "q8_0"
            error = np.abs(tensor.to_float32() - wanted.data).max(axis=1)
            # Half a step; the smallest scales are rounded to few bits.
            assert (error <= np.abs(wanted.data).max(axis=1) / 127 + 1e-5).all()

    def test_the_packed_model_is_as_large_as_the_bases(
        self, base: Path, adapter: Adapter, tmp_path: Path
    ) -> None:
        quantised = stored_as(open_checkpoint(base), "q4_1")
        plain = load_packed(quantised, folder=tmp_path)
        packed = load_packed(AdaptedCheckpoint(quantised, adapter), folder=tmp_path)
        for name, matrix in packed.matrices.items():
            assert matrix.formats == plain.matrices[name].formats
        assert packed.weight_bytes == plain.weight_bytes
        assert len(list(tmp_path.glob("*.safetensors"))) == 2

    def test_tied_heads_see_the_replaced_rows(self, tmp_path: Path) -> None:
        base = write_variant("llama-tied", tmp_path / "base")
        folder = write_adapter(
            base, tmp_path / "lora", target_modules=["o_proj"], trainable_token_indices=ROWS
        )
        edit_tensors(folder, lambda t: {n: v * (100 if "delta" in n else 0) for n, v in t.items()})
        quantised = stored_as(open_checkpoint(base), "q8_0")
        adapted = AdaptedCheckpoint(quantised, load_adapter(folder, quantised))
        unseen = [token_id for token_id in IDS if token_id not in ROWS]
        logits = []
        for checkpoint in (quantised, adapted):
            for runner in runners(checkpoint):
                logits.append(Stepper(runner).prefill(Sequence([*unseen])))
        others = np.setdiff1d(np.arange(VOCAB), ROWS)
        for before, after in zip(logits[:2], logits[2:], strict=True):
            np.testing.assert_allclose(after[:, others], before[:, others], rtol=1.3e-6, atol=1e-5)
            assert np.abs(after[:, ROWS] - before[:, ROWS]).max() > 10


@pytest.mark.parametrize("tensor", [Q_UP, TOKENS])
def test_values_that_are_not_finite_are_refused(
    base: Path, folder: Path, tmp_path: Path, tensor: str
) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "lora"))
    edit_tensors(broken, lambda tensors: tensors | {tensor: tensors[tensor] * torch.nan})
    checkpoint = open_model(base, broken)
    name = "embed.weight" if tensor == TOKENS else "layers.0.q.weight"
    with pytest.raises(CheckpointError, match=f"lora: the adapter's values for '{name}' are not"):
        checkpoint.tensor(name)


class TestFloatBases:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_precision_is_merged_exactly(
        self, base: Path, adapter: Adapter, tmp_path: Path, dtype: str
    ) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        model.save_pretrained(tmp_path)
        half = open_checkpoint(tmp_path)
        adapted = AdaptedCheckpoint(half, replace(adapter, record=AdapterRecord()))
        for name, update in adapter.updates.items():
            tensor = adapted.tensor(name)
            assert tensor.kind == "f32"
            expected = half.tensor(name).to_float32() + update_matrix(update)
            np.testing.assert_array_equal(tensor.data, expected)
        values = adapted.tensor("embed.weight").to_float32()[ROWS]
        np.testing.assert_array_equal(values, adapter.rows["embed.weight"].values)


class TestIdentity:
    def test_the_fingerprint_follows_base_adapter_and_how_they_are_merged(
        self, base: Path, folder: Path, adapter: Adapter, tmp_path: Path
    ) -> None:
        checkpoint = open_checkpoint(base)
        edited = Path(shutil.copytree(folder, tmp_path / "lora"))
        edit_config(edited, {"lora_alpha": 9})
        others = [
            AdaptedCheckpoint(checkpoint, adapter),
            AdaptedCheckpoint(checkpoint, adapter, exact=True),
            AdaptedCheckpoint(checkpoint, adapter, rounding="nearest"),
            AdaptedCheckpoint(checkpoint, load_adapter(edited, checkpoint)),
            AdaptedCheckpoint(stored_as(checkpoint, "q8_0"), adapter),
        ]
        assert len({each.fingerprint for each in others} | {checkpoint.fingerprint}) == 6
        assert len({each.content_digest for each in others} | {checkpoint.content_digest}) == 6
        assert AdaptedCheckpoint(checkpoint, adapter).fingerprint == others[0].fingerprint

    def test_the_adapter_s_own_rounding_is_used(
        self, base: Path, folder: Path, tmp_path: Path
    ) -> None:
        copied = shutil.copytree(folder, tmp_path / "lora")
        write_record(copied, None, rounding="stochastic")
        checkpoint = stored_as(open_checkpoint(base), "q4_1")
        own = AdaptedCheckpoint(checkpoint, load_adapter(copied, checkpoint))
        assert own.rounding == "stochastic"
        assert AdaptedCheckpoint(checkpoint, own.adapter, rounding="nearest").rounding == "nearest"

    def test_the_merge_is_exact_for_q8_and_f32_weights(self, base: Path, folder: Path) -> None:
        exact = {}
        for weights in ("auto", "q4", "q8", "f32"):
            checkpoint = open_model(base, folder, weights)  # type: ignore[arg-type]
            assert isinstance(checkpoint, AdaptedCheckpoint)
            exact[weights] = checkpoint.exact
        assert exact == {"auto": False, "q4": False, "q8": True, "f32": True}

    def test_without_an_adapter_the_base_is_opened(self, base: Path) -> None:
        assert not isinstance(open_model(base), AdaptedCheckpoint)


class TestMetadata:
    def test_the_fim_tokens_are_the_adapters(self, base: Path, folder: Path) -> None:
        before, after = (
            fim_format(each) for each in (open_checkpoint(base), open_model(base, folder))
        )
        assert before is not None
        assert before.prefix.text != FIM["prefix"]
        assert after is not None
        assert after.middle is not None
        named = [each.text for each in (after.prefix, after.suffix, after.middle)]
        assert named == [FIM["prefix"], FIM["suffix"], FIM["middle"]]
        assert after.order == "psm"
        ids = open_checkpoint(base).tokenizer.special_tokens
        assert ids[END_OF_TEXT] in after.stop_token_ids

    def test_they_override_the_bases_own_metadata(self, base: Path, adapter: Adapter) -> None:
        checkpoint = open_checkpoint(base)
        checkpoint.metadata = {
            "tokenizer.ggml.fim_pre_token_id": 1,
            "tokenizer.ggml.fim_suf_token_id": 3,
            "tokenizer.ggml.fim_mid_token_id": 2,
            "general.name": "tiny",
        }
        adapted = AdaptedCheckpoint(checkpoint, adapter)
        found = fim_format(adapted)
        assert found is not None
        assert found.prefix.text == MIDDLE
        assert adapted.metadata["general.name"] == "tiny"

    def test_a_plain_lora_leaves_the_format_alone(self, base: Path, adapter: Adapter) -> None:
        checkpoint = open_checkpoint(base)
        plain = AdaptedCheckpoint(checkpoint, replace(adapter, record=AdapterRecord()))
        assert fim_format(plain) == fim_format(checkpoint)

    @pytest.mark.parametrize(
        ("key", "base_value", "own"),
        [
            (LEAST_INCREMENT_KEY, 50, 200),
            (WINDOW_AFTER_KEY, 50, 30),
            (END_BIAS_KEY, 1.0, 2.0),
            (EMPTY_THRESHOLD_KEY, 0.3, 0.2),
            (OPENS_LINES_KEY, True, False),
            (RAW_BOS_KEY, "<s>", "<e>"),
        ],
    )
    def test_needs_are_the_adapters_never_the_bases(
        self, base: Path, adapter: Adapter, key: str, base_value: object, own: object
    ) -> None:
        checkpoint = open_checkpoint(base)
        checkpoint.metadata = {**checkpoint.metadata, key: base_value}
        for needs in ({key: own}, {}):
            record = replace(adapter.record, needs=needs)
            adapted = AdaptedCheckpoint(checkpoint, replace(adapter, record=record))
            assert adapted.metadata.get(key) == needs.get(key)

    def test_fragments_keep_every_token_that_was_computed(self, base: Path, folder: Path) -> None:
        computed = {}
        for name, checkpoint in (
            ("base", open_checkpoint(base)),
            ("adapted", open_model(base, folder)),
        ):
            prompts = PromptEncoder(checkpoint, fim_format(checkpoint), 512)
            typed = ["import sel", "f", "\n", "d", "e", "f"]
            suffix, lengths, before = "\nprint(self)\n" * 5, [], []
            prefix = "x = 1\n" * 10
            for text in typed:
                prefix += text
                ids = prompts.infill(InfillRequest(prefix=prefix, suffix=suffix), healing=False)
                same = next(
                    (
                        n
                        for n, (a, b) in enumerate(zip(before, ids.token_ids, strict=False))
                        if a != b
                    ),
                    len(before),
                )
                lengths.append(len(before) - same)
                before = ids.token_ids
            computed[name] = lengths[2:]  # the first edit moves the cut
        assert computed["adapted"] == [0] * 4
        assert sum(computed["base"]) > 0
