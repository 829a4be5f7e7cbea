"""Micro-batches: all rows of a step, in one shape."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import write_variant
from transformers import AttentionInterface

from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.training.base_model import PACKED_ATTENTION, load_base_model
from midfill_lab.training.examples import PackedRow
from midfill_lab.training.lora import MergedLora, make_trainable
from midfill_lab.training.micro_batches import MicroBatches, compile_layers
from midfill_lab.training.recipe import STEP_FILL, TrainingRecipe


def row(lengths: list[int], first: int = 1) -> PackedRow:
    tokens = sum(lengths)
    ids = np.arange(first, first + tokens, dtype=np.int32)
    bounds = np.cumsum([0, *lengths], dtype=np.int32)
    return PackedRow(ids, np.ones(tokens, np.float32), np.zeros(tokens, np.bool_), bounds, tokens)


@given(
    step=st.sampled_from([3_000, 50_000, 150_000]),
    longest=st.integers(50, 1000),
    seed=st.integers(0, 2**32 - 1),
)
def test_each_token_of_a_step_is_in_one_micro_batch(step: int, longest: int, seed: int) -> None:
    recipe = TrainingRecipe(tokens_per_step=step, row_tokens=3000)
    rng, rows, tokens = np.random.default_rng(seed), [], 0
    while tokens < STEP_FILL * step:
        rows.append(row(rng.integers(50, longest + 1, rng.integers(1, 4)).tolist(), 1 + tokens))
        tokens += len(rows[-1].ids)
    batches = MicroBatches(recipe)
    joined = batches.join(rows)
    assert {len(each.ids) for each in joined} == {batches.tokens}
    assert {len(each.cu_seqlens) for each in joined} == {batches.examples + 1}
    learned = np.concatenate([each.ids[each.weights > 0] for each in joined])
    assert learned.tolist() == np.concatenate([each.ids for each in rows]).tolist()
    assert all(b - a <= 3000 for each in joined for a, b in pairwise(each.cu_seqlens.tolist()))


def test_a_step_of_few_tokens_is_one_micro_batch() -> None:
    recipe = TrainingRecipe(tokens_per_step=4096, row_tokens=1024)
    assert len(MicroBatches(recipe).join([row([900]) for _ in range(5)])) == 1


def test_many_short_examples_take_more_micro_batches() -> None:
    recipe = TrainingRecipe(tokens_per_step=4096, row_tokens=1024)
    assert len(MicroBatches(recipe).join([row([4] * 200) for _ in range(4)])) > 1


def test_layers_share_their_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's tracer alone: what it makes of the layers is the same on every device."""
    checkpoint = open_checkpoint(write_variant("llama-tied", tmp_path))
    monkeypatch.setitem(AttentionInterface._global_mapping, PACKED_ATTENTION, attend_to_values)
    model = make_trainable(load_base_model(checkpoint, torch.float32), TrainingRecipe(rank=2), [1])
    MergedLora(model)
    decoder = model.get_base_model().get_decoder()
    inputs = {
        "input_ids": torch.arange(8)[None],
        "position_ids": torch.arange(8)[None],
        "cu_seq_lens_q": torch.tensor([0, 8], dtype=torch.int32),
        "max_length_q": 8,
        "use_cache": False,
    }
    expected = decoder(**inputs).last_hidden_state
    graphs: list[object] = []

    def trace(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compile_layers(model, trace)
    for _ in range(2):
        torch.testing.assert_close(decoder(**inputs).last_hidden_state, expected)
    assert len(decoder.layers) == 3
    assert len(graphs) == 1


def attend_to_values(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """Stand in for attention, which reads the bounds on a CPU and is one operation on a GPU."""
    groups = query.shape[1] // key.shape[1]
    mixed = query + (key + value).repeat_interleave(groups, dim=1)
    return mixed.transpose(1, 2).contiguous(), None
