"""Models of a larger shape with random weights."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from packed_steps import Sequence, Stepper
from tiny_gguf import write_gguf

from benchmarks.shapes.layer_tensors import weights_of
from benchmarks.shapes.random_model import random_model, write_random_model
from benchmarks.shapes.shape import SHAPES, Shape
from midfill.errors import MidfillError
from midfill.models.altup import AltUp
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import DeltaRule, Experts, LatentAttention, StateSpace
from midfill.runners.cpu.packed_model import load_packed
from midfill.runners.cpu.runner import CpuRunner
from midfill_lab.bench.peers.measure import Programs, compare_peers
from midfill_lab.bench.peers.results import PeersOptions
from midfill_lab.bench.peers.servers import ComparedModel, open_compared
from serving import torch_runner

pytestmark = pytest.mark.usefixtures("small_roofline")

OPTIONS = PeersOptions(
    loads=("prefill",), prefill=(32,), repeats=1, start_limit=200.0, load_limit=200.0
)
SHAPE = Shape(
    architecture="llama",
    layers=2,
    hidden=64,
    query_heads=2,
    kv_heads=1,
    head_dim=32,
    ffn=96,
    vocab=800,
    context=512,
    rope_base=1e4,
)


@pytest.fixture(scope="module")
def gguf_model(tmp_path_factory: pytest.TempPathFactory) -> ComparedModel:
    """A tiny model as a GGUF file."""
    return open_compared(str(write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")), None)


@pytest.fixture(scope="module")
def random_gguf(gguf_model: ComparedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and the tokenizer of ``gguf_model``."""
    assert gguf_model.gguf is not None
    path = tmp_path_factory.mktemp("random") / "random.gguf"
    write_random_model(SHAPE, GgufFile(gguf_model.gguf), path)
    return path


def assert_kernels_compute_what_pytorch_does(checkpoint: Checkpoint) -> None:
    """All but the rounding of activations to int8."""
    tokens = list(range(10, 30))
    expected = Stepper(torch_runner(checkpoint, slots=64)).prefill(Sequence(tokens))
    runner = CpuRunner.load(checkpoint, slots=64, threads=2)
    found = Stepper(runner).prefill(Sequence(tokens))
    runner.close()
    assert expected.std() > 0
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < 0.06


