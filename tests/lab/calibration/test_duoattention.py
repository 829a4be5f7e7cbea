"""DuoAttention's gates are trained on recall alone."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoints import write_tiny, write_variant

from midfill.errors import InvalidRequestError
from midfill.methods.evict.duoattention import (
    retrieval_heads,
)
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.torch.decoder import Decoder, KVCache
from midfill.runners.torch.weights import load_weights
from midfill_lab.calibration.duoattention import GatedDecoder, GateTraining, GateTrainingWork

# Random weights make any change of attention a large one, so the penalty has to be large, too.
SMALL = GateTraining(
    steps=30, tokens=100, passkeys=2, words=2, sinks=2, recent=8, rate=0.05, penalty=4.0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Texts are hundreds of the tiny tokenizer's tokens.
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    return write_tiny("llama", folder, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def work(folder: Path) -> GateTrainingWork:
    return SMALL.open(open_checkpoint(folder), lambda *_: None)


def test_texts_ask_for_what_is_far_back_and_only_that_is_supervised(
    work: GateTrainingWork, folder: Path
) -> None:
    tokenizer = open_checkpoint(folder).tokenizer
    for number in range(5):
        text = work.text(number)
        again = work.text(number)
        assert text.token_ids.tolist() == again.token_ids.tolist()
        ids = text.token_ids.tolist()
        hay, asked = (
            b"".join(map(tokenizer.token_bytes, part)).decode(errors="replace")
            for part in (ids[: -text.questions], ids[-text.questions :])
        )
        assert asked.startswith("\n# What is the first passkey?\n# The first passkey is ")
        for name in ("first", "second"):
            statement = f"# The {name} passkey is "
            key = asked.split(statement)[1].split(".")[0]
            assert len(key.split()) == 2
            assert f"{statement}{key}." in hay
    assert work.text(0).token_ids.tolist() != work.text(1).token_ids.tolist()


def test_gates_of_one_are_the_model_and_gates_of_zero_stream(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    weights = load_weights(checkpoint, torch.device("cpu"), torch.float32)
    config = checkpoint.config
    gated = GatedDecoder(config, weights, sinks=2, recent=8)
    text = GateTrainingWork(SMALL, config, weights, checkpoint.tokenizer).text(0)
    ones = torch.ones(config.layers, config.kv_heads)
    with torch.no_grad():
        assert gated.distillation_loss(text, ones).item() < 1e-10
        found = gated._last_hidden(text, torch.zeros_like(ones))
        expected = naive_streaming(config, weights, text.token_ids, sinks=2, recent=8)
    torch.testing.assert_close(found, expected[-text.questions :], atol=1e-4, rtol=1e-4)


def naive_streaming(
    config: object, weights: object, token_ids: np.ndarray, sinks: int, recent: int
) -> torch.Tensor:
    """Last hidden states where each row sees the sinks and the last ``recent`` keys."""

    class Naive(Decoder):
        def attend(self, index, q, k, v, batch):  # type: ignore[no-untyped-def]
            group = self.config.query_heads // self.config.kv_heads
            out = torch.zeros_like(q)
            for row in range(len(q)):
                seen = [i for i in range(row + 1) if i < sinks or i > row - recent]
                for head in range(self.config.query_heads):
                    keys, values = k[seen, head // group], v[seen, head // group]
                    scores = keys @ q[row, head] * self.config.score_scale
                    out[row, head] = scores.softmax(0) @ values
            return out

    decoder = Naive(config, weights, KVCache.empty(config, 1, torch.device("cpu"), torch.float32))
    count = len(token_ids)
    numbers, ends = np.arange(count, dtype=np.int32), np.array([0, count], np.int32)
    nothing = np.zeros(0, np.int32)
    batch = ForwardBatch(token_ids, numbers, numbers, ends, ends, numbers, nothing)
    hidden = decoder.run_layers(decoder.prepare(batch), decoder.embed(batch), 0, config.layers)
    return decoder._norm(hidden, weights.final_norm)


def test_training_changes_the_gates_alone_and_finds_heads_that_can_stream(
    work: GateTrainingWork,
) -> None:
    weights = work._decoder.weights
    before = [layer.qkv.weight.clone() for layer in weights.layers]
    tables = work.start()
    for number in range(SMALL.steps):
        tables = work.step(number, tables)
    for layer, old in zip(weights.layers, before, strict=True):
        assert torch.equal(layer.qkv.weight, old)
        assert not layer.qkv.weight.requires_grad
    gates = tables["gates"]
    assert ((gates >= 0) & (gates <= 1)).all()
    assert gates.min() < 0.7
    assert len(set(gates.reshape(-1).tolist())) > 1
    assert len(tables["losses"]) == SMALL.steps
    assert tables["losses"][0] < 1e-10, "it starts as the model itself"
    texts = [work.text(1000 + number) for number in range(3)]

    def loss(chosen: np.ndarray) -> float:
        chosen_gates = torch.from_numpy(chosen.reshape(gates.shape)).float()
        with torch.no_grad():
            return sum(work._decoder.distillation_loss(text, chosen_gates).item() for text in texts)

    half = gates.size // 2
    random = []
    for whole in combinations(range(gates.size), half):
        chosen = np.zeros(gates.size)
        chosen[list(whole)] = 1.0
        random.append(loss(chosen))
    assert loss(retrieval_heads(gates, 0.5).astype(float)) < np.mean(random)


def test_a_training_without_penalty_has_no_reason_to_change(folder: Path) -> None:
    training = GateTraining(steps=3, tokens=60, passkeys=1, words=1, penalty=0.0)
    work = training.open(open_checkpoint(folder), lambda *_: None)
    tables = work.start()
    for number in range(3):
        tables = work.step(number, tables)
    assert tables["gates"].min() > 0.9


def test_the_learning_rate_rises_stays_and_falls() -> None:
    training = GateTraining(steps=100, rate=1.0)
    rates = [training.rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[19:81] == [1.0] * 62
    assert rates[10] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates == sorted(rates[:50]) + sorted(rates[50:], reverse=True)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"passkeys": 11}, "at most 10 passkeys"),
        ({"rate": 0.0}, "rate must be above 0"),
    ],
)
def test_settings_of_a_training_that_make_no_sense_are_refused(
    fields: dict[str, float], error: str
) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        GateTraining(**fields)


def test_texts_that_are_too_short_for_their_passkeys_are_refused(folder: Path) -> None:
    work = GateTraining(tokens=20).open(open_checkpoint(folder), lambda *_: None)
    with pytest.raises(InvalidRequestError, match="too short for its passkeys"):
        work.text(0)


def test_models_whose_layers_see_a_window_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("mistral", tmp_path / "mistral"))
    with pytest.raises(InvalidRequestError, match="whole text"):
        GateTraining().open(checkpoint, lambda *_: None)
