"""Models of a larger shape with random weights."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tiny_gguf import write_gguf

from benchmarks.shapes import Shape, random_model, write_random_model
from midfill.errors import MidfillError
from midfill.models.checkpoints.gguf_file import GgufFile
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import Experts, LatentAttention
from midfill.runners.cpu.packed_model import load_packed
from midfill_lab.bench.peers.measure import Programs, compare_peers
from midfill_lab.bench.peers.results import PeersOptions
from midfill_lab.bench.peers.servers import ComparedModel, open_compared

pytestmark = pytest.mark.usefixtures("small_roofline")

OPTIONS = PeersOptions(
    loads=("prefill",), prefill=(32,), repeats=1, start_limit=200.0, load_limit=200.0
)
SHAPE = Shape(
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
        shape = replace(SHAPE, experts=experts)
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
        shape = replace(SHAPE, kv_heads=1, experts=experts, latent=latent)
        write_random_model(shape, GgufFile(gguf_model.gguf), tmp_path / "latent.gguf")
        checkpoint = open_checkpoint(tmp_path / "latent.gguf")
        assert checkpoint.config.latent == latent
        assert checkpoint.config.experts == experts
        assert checkpoint.tensor("layers.0.up.weight").shape == (96, 64)
        assert checkpoint.tensor("layers.1.shared.up.weight").shape == (64, 64)
        assert "experts_in" in load_packed(checkpoint, folder=tmp_path).matrices

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

    def test_an_unknown_shape(self) -> None:
        with pytest.raises(MidfillError, match=r"there is no shape 3b; there are 1\.5b, .*7b"):
            random_model("3b")