class TestRandomModels:
    def test_it_has_the_shape_and_the_kinds(self, random_gguf: Path) -> None:
        model = open_compared(str(random_gguf), None, random_weights=True)
        config = model.checkpoint.config
        assert (config.layers, config.hidden, config.ffn, config.vocab) == (2, 64, 96, 800)
        assert (config.query_heads, config.kv_heads, config.head_dim) == (2, 1, 32)
        assert config.tied_embeddings
        assert model.stored_kinds == "q4_0, embedding q8_0"
        weights = model.checkpoint.tensor("layers.1.down.weight").to_float32()
        assert weights.std() == pytest.approx(0.02, rel=0.05)

    def test_k_quants_are_mixed_as_in_q4_k_m(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        assert gguf_model.gguf is not None
        shape = replace(SHAPE, layers=8, hidden=256, head_dim=128, ffn=512, k_quants=True)
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "k.gguf")
        checkpoint = open_checkpoint(tmp_path / "k.gguf")
        down = [checkpoint.tensor(f"layers.{layer}.down.weight") for layer in range(8)]
        precise = [layer for layer, tensor in enumerate(down) if tensor.kind == "q6_k"]
        assert precise == [0, 3, 6, 7]
        assert checkpoint.tensor("layers.3.v.weight").kind == "q6_k"
        assert checkpoint.tensor("layers.3.up.weight").kind == "q4_k"
        assert checkpoint.tensor("embed.weight").kind == "q6_k"
        for tensor in down[:2]:
            assert tensor.to_float32().std() == pytest.approx(0.02, rel=0.05)
            assert abs(tensor.to_float32().mean()) < 0.001

    def test_experts_are_those_of_a_qwen3_moe(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        assert gguf_model.gguf is not None
        experts = Experts(count=6, per_token=2, ffn=32, normalised=True)
        shape = replace(SHAPE, architecture="qwen3moe", experts=experts)
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "experts.gguf")
        checkpoint = open_checkpoint(tmp_path / "experts.gguf")
        assert checkpoint.config.experts == experts
        assert checkpoint.config.qk_norm
        assert not checkpoint.config.tied_embeddings
        for name in ("experts.5.down", "router"):
            weights = checkpoint.tensor(f"layers.1.{name}.weight").to_float32()
            assert weights.std() == pytest.approx(0.02, rel=0.1)

    def test_latents_are_those_of_a_deepseek_v2(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        assert gguf_model.gguf is not None
        experts = Experts(
            count=6,
            per_token=2,
            ffn=32,
            normalised=False,
            shared_ffn=64,
            shared_gated=False,
            dense_layers=(0,),
        )
        latent = LatentAttention(
            query_rank=0, rank=64, plain_dim=32, rotary_dim=64, value_dim=32, stored_apart=True
        )
        shape = replace(SHAPE, architecture="deepseek2", experts=experts, latent=latent)
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "latent.gguf")
        checkpoint = open_checkpoint(tmp_path / "latent.gguf")
        assert checkpoint.config.latent == latent
        assert checkpoint.config.experts == experts
        assert checkpoint.tensor("layers.0.up.weight").shape == (96, 64)
        assert checkpoint.tensor("layers.1.shared.up.weight").shape == (64, 64)
        assert "experts_in" in load_packed(checkpoint, folder=tmp_path).matrices

    def test_a_window_beside_experts_is_a_gpt_oss(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        assert gguf_model.gguf is not None
        experts = Experts(count=6, per_token=2, ffn=32, normalised=True, router_bias=True)
        shape = replace(SHAPE, architecture="gpt-oss", layers=4, experts=experts, window=16)
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "oss.gguf")
        checkpoint = open_checkpoint(tmp_path / "oss.gguf")
        config = checkpoint.config
        assert (config.family, config.experts) == ("gpt-oss", experts)
        assert (config.sinks, config.qkv_bias, config.mlp_bias) == (True, True, True)
        assert [config.window_of(layer) for layer in range(4)] == [16, None, 16, None]
        assert (config.rope_scaling.kind, config.context) == ("yarn", 512)
        assert checkpoint.kind("layers.1.experts.5.down.weight") == "mxfp4"
        assert checkpoint.kind("layers.1.q.weight") == "q8_0"
        weights = checkpoint.tensor("layers.1.experts.5.up.weight").to_float32()
        assert weights.std() == pytest.approx(0.023, rel=0.05)
        assert checkpoint.tensor("layers.1.experts.5.up.bias").to_float32().any()
        assert_kernels_compute_what_pytorch_does(checkpoint)

    def test_a_state_space_is_a_granite_hybrid(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        assert gguf_model.gguf is not None
        space = StateSpace(layers=(0, 2), heads=4, head_dim=32, state_dim=32, conv_width=4)
        shape = replace(SHAPE, architecture="granitehybrid", layers=3, states=space)
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "hybrid.gguf")
        checkpoint = open_checkpoint(tmp_path / "hybrid.gguf")
        config = checkpoint.config
        assert (config.family, config.attention_layers) == ("granitehybrid", (1,))
        assert config.state_space == replace(space, logarithmic=False)
        assert not config.has_rope
        assert config.residual_multiplier == pytest.approx(0.22)
        assert (checkpoint.tensor("layers.0.ssm.A").to_float32() <= -1).all()
        steps = np.log1p(np.exp(checkpoint.tensor("layers.0.ssm.dt_bias").to_float32()))
        assert ((steps > 0.0009) & (steps < 0.11)).all()
        assert_kernels_compute_what_pytorch_does(checkpoint)

    def test_the_delta_rule_beside_experts_is_a_qwen3_next(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        assert gguf_model.gguf is not None
        experts = Experts(count=6, per_token=2, ffn=32, normalised=True, shared_ffn=32)
        rule = DeltaRule(
            layers=(0, 1, 2), heads=4, head_dim=32, state_dim=32, conv_width=4, key_heads=2
        )
        shape = replace(SHAPE, architecture="qwen3next", layers=4, experts=experts, states=rule)
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "next.gguf")
        checkpoint = open_checkpoint(tmp_path / "next.gguf")
        config = checkpoint.config
        assert (config.family, config.experts) == ("qwen3next", experts)
        assert config.state_space == replace(rule, logarithmic=False)
        assert (config.gated_attention, config.rotary_dim) == (True, 8)
        assert_kernels_compute_what_pytorch_does(checkpoint)

    def test_norms_of_all_heads_are_an_olmo2(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        assert gguf_model.gguf is not None
        shape = replace(SHAPE, architecture="olmo2")
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "olmo.gguf")
        checkpoint = open_checkpoint(tmp_path / "olmo.gguf")
        assert checkpoint.config.family == "olmo2"
        assert checkpoint.config.joint_qk_norm
        assert not checkpoint.config.tied_embeddings
        assert_kernels_compute_what_pytorch_does(checkpoint)

    def test_streams_of_rows_are_a_gemma_3n(
        self, gguf_model: ComparedModel, tmp_path: Path
    ) -> None:
        assert gguf_model.gguf is not None
        altup = AltUp(laurel_rank=32, layer_width=32, layer_vocab=SHAPE.vocab)
        shape = replace(
            SHAPE, architecture="gemma3n", layers=12, window=16, altup=altup, kv_sharing_layers=4
        )
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "gemma.gguf")
        checkpoint = open_checkpoint(tmp_path / "gemma.gguf")
        config = checkpoint.config
        assert (config.family, config.altup) == ("gemma3n", altup)
        assert config.kv_layers == tuple(range(8))
        assert [config.window_of(layer) for layer in (3, 4)] == [16, None]
        assert sum(cutoff is not None for cutoff in config.gate_cutoffs) == 10
        assert_kernels_compute_what_pytorch_does(checkpoint)

    @pytest.mark.parametrize(
        ("name", "weights"),
        [
            ("gpt-oss-20b", 20.9e9),
            ("granite-4.0-h-micro", 3.2e9),
            ("qwen3-next-80b-a3b", 79.7e9),
            ("olmo2-7b", 7.3e9),
            ("gemma-3n-e2b", 4.46e9),
        ],
    )
    def test_shapes_have_as_many_weights_as_their_models(self, name: str, weights: float) -> None:
        assert weights_of(SHAPES[name]) == pytest.approx(weights, rel=0.005)

    def test_the_tokenizer_is_the_other_models(
        self, random_gguf: Path, gguf_model: ComparedModel
    ) -> None:
        random = open_checkpoint(random_gguf)
        text = "def caf\u00e9(x):\n    return [x, 2]\n<fim_prefix>"
        for parse in (False, True):
            expected = gguf_model.checkpoint.tokenizer.encode(text, parse_special=parse)
            assert random.tokenizer.encode(text, parse_special=parse) == expected

    def test_special_and_unused_tokens_are_never_most_likely(
        self, random_gguf: Path, gguf_model: ComparedModel
    ) -> None:
        random = open_checkpoint(random_gguf)
        embedding = random.tensor("embed.weight").to_float32()
        special = list(gguf_model.checkpoint.tokenizer.special_tokens.values())
        count = gguf_model.checkpoint.config.vocab
        assert not embedding[special].any()
        assert not embedding[count:].any()
        assert embedding[:count].any(axis=1).sum() == count - len(special)

    def test_the_same_bytes_every_time(self, random_gguf: Path, gguf_model: ComparedModel) -> None:
        assert gguf_model.gguf is not None
        again = random_gguf.with_name("again.gguf")
        write_random_model(SHAPE, GgufFile(gguf_model.gguf), again)
        assert again.read_bytes() == random_gguf.read_bytes()

    def test_drafts_play_no_part_where_answers_only_repeat(self, random_gguf: Path) -> None:
        model = open_compared(str(random_gguf), None, random_weights=True)
        options = msgspec.structs.replace(OPTIONS, servers=("midfill",))
        report = compare_peers(model, options, Programs())
        assert [server.name for server in report.servers] == ["midfill"]
        assert "--no-speculation" in report.servers[0].settings
        assert not report.servers[0].error

    def test_layers_are_never_cut_to_those_without_kv(self) -> None:
        with pytest.raises(
            MidfillError,
            match="no layer that keeps KV of its own in its first 4 layers: --layers 6",
        ):
            random_model("granite-4.0-h-micro", layers=4)

    def test_an_unknown_shape(self) -> None:
        with pytest.raises(MidfillError, match=r"there is no shape 3b; there are 1\.5b, .*7b"):
            random_model("3b")
