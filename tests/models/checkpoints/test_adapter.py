"""Adapter: what PEFT writes is read, and what doesn't fit is refused in one line that says why."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_adapters import END_OF_TEXT, FIM, edit_config, edit_tensors, write_adapter, write_record
from tiny_checkpoints import VOCAB, write_tiny, write_variant

from midfill.config import FimTokens
from midfill.errors import CheckpointError, MidfillError, ModelNotFoundError
from midfill.models.checkpoints.adapter import WEIGHTS_FILE, AdapterRecord, load_adapter
from midfill.models.checkpoints.lora_merge import update_matrix
from midfill.models.checkpoints.opening import open_checkpoint, open_model

LAYERS, HIDDEN, FFN = 3, 64, 160
Q_DOWN = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_UP = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
TOKENS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "tiny-fim"
    write_adapter(base, folder, trainable_token_indices=[3, 1])
    write_record(folder, base)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(written, tmp_path / "tiny-fim"))


def test_what_peft_writes_is_read(base: Path, written: Path) -> None:
    checkpoint = open_checkpoint(base)
    adapter = load_adapter(written, checkpoint)
    assert adapter.name == "tiny-fim"
    assert len(adapter.updates) == 7 * LAYERS
    update = adapter.updates["layers.1.down.weight"]
    assert (update.down.shape, update.up.shape) == ((4, FFN), (HIDDEN, 4))
    assert update.down.dtype == update.up.dtype == np.float32
    assert update.scale == 8 / 4
    np.testing.assert_allclose(
        update_matrix(update), 2 * update.up @ update.down, rtol=1e-5, atol=1e-6
    )
    rows = adapter.rows["embed.weight"]
    assert rows.token_ids == (3, 1)
    assert rows.values.shape == (2, HIDDEN)
    assert adapter.record.fim_tokens == FimTokens(FIM["prefix"], FIM["suffix"], FIM["middle"])
    assert adapter.record.stop_tokens == (END_OF_TEXT,)
    assert adapter.record.fragments
    assert adapter.record.base_digest == checkpoint.content_digest


def test_an_adapter_without_a_record_names_no_fim_tokens(base: Path, folder: Path) -> None:
    (folder / "midfill.json").unlink()
    adapter = load_adapter(folder, open_checkpoint(base))
    assert adapter.record == AdapterRecord()


def test_ranks_and_scales_of_single_modules(base: Path, tmp_path: Path) -> None:
    write_adapter(
        base,
        tmp_path,
        use_rslora=True,
        rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.up_proj": 8},
        alpha_pattern={"mlp.*": 3},
    )
    updates = load_adapter(tmp_path, open_checkpoint(base)).updates
    assert updates["layers.0.q.weight"].down.shape == (2, HIDDEN)
    assert updates["layers.0.q.weight"].scale == pytest.approx(8 / 2**0.5)
    assert updates["layers.1.up.weight"].up.shape == (FFN, 8)
    assert updates["layers.1.up.weight"].scale == pytest.approx(3 / 8**0.5)
    assert updates["layers.2.k.weight"].scale == pytest.approx(8 / 4**0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(base: Path, folder: Path, dtype: torch.dtype) -> None:
    exact = load_adapter(folder, open_checkpoint(base))
    edit_tensors(folder, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})
    rounded = load_adapter(folder, open_checkpoint(base))
    for name, update in exact.updates.items():
        assert rounded.updates[name].up.dtype == np.float32
        np.testing.assert_allclose(rounded.updates[name].up, update.up, rtol=2**-8, atol=1e-6)
    assert rounded.fingerprint != exact.fingerprint


def test_float8_becomes_float32(base: Path, folder: Path) -> None:
    def every_pattern(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        up = tensors[Q_UP]
        patterns = torch.arange(up.numel()).remainder(256).to(torch.uint8)
        patterns[patterns.remainder(128) == 127] = 0  # not a number
        return tensors | {Q_UP: patterns.view(torch.float8_e4m3fn).view(up.shape)}

    edit_tensors(folder, every_pattern)
    (expected,) = (t for name, t in load_file(folder / WEIGHTS_FILE).items() if name == Q_UP)
    up = load_adapter(folder, open_checkpoint(base)).updates["layers.0.q.weight"].up
    assert up.dtype == np.float32
    np.testing.assert_array_equal(up, expected.float().numpy())


def test_the_older_name_of_token_rows_is_read(base: Path, folder: Path) -> None:
    expected = load_adapter(folder, open_checkpoint(base)).rows["embed.weight"]
    edit_tensors(folder, lambda t: {n.replace(".token_adapter", ""): v for n, v in t.items()})
    rows = load_adapter(folder, open_checkpoint(base)).rows["embed.weight"]
    np.testing.assert_array_equal(rows.values, expected.values)


def test_the_fingerprint_changes_with_the_weights(base: Path, folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(base)
    first = load_adapter(folder, checkpoint).fingerprint
    (folder / "README.md").write_text("other words")
    write_record(folder, base, training={"seconds": 5})
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert load_adapter(moved, checkpoint).fingerprint == first
    edit_config(folder, {"lora_alpha": 9})
    assert load_adapter(folder, checkpoint).fingerprint != first


class TestContentDigest:
    def test_the_digest_is_independent_of_the_path(self, base: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in base.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        assert open_checkpoint(copy).content_digest == open_checkpoint(base).content_digest
        assert open_checkpoint(copy).fingerprint != open_checkpoint(base).fingerprint

    def test_the_digest_differs_for_other_weights_or_kinds(
        self, base: Path, tmp_path: Path
    ) -> None:
        from safetensors.torch import load_file, save_file

        digests = {open_checkpoint(base).content_digest}
        edits: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda t: t * 1.001,
            lambda t: t.half(),
            lambda t: torch.cat([t.reshape(-1)[:-1], t.reshape(-1)[:1]]).reshape(t.shape),
        ]
        for number, edit in enumerate(edits):
            copy = Path(shutil.copytree(base, tmp_path / str(number)))
            tensors = load_file(copy / "model.safetensors")
            name = "model.layers.2.mlp.up_proj.weight"
            tensors[name] = edit(tensors[name])
            save_file(tensors, copy / "model.safetensors")
            digests.add(open_checkpoint(copy).content_digest)
        assert len(digests) == 1 + len(edits)


def refusal(base: Path, folder: Path, error: type[MidfillError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        load_adapter(folder, open_checkpoint(base))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; midfill merges LORA only"),
        ({"peft_type": None}, "peft_type is None"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"init_lora_weights": "pissa"}, "'pissa' changes the base's own weights"),
        ({"r": 5}, r"has shape \[4, \d+\], the base and adapter_config.json ask for \[5, \d+\]"),
        ({"r": 0}, "a rank r of 0 is not possible"),
        ({"r": "four"}, "r must be a number, not 'four'"),
        ({"lora_alpha": None}, "lora_alpha must be a number, not None"),
        ({"rank_pattern": {"q_proj": 2.5}}, "a rank r of 2.5 is not possible"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern has the pattern '\('"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"trainable_token_indices": None}, "does not list the tokens of 'model.embed_tokens'"),
        ({"trainable_token_indices": {"lm_head": [1]}}, "does not list the tokens of"),
        ({"trainable_token_indices": [1, VOCAB]}, f"names token {VOCAB}, the base's go from 0"),
        ({"trainable_token_indices": [1, 1]}, "repeats a token"),
        ({"trainable_token_indices": [1, 2, 3]}, r"has shape \[2, 64\].*ask for \[3, 64\]"),
    ],
)
def test_invalid_configurations_are_refused(
    base: Path, folder: Path, fields: dict[str, Any], problem: str
) -> None:
    edit_config(folder, fields)
    assert re.search(problem, refusal(base, folder))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({Q_DOWN: torch.zeros(4, 65)}, r"shape \[4, 65\], the base and .* ask for \[4, 64\]"),
        ({Q_UP: torch.zeros(64, 4)}, r"has shape \[64, 4\], the base and .* ask for \[128, 4\]"),
        ({Q_UP: None}, r"q_proj.lora_A.weight' has no lora_B beside it"),
        ({Q_DOWN: None}, r"q_proj.lora_B.weight' has no lora_A beside it"),
        ({Q_UP: torch.zeros(128, 4, dtype=torch.float64)}, "has type F64; midfill reads"),
        (
            {Q_DOWN.replace("layers.0", "layers.3"): torch.zeros(4, 64)},
            r"layers\.3\..* fits nothing: the base has 3 layers",
        ),
        (
            {Q_DOWN.replace("q_proj", "qkv_proj"): torch.zeros(4, 64)},
            "fits nothing: a llama model has no such layer",
        ),
        (
            {"base_model.model.model.embed_tokens.weight": torch.zeros(VOCAB, 64)},
            "embed_tokens.weight' is no part of a plain LoRA",
        ),
        ({Q_DOWN.replace("lora_A", "lora_magnitude_vector"): torch.ones(4)}, "is no part of a"),
        ({TOKENS: torch.zeros(2, 32)}, r"has shape \[2, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    base: Path, folder: Path, changed: dict[str, torch.Tensor | None], problem: str
) -> None:
    edit_tensors(
        folder, lambda t: {n: v for n, v in (t | changed).items() if isinstance(v, torch.Tensor)}
    )
    assert re.search(problem, refusal(base, folder))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"format": 2}, "format 2 is not known; this midfill reads 1"),
        ({"base": "tiny"}, "'base' must be an object with a 'digest'"),
        ({"fim": "psm"}, "'fim' must name the tokens"),
        ({"fim": FIM | {"prefix": None}}, "'fim' must name the tokens"),
        ({"fim": FIM | {"middle": "<nope>"}}, "'<nope>' is not a special token of"),
        ({"fim": FIM | {"stop": ["<nope>"]}}, "'<nope>' is not a special token of"),
        ({"fim": FIM | {"suffix": FIM["prefix"]}}, "prefix, suffix and middle must differ"),
        ({"fragments": "yes"}, "'fragments' must be true or false"),
        ({"rounding": "up"}, "'rounding' must be one of nearest, diffusion, stochastic, not 'up'"),
    ],
)
def test_invalid_records_are_refused(
    base: Path, folder: Path, fields: dict[str, Any], problem: str
) -> None:
    write_record(folder, base, **fields)
    assert re.search(problem, refusal(base, folder))


def test_an_adapter_of_another_base_names_both(base: Path, folder: Path, tmp_path: Path) -> None:
    other = write_tiny("llama", tmp_path / "other", attention_bias=True)
    message = refusal(other, folder)
    for named in ("tiny", str(other), "--adapter none"):
        assert named in message
    for model in (base, other):
        assert open_checkpoint(model).content_digest[:12] in message


def test_a_lora_on_a_tied_head_or_the_embedding(tmp_path: Path) -> None:
    tied = write_variant("llama-tied", tmp_path / "base")
    folder = write_adapter(tied, tmp_path / "lora")
    down, up = torch.zeros(4, HIDDEN), torch.zeros(VOCAB, 4)
    head = {
        f"base_model.model.lm_head.lora_{side}.weight": t for side, t in (("A", down), ("B", up))
    }
    edit_tensors(folder, lambda tensors: tensors | head)
    assert "the base's LM head is its embedding" in refusal(tied, folder)
    shutil.rmtree(folder)
    write_adapter(tied, folder)
    embedding = {name.replace("lm_head", "model.embed_tokens"): t for name, t in head.items()}
    edit_tensors(folder, lambda tensors: tensors | embedding)
    assert "is a LoRA on the embedding" in refusal(tied, folder)


def test_an_expert_is_a_module_like_any_other(tmp_path: Path) -> None:
    base = write_variant("qwen3moe", tmp_path / "base")
    folder = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    module = "base_model.model.model.layers.0.mlp.experts.3.up_proj"
    halves = {"lora_A": torch.ones(4, HIDDEN), "lora_B": torch.ones(96, 4)}

    added = {f"{module}.{side}.weight": half for side, half in halves.items()}
    edit_tensors(folder, lambda tensors: tensors | added)
    plain, adapted = open_checkpoint(base), open_model(base, folder)
    for expert, change in ((3, 8.0), (2, 0.0)):
        name = f"layers.0.experts.{expert}.up.weight"
        before, after = (each.tensor(name).to_float32() for each in (plain, adapted))
        np.testing.assert_allclose(after - before, change, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3next", "qwen35"])
def test_modules_of_several_tensors_change_each_in_its_own_order(
    family: str, tmp_path: Path
) -> None:
    """What is merged is the model whose stored matrices were changed."""
    base = write_variant(family, tmp_path / "base")
    folder = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    stored = load_file(base / "model.safetensors")
    names = {
        name: theirs
        for name, theirs in stored.items()
        if re.search(
            r"layers\.1\.self_attn\.[qkvo]_proj|layers\.2\.linear_attn\.(in|out)_proj", name
        )
    }
    assert len(names) in (7, 9)
    tensors = {}
    for name, theirs in names.items():
        halves = torch.randn(4, theirs.shape[1]), torch.randn(len(theirs), 4)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {
            f"{module}.lora_{side}.weight": half for side, half in zip("AB", halves, strict=True)
        }
        stored[name] = theirs + 2.0 * halves[1] @ halves[0]  # lora_alpha / rank
    edit_tensors(folder, lambda _: tensors)
    changed = Path(shutil.copytree(base, tmp_path / "changed"))
    save_file(stored, changed / "model.safetensors")
    adapted, expected = open_model(base, folder), open_checkpoint(changed)
    for name in expected.names():
        found = adapted.tensor(name).to_float32()
        np.testing.assert_allclose(found, expected.tensor(name).to_float32(), atol=1e-4)


def test_missing_or_broken_files_are_named(base: Path, folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert "no such folder" in refusal(base, missing, ModelNotFoundError)
    assert "no adapter_config.json" in refusal(base, tmp_path, ModelNotFoundError)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:-100])
    assert "truncated" in refusal(base, folder)
    for length in (0, 5, 100):
        weights.write_bytes(whole[:length])
        assert weights.name in refusal(base, folder)
    weights.unlink()
    assert "holds no adapter_model.safetensors" in refusal(base, folder)
    config.write_text(text[:-20])
    weights.write_bytes(whole)
    assert "not valid JSON" in refusal(base, folder)
    config.write_text(text)
    (folder / "midfill.json").write_text("[]")
    assert "must hold a JSON object" in refusal(base, folder)
