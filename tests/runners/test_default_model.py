"""The default model on its real weights: TorchRunner against transformers' Llama."""

import inspect
import textwrap

import numpy as np
import pytest
import torch
from packed_steps import Sequence, Stepper
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

from midfill.models.checkpoints import model_store
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.families import huggingface_names
from midfill.runners.torch.runner import load_torch_runner

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(model_store.resolve(model_store.DEFAULT_MODEL))


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """transformers' model of the same dequantised weights, put in by hand.

    transformers reads GGUF files itself, but takes a minute for it.
    """
    config = checkpoint.config
    with no_init_weights():
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.hidden,
                intermediate_size=config.ffn,
                num_hidden_layers=config.layers,
                num_attention_heads=config.query_heads,
                num_key_value_heads=config.kv_heads,
                max_position_embeddings=config.context,
                rms_norm_eps=config.norm_epsilon,
                rope_theta=config.rope_theta,
                tie_word_embeddings=config.tied_embeddings,
                attn_implementation="eager",
            )
        )
    weights = {
        theirs: torch.tensor(checkpoint.tensor(ours).to_float32())
        for ours, theirs in huggingface_names(config).items()
    }
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def code(checkpoint: Checkpoint) -> list[int]:
    """Four hundred tokens of Python."""
    tokens = checkpoint.tokenizer.encode(inspect.getsource(textwrap.TextWrapper))
    return tokens[:400]


def test_real_code_gets_the_logits_and_tokens_of_transformers(
    checkpoint: Checkpoint, reference: LlamaForCausalLM, code: list[int]
) -> None:
    stepper = Stepper(load_torch_runner(checkpoint, slots=1024))
    cold, chunked = Sequence(list(code)), Sequence(list(code))
    cold_logits = stepper.prefill(cold)
    chunked_logits = stepper.prefill(chunked, chunk_sizes=[128, 1, 200])
    stepper.decode([cold, chunked], [cold_logits[-1], chunked_logits[-1]], count=64)

    with torch.inference_mode():
        expected = reference(torch.tensor([cold.tokens]), use_cache=False).logits[0]
    np.testing.assert_allclose(cold_logits, expected[:400].numpy(), rtol=0, atol=1e-3)
    np.testing.assert_allclose(chunked_logits, expected[:400].numpy(), rtol=0, atol=1e-3)
    assert cold.tokens[400:] == expected.argmax(-1)[399:-1].tolist()
    assert chunked.tokens == cold.tokens
