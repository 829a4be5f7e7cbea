"""The decoder runs in ranges of layers, and writes the KV cache that a runner relies on."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from tiny_checkpoints import write_tiny

from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.rope import rope_tables
from midfill.runners.torch.decoder import Decoder
from midfill.runners.torch.runner import TorchRunner, load_torch_runner


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def stepper(tmp_path: Path) -> Stepper:
    return Stepper(load_torch_runner(open_checkpoint(write_tiny("llama", tmp_path)), slots=64))


@pytest.fixture
def decoder(stepper: Stepper) -> Decoder:
    assert isinstance(stepper.runner, TorchRunner)
    return stepper.runner.decoder


@pytest.fixture
def batch(stepper: Stepper) -> ForwardBatch:
    return stepper.pack([(Sequence([5, 6, 7, 8, 9]), 5), (Sequence([10, 11, 12]), 3)])


def test_layers_run_in_ranges(stepper: Stepper, decoder: Decoder, batch: ForwardBatch) -> None:
    whole = stepper.runner.forward(batch)
    prepared = decoder.prepare(batch)
    hidden = decoder.embed(batch)
    for first, end in ((0, 1), (1, 1), (1, 3)):
        hidden = decoder.run_layers(prepared, hidden, first, end)
    np.testing.assert_array_equal(decoder.compute_logits(batch, hidden).numpy(), whole)


def test_a_layer_can_be_skipped(decoder: Decoder, batch: ForwardBatch) -> None:
    prepared = decoder.prepare(batch)
    hidden = decoder.run_layers(prepared, decoder.embed(batch), 0, 1)
    hidden = decoder.run_layers(prepared, hidden, 2, 3)
    assert decoder.compute_logits(batch, hidden).isfinite().all()
    assert not decoder.kv_cache.keys[1].any()


def test_only_the_slots_to_write_are_written(decoder: Decoder, batch: ForwardBatch) -> None:
    decoder.run_layers(decoder.prepare(batch), decoder.embed(batch), 0, 3)
    written = torch.zeros(64, dtype=torch.bool)
    written[torch.from_numpy(batch.write_slots).long()] = True
    for entries in (decoder.kv_cache.keys, decoder.kv_cache.values):
        assert torch.equal(entries.flatten(2).any(2), written.expand(3, -1))


def test_keys_are_stored_after_the_rotary_embedding_and_values_as_they_are(
    decoder: Decoder, batch: ForwardBatch
) -> None:
    prepared = decoder.prepare(batch)
    hidden = decoder.embed(batch)
    decoder.run_layers(prepared, hidden, 0, 1)

    layer = decoder.weights.layers[0]
    assert layer.attn_norm is not None
    normed = torch.nn.functional.rms_norm(hidden, (64,), layer.attn_norm.weight, 1e-5)
    _, keys, values = (normed @ layer.qkv.weight.T).split((128, 64, 64), dim=1)
    keys, values = keys.view(8, 2, 32), values.view(8, 2, 32)
    cos, sin = rope_tables(decoder.config, 8)
    slots = torch.from_numpy(batch.write_slots).long()
    torch.testing.assert_close(decoder.kv_cache.values[0, slots], values)
    for row, position in enumerate(batch.positions):
        turns = torch.complex(torch.tensor(cos[position]), torch.tensor(sin[position]))
        turned = torch.complex(keys[row, :, :16], keys[row, :, 16:]) * turns
        expected = torch.cat((turned.real, turned.imag), dim=-1)
        torch.testing.assert_close(decoder.kv_cache.keys[0, slots[row]], expected)
