"""Exported folders are read by PEFT, transformers and midfill."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_checkpoints import TRAINED, VOCAB, reference_model, write_tiny, write_variant
from transformers import AutoModelForCausalLM, AutoTokenizer

from midfill.errors import CheckpointError, MidfillError
from midfill.infill.formats import FimFormat, custom_format, find_format
from midfill.models.checkpoints.adapter import load_adapter
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import AdaptedCheckpoint, open_checkpoint
from midfill_lab.training.base_model import load_base_model
from midfill_lab.training.export import adapter_record, model_card, write_adapter, write_model
from midfill_lab.training.lora import make_trainable
from midfill_lab.training.recipe import TrainingRecipe

FIM = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
SENTINELS = (1, 2, 3)
LENGTH = 40


def format_of(checkpoint: Checkpoint) -> FimFormat:
    return custom_format(*FIM, checkpoint.tokenizer.special_tokens)


def record_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return adapter_record(checkpoint, format_of(checkpoint), 0, True, recipe={"rank": 4})


def trained(checkpoint: Checkpoint, method: str = "lora") -> Any:
    """Return a model whose trained weights are random."""
    model = load_base_model(checkpoint, torch.float32)
    recipe = TrainingRecipe(rank=4, alpha=8, method=method)  # type: ignore[arg-type]
    wrapped = make_trainable(model, recipe, SENTINELS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, each in sorted(wrapped.named_parameters()):
            if each.requires_grad and each.dim() > 1:
                # in bfloat16 already, so that writing it loses nothing
                noise = torch.randn(each.shape, generator=generator) * each.shape[-1] ** -0.5
                each.copy_(noise.bfloat16().float())
    return wrapped.eval()


def ids() -> torch.Tensor:
    drawn = np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH))
    drawn[0, :3] = SENTINELS
    return torch.from_numpy(drawn)


def logits(model: Any, **more: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(input_ids=ids(), use_cache=False, **more).logits
    return result


def packed_logits(model: Any) -> torch.Tensor:
    positions = torch.arange(LENGTH)[None]
    bounds = torch.tensor([0, LENGTH], dtype=torch.int32)
    return logits(model, position_ids=positions, cu_seq_lens_q=bounds, max_length_q=LENGTH)


def close(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)


@pytest.fixture(params=["llama", "llama-tied", "starcoder2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_variant(request.param, tmp_path / "base")


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    return write_variant("llama", tmp_path / "base")


class TestAdapter:
    def test_peft_reads_it(self, folder: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(folder)
        model = trained(checkpoint)
        write_adapter(tmp_path / "adapter", model, record_of(checkpoint), "card")
        base = reference_model(folder, checkpoint.config.context)
        read = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        close(logits(read), packed_logits(model))

    def test_midfill_reads_it(self, folder: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(folder)
        model = trained(checkpoint)
        expected = packed_logits(model)
        write_adapter(tmp_path / "adapter", model, record_of(checkpoint), "card")
        adapter = load_adapter(tmp_path / "adapter", checkpoint)
        assert adapter.record.fragments
        assert adapter.record.fim_tokens == FIM
        assert adapter.record.stop_tokens == ("<|endoftext|>",)
        assert adapter.record.base_digest == checkpoint.content_digest
        merged = load_base_model(AdaptedCheckpoint(checkpoint, adapter), torch.float32)
        close(packed_logits(merged.eval()), expected)

    def test_float8_takes_half_the_space(self, untied: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(untied)
        model, sizes = trained(checkpoint), {}
        for precision in ("bf16", "fp8"):
            write_adapter(tmp_path / precision, model, record_of(checkpoint), "", precision)
            weights = load_file(tmp_path / precision / "adapter_model.safetensors")
            sizes[precision] = sum(each.nbytes for name, each in weights.items() if "lora" in name)
        assert sizes["fp8"] == sizes["bf16"] // 2

    def test_peft_and_midfill_read_float8_alike(self, untied: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(untied)
        model = trained(checkpoint)
        write_adapter(tmp_path / "adapter", model, record_of(checkpoint), "", "fp8")
        adapter = load_adapter(tmp_path / "adapter", checkpoint)
        merged = load_base_model(AdaptedCheckpoint(checkpoint, adapter), torch.float32).eval()
        base = reference_model(untied, checkpoint.config.context)
        read = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        close(logits(read), packed_logits(merged))
        name = "layers.1.up.weight"
        layer = model.get_base_model().get_submodule("model.layers.1.mlp.up_proj")
        exact = layer.get_delta_weight("default").detach().numpy()
        update = adapter.updates[name]
        error = update.scale * update.up @ update.down - exact
        assert 0 < np.linalg.norm(error) < 0.06 * np.linalg.norm(exact)

    def test_it_is_small_and_complete(self, untied: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(untied)
        write_adapter(tmp_path / "adapter", trained(checkpoint), record_of(checkpoint), "# Card\n")
        assert sorted(os.listdir(tmp_path / "adapter")) == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
            "midfill.json",
        ]
        assert (tmp_path / "adapter" / "README.md").read_text() == "# Card\n"
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["inference_mode"] is True
        assert config["trainable_token_indices"] == list(SENTINELS)

    def test_training_can_continue_after_writing(self, untied: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(untied)
        model = trained(checkpoint)
        before = packed_logits(model)
        write_adapter(tmp_path / "adapter", model, record_of(checkpoint), "")
        assert torch.equal(packed_logits(model), before)
        assert any(each.requires_grad for each in model.parameters())

    def test_another_base_is_refused(self, untied: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(untied)
        write_adapter(tmp_path / "adapter", trained(checkpoint), record_of(checkpoint), "")
        other = open_checkpoint(write_tiny("llama", tmp_path / "other", num_hidden_layers=2))
        with pytest.raises(CheckpointError, match="was trained on base"):
            load_adapter(tmp_path / "adapter", other)

    def test_a_folder_that_cannot_be_written_is_named(self, untied: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(untied)
        (tmp_path / "file").write_text("")
        with pytest.raises(MidfillError, match="adapter: can't be written"):
            write_adapter(tmp_path / "file" / "adapter", trained(checkpoint), {}, "")


class TestModel:
    @pytest.mark.parametrize("method", ["lora", "full"])
    def test_midfill_and_transformers_read_it(
        self, folder: Path, tmp_path: Path, method: str
    ) -> None:
        checkpoint = open_checkpoint(folder)
        model = trained(checkpoint, method)
        expected = packed_logits(model)
        target = tmp_path / "merged"
        write_model(target, model, checkpoint, format_of(checkpoint), record_of(checkpoint), "c")
        written = open_checkpoint(target)
        assert written.config == checkpoint.config
        close(packed_logits(load_base_model(written, torch.float32).eval()), expected)
        close(logits(AutoModelForCausalLM.from_pretrained(target).eval()), expected)

    def test_the_server_finds_its_format_and_fragments(self, untied: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(untied)
        # Not the family's own order, so that only the folder's word can give it.
        taught = custom_format(FIM[2], FIM[0], FIM[1], checkpoint.tokenizer.special_tokens)
        record = adapter_record(checkpoint, taught, 0, True)
        write_model(tmp_path / "m", trained(checkpoint), checkpoint, taught, record, "")
        written = open_checkpoint(tmp_path / "m")
        special = written.tokenizer.special_tokens
        found = find_format(written.config.family, special, written.metadata)
        assert found is not None
        assert (found.prefix, found.suffix, found.middle) == (
            taught.prefix,
            taught.suffix,
            taught.middle,
        )
        assert 0 in found.stop_token_ids
        assert written.metadata["midfill.fragments"] is True

    def test_its_tokenizer_is_the_bases(self, untied: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(untied)
        model, format = trained(checkpoint), format_of(checkpoint)
        write_model(tmp_path / "m", model, checkpoint, format, record_of(checkpoint), "")
        text = "def f(x):\n    return 'é' # <fim_middle>"
        tokenizer = open_checkpoint(tmp_path / "m").tokenizer
        assert tokenizer.encode(text) == checkpoint.tokenizer.encode(text)
        assert tokenizer.eos_token_ids == checkpoint.tokenizer.eos_token_ids
        theirs = AutoTokenizer.from_pretrained(tmp_path / "m")
        assert theirs.encode("x = 1", add_special_tokens=False) == tokenizer.encode("x = 1")

    @pytest.mark.parametrize("variant", TRAINED)
    def test_its_configuration_is_the_bases(self, variant: str, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(write_variant(variant, tmp_path / "base"))
        model = load_base_model(checkpoint, torch.float32)
        format = format_of(checkpoint)
        write_model(tmp_path / "m", model, checkpoint, format, record_of(checkpoint), "")
        assert open_checkpoint(tmp_path / "m").config == checkpoint.config


def test_suffix_first_formats_are_not_recorded(tiny: Checkpoint) -> None:
    special = tiny.tokenizer.special_tokens
    suffix_first = custom_format(*FIM, special, order="spm")
    assert "fim" not in adapter_record(tiny, suffix_first, 0, False)
    record = adapter_record(tiny, custom_format(*FIM, special), 0, False, data={"documents": 3})
    assert record["base"]["name"] == "tiny-llama"
    named = adapter_record(tiny, suffix_first, 0, False, name="org/tiny")
    assert named["base"]["name"] == "org/tiny"
    assert record["fragments"] is False
    assert record["data"] == {"documents": 3}


CARD_RECORD: dict[str, Any] = {
    "base": {"name": "tiny", "digest": "0" * 64, "licence": "Apache-2.0"},
    "fim": {"prefix": "<a>", "suffix": "<b>", "middle": "<c>", "stop": ["<end>"]},
    "fragments": True,
    "training": {"steps": 12},
    "data": {"licences": {"MIT": 3, "ISC": 1}},
    "recipe": {"rank": 4, "data": {"line": 0.5}},
}


def test_an_adapters_card_says_what_was_trained_on_what() -> None:
    card = model_card(CARD_RECORD, adapter=True)
    head = card.split("---\n")[1].splitlines()
    assert head[:3] == ["library_name: peft", "base_model: tiny", "license: apache-2.0"]
    assert "# tiny, taught to infill" in card
    assert "midfill serve tiny --adapter FOLDER" in card
    assert "`<a>` prefix[:k] `<b>` suffix `<c>` prefix[k:]" in card
    assert "ends with `<end>`" in card
    assert "arXiv 2505.21889" in card
    for row in ("| steps | 12 |", "| licences.MIT | 3 |", "| rank | 4 |", "| data.line | 0.5 |"):
        assert row in card
    assert max(map(len, card.splitlines())) < 130


def test_a_models_card_says_how_to_serve_it() -> None:
    card = model_card({**CARD_RECORD, "fragments": False}, adapter=False)
    assert "library_name: transformers" in card
    assert "`midfill serve FOLDER` runs it" in card
    assert "tokenised as a whole" in card


def test_the_card_of_a_base_without_licence_and_with_its_own_format() -> None:
    record = {**CARD_RECORD, "base": {"name": "tiny", "licence": None}}
    del record["fim"]
    card = model_card(record, adapter=True)
    assert "license: unknown" in card
    assert "the base's own infilling format" in card
