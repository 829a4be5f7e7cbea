"""What checkpoints say of themselves, in both formats, and what of it midfill turns down."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import DELTA_RULE, VARIANTS, write_variant

from midfill.errors import CheckpointError
from midfill.models.altup import AltUp
from midfill.models.checkpoints.huggingface import SafetensorsFile, split_stacked
from midfill.models.config import (
    DeltaRule,
    ModelConfig,
    RopeScaling,
    StateSpace,
    tensor_shapes,
)
from midfill.models.families import (
    FAMILIES,
    config_from_gguf,
    config_from_huggingface,
    huggingface_names,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


class TestHuggingFace:
    def test_smollm2(self) -> None:
        assert config_from_huggingface(LLAMA) == ModelConfig(
            family="llama",
            layers=30,
            hidden=576,
            query_heads=9,
            kv_heads=3,
            head_dim=64,
            ffn=1536,
            vocab=49152,
            context=8192,
            norm_epsilon=1e-5,
            tied_embeddings=True,
            rope_theta=100000.0,
            eos_token_ids=(2,),
            bos_token_id=1,
        )

    def test_keys_left_out_mean_what_they_mean_in_transformers(self) -> None:
        config = config_from_huggingface(
            without(LLAMA, "num_key_value_heads", "rms_norm_eps", "rope_theta", "architectures")
            | {"tie_word_embeddings": None, "eos_token_id": [3, 5], "bos_token_id": None}
        )
        assert config.kv_heads == config.query_heads
        assert config.norm_epsilon == 1e-6
        assert config.rope_theta == 10000.0
        assert not config.tied_embeddings
        assert config.eos_token_ids == (3, 5)
        assert config.bos_token_id is None

    def test_granite_code_is_a_llama_with_biases(self) -> None:
        config = config_from_huggingface(LLAMA | {"attention_bias": True, "mlp_bias": True})
        assert config.qkv_bias
        assert config.output_bias
        assert config.mlp_bias

    def test_mistral_has_a_window_unless_it_says_null(self) -> None:
        mistral = LLAMA | {"model_type": "mistral"}
        assert config_from_huggingface(mistral | {"sliding_window": 512}).sliding_window == 512
        assert config_from_huggingface(mistral | {"sliding_window": None}).sliding_window is None
        assert config_from_huggingface(mistral).sliding_window == 4096

    @pytest.mark.parametrize(
        ("model_type", "change", "message"),
        [
            ("deepseek_v2", {"topk_method": "noaux_tc"}, "'topk_method' must be greedy or group"),
            ("deepseek_v2", {"norm_topk_prob": True}, "'norm_topk_prob' is not supported"),
            ("deepseek_v2", {"scoring_func": "sigmoid"}, "'scoring_func' must be 'softmax'"),
            ("deepseek_v2", {"attention_bias": True}, "'attention_bias' is not supported"),
            ("deepseek_v2", {"moe_layer_freq": 2}, "'moe_layer_freq' must be 1"),
            ("deepseek_v2", {"qk_rope_head_dim": 63}, "must be even, not 63 and 512"),
            ("deepseek_v3", {"n_group": 7}, "16 experts can't be divided into 7 groups"),
            ("deepseek_v3", {"n_group": 8}, "1 groups don't hold the 4 experts of a token"),
            ("deepseek_v3", {"rope_interleave": False}, "'rope_interleave' must be true"),
            ("deepseek_v3", {"scoring_func": "softmax"}, "'scoring_func' must be 'sigmoid'"),
        ],
        ids=str,
    )
    def test_deepseek_says_what_it_cannot_be(
        self, model_type: str, change: dict[str, Any], message: str
    ) -> None:
        fields = {
            "model_type": model_type,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
        }
        config_from_huggingface(LLAMA | fields)
        with pytest.raises(CheckpointError, match=message) as caught:
            config_from_huggingface(LLAMA | fields | change)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("fields", "windows"),
        [
            ({"use_sliding_window": False, "max_window_layers": 1}, [None, None, None]),
            ({"use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
            ({"use_sliding_window": True, "max_window_layers": 3}, [None, None, None]),
            ({"use_sliding_window": True, "max_window_layers": 0}, [8, 8, 8]),
            (
                {
                    "use_sliding_window": True,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                },
                [8, None, 8],
            ),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])
    def test_qwen_states_windows_by_layer(
        self, family: str, fields: dict[str, Any], windows: list[int | None]
    ) -> None:
        config = config_from_huggingface(
            LLAMA | {"model_type": family, "num_hidden_layers": 3, "sliding_window": 8} | fields
        )
        assert [config.window_of(layer) for layer in range(3)] == windows

    def test_deepseek_coder_scales_positions_linearly(self) -> None:
        config = config_from_huggingface(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}})
        assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)
        assert config.context == 8192

    @pytest.mark.parametrize(
        "scaling",
        [
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
        ],
        ids=lambda scaling: scaling["rope_type"],
    )
    def test_old_and_new_spelling_of_rope_say_the_same(self, scaling: dict[str, Any]) -> None:
        old = config_from_huggingface(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
        new = config_from_huggingface(
            without(LLAMA, "rope_theta") | {"rope_parameters": scaling | {"rope_theta": 5e5}}
        )
        assert old == new
        assert old.rope_theta == 5e5
        assert old.rope_scaling.kind == scaling["rope_type"]

    def test_yarn_and_dynamic_scaling_lengthen_the_context(self) -> None:
        def context(**scaling: Any) -> int:
            return config_from_huggingface(LLAMA | {"rope_scaling": scaling}).context

        assert context(type="dynamic", factor=3.0) == 3 * 8192
        assert context(type="yarn", factor=4.0) == 4 * 8192
        # Some files state the lengthened context, some the original one.
        assert context(type="yarn", factor=2.0, original_max_position_embeddings=4096) == 8192

    @pytest.mark.parametrize(
        "variant",
        # Those that hold several matrices as one have tests of their own.
        [name for name in VARIANTS if not name.startswith(("gpt-oss", "phi3", *DELTA_RULE))],
    )
    def test_names_and_shapes_are_those_of_the_files_transformers_writes(
        self, variant: str, tmp_path: Path
    ) -> None:
        folder = write_variant(variant, tmp_path)
        config = config_from_huggingface(json.loads((folder / "config.json").read_text()))
        names = huggingface_names(config)
        entries = split_stacked(SafetensorsFile(folder / "model.safetensors").entries)
        stored = {name: entry.shape for name, entry in entries.items()}
        assert {names[name]: shape for name, shape in tensor_shapes(config).items()} == stored

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"model_type": "gemma3"},
                r"'gemma3' is not supported; midfill runs deepseek_v2, deepseek_v3, gemma, ",
            ),
            ({"model_type": "mixtral"}, "'mixtral'"),
            ({"model_type": None}, "'model_type' is missing"),
            ({"hidden_size": None}, "'hidden_size' is missing"),
            ({"hidden_size": "576"}, "'hidden_size' must be a whole number, not '576'"),
            ({"hidden_size": 0}, "'hidden_size' must be at least 1"),
            ({"hidden_size": True}, "'hidden_size' must be a whole number"),
            ({"num_hidden_layers": 2.5}, "'num_hidden_layers' must be a whole number"),
            ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a finite number"),
            ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
            ({"eos_token_id": "</s>"}, "'eos_token_id' must be a token id"),
            ({"eos_token_id": [-1]}, "'eos_token_id' must be a token id"),
            ({"num_key_value_heads": 4}, "9 query heads can't share 4 KV heads"),
            ({"head_dim": 63}, "head dimension of 63"),
            ({"rope_theta": 0}, "theta must be above 0"),
            ({"hidden_act": "relu2"}, "activation 'relu2' is not supported"),
            ({"partial_rotary_factor": 0.5}, "partial rotary"),
            ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
            ({"quantization_config": {"quant_method": "gptq"}}, "gptq.*use the unquantised"),
            ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "RoPE scaling 'longrope'"),
            ({"rope_scaling": {"type": "linear"}}, "rope parameters: 'factor' is missing"),
            ({"rope_scaling": {"type": "linear", "factor": -1.0}}, "'factor' must be above 0"),
            ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
            ({"rope_scaling": "linear"}, "'rope_scaling' must be a mapping"),
            (
                {"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}},
                "differ between layers",
            ),
            (
                {
                    "model_type": "qwen2",
                    "use_sliding_window": True,
                    "sliding_window": 8,
                    "layer_types": ["linear_attention"] * 30,
                },
                "'layer_types'",
            ),
        ],
        ids=str,
    )
    def test_an_unsupported_model_is_one_line_that_says_why(
        self, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=f"config.json: .*{message}") as caught:
            config_from_huggingface(LLAMA | change)
        assert "\n" not in str(caught.value)


SMOLLM2_GGUF: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
TIED = {"embed.weight": (49152, 576)}


def gguf_description(config: ModelConfig) -> dict[str, object]:
    """The metadata llama.cpp's converter would write for a model."""
    prefix = config.family
    epsilon = "layer_norm_epsilon" if config.norm == "layer" else "layer_norm_rms_epsilon"
    values: dict[str, object] = {
        "block_count": config.layers,
        "context_length": config.context,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.query_heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{epsilon}": config.norm_epsilon,
        "attention.sliding_window": config.sliding_window,
        "attention.scale": config.attention_scale,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": config.rope_theta,
    }
    if config.rope_scaling.kind != "none":
        values["rope.scaling.type"] = config.rope_scaling.kind
        values["rope.scaling.factor"] = config.rope_scaling.factor
        values["rope.scaling.original_context_length"] = config.rope_scaling.original_context
    if config.windowed_layers is not None:
        flags = [layer in config.windowed_layers for layer in range(config.layers)]
        values["attention.sliding_window_pattern"] = flags
    if config.local_rope_theta is not None:
        values["rope.freq_base_swa"] = config.local_rope_theta
    if config.latent is not None:
        latent = config.latent
        values |= {
            "attention.head_count_kv": config.query_heads,
            "attention.key_length": latent.query_dim,
            "attention.value_length": latent.value_dim,
            "attention.q_lora_rank": latent.query_rank or None,
            "attention.kv_lora_rank": latent.rank,
            "attention.scale": None,
            "rope.dimension_count": latent.rotary_dim,
            "rope.scaling.yarn_log_multiplier": 0.1 * (config.rope_scaling.mscale_all_dim or 0),
            "expert_weights_scale": config.experts.weight_factor if config.experts else None,
            "expert_group_count": config.experts.groups if config.experts else None,
            "expert_group_used_count": config.experts.groups_per_token if config.experts else None,
        }
    if config.altup is not None:
        cutoffs = [-math.inf if cut is None else cut for cut in config.gate_cutoffs]
        values |= {
            "feed_forward_length": [config.ffn] * config.layers,
            "altup.active_idx": 0,
            "altup.num_inputs": 4,
            "embedding_length_per_layer_input": config.altup.layer_width,
            "attention.shared_kv_layers": config.kv_sharing_layers,
            "activation_sparsity_scale": cutoffs,
            "final_logit_softcapping": config.logits_cap,
        }
    if config.experts is not None:
        values["expert_count"] = config.experts.count
        values["expert_used_count"] = config.experts.per_token
        values["expert_feed_forward_length"] = config.experts.ffn
        values["expert_weights_norm"] = config.experts.normalised
        values["expert_shared_feed_forward_length"] = config.experts.shared_ffn
    if config.family == "gpt-oss":  # whose windows follow from the architecture
        del values["attention.sliding_window_pattern"]
    if config.state_space is not None:
        space = config.state_space
        values |= {
            "attention.head_count_kv": [
                config.kv_heads * (i in config.attention_layers) for i in range(config.layers)
            ],
            "ssm.conv_kernel": space.conv_width,
            "ssm.state_size": space.state_dim,
            "ssm.inner_size": space.inner,
            "ssm.time_step_rank": space.heads,
            "ssm.group_count": space.key_heads if isinstance(space, DeltaRule) else 1,
        }
        if isinstance(space, DeltaRule):
            values["attention.head_count_kv"] = config.kv_heads
            values["feed_forward_length"] = None if config.experts else config.ffn
    if config.family == "granitehybrid":
        values["rope.scaling.finetuned"] = config.has_rope
    if config.family in ("granite", "granitehybrid"):
        values["embedding_scale"] = config.embedding_multiplier
        values["residual_scale"] = config.residual_multiplier
        values["logit_scale"] = config.logits_divisor
    metadata = {f"{prefix}.{key}": value for key, value in values.items() if value is not None}
    metadata["general.architecture"] = config.family
    metadata["tokenizer.ggml.eos_token_id"] = config.eos_token_ids[0]
    if config.bos_token_id is not None:
        metadata["tokenizer.ggml.bos_token_id"] = config.bos_token_id
    return metadata


GEMMA_270M: dict[str, object] = {
    "general.architecture": "gemma3",
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.block_count": 18,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.sliding_window": 512,
    "gemma3.rope.freq_base": 1000000.0,
}


GRANITE_H: dict[str, Any] = LLAMA | {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 2048,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 48,
    "mamba_d_head": "auto",
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
    "time_step_limit": [0.0, float("inf")],
}


class TestGraniteHybrid:
    def test_most_layers_have_a_state_and_attention_knows_no_positions(self) -> None:
        config = config_from_huggingface(GRANITE_H)
        assert config.attention_layers == (2,)
        assert config.state_space == StateSpace((0, 1, 3), 48, 32, 128, 4)
        assert [config.state_space_of(i) is None for i in range(4)] == [False, False, True, False]
        assert (config.ffn, config.has_rope) == (2048, False)

    def test_a_model_all_of_whose_layers_have_attention_is_a_granite(self) -> None:
        kinds = {"layer_types": ["attention"] * 4, "position_embedding_type": "rope"}
        config = config_from_huggingface(GRANITE_H | kinds)
        assert config.state_space is None
        assert config.has_rope

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_local_experts": 64}, "'num_local_experts' must be 0: .*350M, 1B, Micro"),
            ({"num_local_experts": None}, "'num_local_experts' must be 0"),
            ({"layer_types": ["mamba"] * 4}, "without any layer with attention"),
            ({"layer_types": ["mamba", "attention"]}, "'layer_types' must name mamba or attention"),
            ({"layer_types": ["mamba", "conv"] * 2}, "'layer_types' must name mamba or attention"),
            ({"mamba_n_groups": 8}, "8 groups of heads is not supported"),
            ({"mamba_d_conv": 1}, "a convolution over 1 row"),
            ({"mamba_d_head": 64}, "must be 'mamba_expand' times 'hidden_size', 1536, not 3072"),
            ({"mamba_proj_bias": True}, "'mamba_proj_bias' is not supported"),
            ({"time_step_limit": [0.001, 0.1]}, "'time_step_limit' must be .0, Infinity."),
        ],
        ids=str,
    )
    def test_what_is_not_supported_is_one_clear_line(
        self, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=f"config.json: .*{message}") as caught:
            config_from_huggingface(GRANITE_H | change)
        assert "\n" not in str(caught.value)


QWEN3_NEXT: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Qwen3-Next-80B-A3B, but for its number of layers."""


class TestQwen3Next:
    def test_every_fourth_layer_has_attention_of_which_a_quarter_turns(self) -> None:
        config = config_from_huggingface(QWEN3_NEXT)
        assert config.attention_layers == (3, 7)
        assert config.state_space == DeltaRule((0, 1, 2, 4, 5, 6), 32, 128, 128, 4, key_heads=16)
        assert (config.head_dim, config.rotary_dim) == (256, 64)
        assert config.gated_attention
        # A sequence's state in one layer: 2 MB of S, and 3 inputs of the convolution.
        assert config.state_space is not None
        assert config.state_space.state_bytes == 6 * 4 * (32 * 128 * 128 + 3 * 8192)

    def test_qwen_3_5_normalises_the_weights_of_experts_unasked(self) -> None:
        names = {"model_type": "qwen3_5_moe_text", "norm_topk_prob": None}
        config = config_from_huggingface(QWEN3_NEXT | names | {"intermediate_size": None})
        assert config.experts is not None
        assert config.experts.normalised
        assert config.ffn == 512

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layer_types": ["linear_attention"] * 8}, "without any layer with attention"),
            ({"layer_types": ["conv"] * 8}, "'layer_types' must name linear_attention or full"),
            ({"layer_types": ["full_attention"]}, "for every layer"),
            ({"linear_num_value_heads": 24}, "24 heads of values can't share 16 of keys"),
            ({"linear_conv_kernel_dim": 1}, "a convolution over 1 row"),
            ({"attention_bias": True}, "'attention_bias' is not supported with qwen3next"),
            ({"partial_rotary_factor": 0.27}, "'partial_rotary_factor' 0.27 of heads of 256"),
            ({"num_hidden_layers": 10**6}, "must be at most 10000"),
        ],
        ids=str,
    )
    def test_what_is_not_supported_is_one_clear_line(
        self, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=f"config.json: .*{message}") as caught:
            config_from_huggingface(QWEN3_NEXT | change)
        assert "\n" not in str(caught.value)


OLMO_3: dict[str, Any] = {
    "model_type": "olmo3",
    "architectures": ["Olmo3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 65536,
    "vocab_size": 100278,
    "eos_token_id": 100257,
    "sliding_window": 4096,
    "rope_theta": 500000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
    },
}


class TestOlmo:
    def test_norms_come_after_attention_and_mlp_and_are_of_all_heads(self) -> None:
        config = config_from_huggingface(OLMO_3 | {"model_type": "olmo2", "rope_scaling": None})
        shapes = tensor_shapes(config)
        assert shapes["layers.0.q_norm.weight"] == (4096,)
        assert "layers.0.attn_norm.weight" not in shapes
        assert shapes["layers.0.attn_post_norm.weight"] == (4096,)
        assert config.sliding_window is None
        assert config.norm_epsilon == 1e-5

    def test_of_four_layers_of_an_olmo_3_one_sees_everything_and_scales_positions(self) -> None:
        config = config_from_huggingface(OLMO_3)
        assert [i for i in range(8) if config.window_of(i) is None] == [3, 7]
        assert [i for i in range(8) if not config.is_local(i)] == [3, 7]
        assert (config.window_of(0), config.local_rope_theta) == (4096, 500000.0)
        assert config.rope_scaling.attention_factor == pytest.approx(1.2079, abs=1e-4)

    def test_old_and_new_spelling_of_positions_say_the_same(self) -> None:
        new = {
            "full_attention": OLMO_3["rope_scaling"] | {"rope_theta": 500000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000},
        }
        keys = ("rope_theta", "rope_scaling")
        renamed = config_from_huggingface(without(OLMO_3, *keys) | {"rope_parameters": new})
        assert renamed == config_from_huggingface(OLMO_3)

    def test_keys_left_out_mean_what_they_mean_in_transformers(self) -> None:
        config = config_from_huggingface(without(OLMO_3, "sliding_window", "rope_theta"))
        assert (config.window_of(0), config.rope_theta, config.local_rope_theta) == (
            4096,
            500000.0,
            500000.0,
        )
        config = config_from_huggingface(OLMO_3 | {"sliding_window": None})
        assert (config.window_of(0), config.local_rope_theta) == (None, None)

    def test_a_gguf_file_of_an_olmo_3_is_called_olmo2(self) -> None:
        expected = config_from_huggingface(OLMO_3)
        description = gguf_description(replace(expected, family="olmo2", windowed_layers=None))
        description["olmo2.rope.scaling.attn_factor"] = expected.rope_scaling.attention_factor
        found = config_from_gguf(description, tensor_shapes(expected))
        assert found == replace(expected, family="olmo2")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {
                    "rope_parameters": {
                        kind: {"rope_type": "linear", "factor": 2.0}
                        for kind in ("full_attention", "sliding_attention")
                    }
                },
                "RoPE scaling of layers with a sliding window is not supported",
            ),
            ({"layer_types": ["full_attention"]}, "'layer_types' must name"),
            ({"model_type": "olmoe", "clip_qkv": 8.0}, "'clip_qkv' is not supported"),
        ],
        ids=["scaled windows", "too few layers", "clipped"],
    )
    def test_what_is_not_supported_is_one_clear_line(
        self, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=f"config.json: .*{message}") as caught:
            config_from_huggingface(OLMO_3 | change)
        assert "\n" not in str(caught.value)


GEMMA_3N_E2B: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": [8192] * 30,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "num_kv_shared_layers": 10,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
}
"""Sizes of Gemma 3n E2B; what is left out has transformers' defaults."""


class TestGemma3n:
    def test_last_layers_attend_to_kv_of_the_last_ones_before_them_of_their_kind(self) -> None:
        config = config_from_huggingface(GEMMA_3N_E2B)
        assert config.kv_layers == tuple(range(20))
        assert [i for i in range(30) if config.window_of(i) is None] == [4, 9, 14, 19, 24, 29]
        assert [config.kv_layer_of(i) for i in (0, 19, 20, 23, 24, 28, 29)] == (
            [0, 19, 18, 18, 19, 18, 19]
        )
        assert "layers.19.k.weight" in tensor_shapes(config)
        assert not {"k", "v", "k_norm"} & {
            name.split(".")[2] for name in tensor_shapes(config) if name.startswith("layers.20.")
        }

    def test_defaults_are_those_of_transformers(self) -> None:
        config = config_from_huggingface(GEMMA_3N_E2B)
        assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
        assert (config.sliding_window, config.logits_cap, config.score_scale) == (512, 30.0, 1.0)
        assert config.altup == AltUp(laurel_rank=64, layer_width=256, layer_vocab=262144)
        assert config.row_width == 4 * 2048 + 30 * 256
        assert config.gate_cutoffs[9:11] == (pytest.approx(1.6448536), None)
        assert (
            config_from_huggingface(GEMMA_3N_E2B | {"final_logit_softcapping": None}).logits_cap
            is None
        )

    def test_the_part_for_text_of_a_model_that_sees_and_hears(self) -> None:
        whole = {
            "model_type": "gemma3n",
            "architectures": ["Gemma3nForConditionalGeneration"],
            "text_config": GEMMA_3N_E2B,
        }
        assert config_from_huggingface(whole) == config_from_huggingface(GEMMA_3N_E2B)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"intermediate_size": [8192] * 29 + [4096]}, "'intermediate_size' with other sizes"),
            ({"altup_num_inputs": 2}, "'altup_num_inputs' must be 4, not 2"),
            ({"altup_active_idx": 1}, "'altup_active_idx' must be 0, not 1"),
            ({"altup_correct_scale": False}, "'altup_correct_scale' must be true"),
            ({"attention_bias": True}, "'attention_bias' is not supported"),
            ({"num_kv_shared_layers": 30}, "30 of 30 layers can't share KV"),
            ({"num_kv_shared_layers": 26}, "layer 4 can't share KV: no layer before layer 4"),
            ({"activation_sparsity_pattern": [0.9]}, "must list 30 numbers from 0 on and below 1"),
            ({"final_logit_softcapping": -1.0}, "'final_logit_softcapping' must be above 0"),
            ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_what_is_not_supported_is_one_clear_line(
        self, change: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=f"config.json: .*{message}") as caught:
            config_from_huggingface(GEMMA_3N_E2B | change)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"gemma3n.altup.num_inputs": 3}, "'altup.num_inputs' must be 4, not 3"),
            ({"gemma3n.activation_sparsity_scale": [1.0]}, "must list 30 numbers"),
            ({"gemma3n.attention.shared_kv_layers": 40}, "40 of 30 layers can't share KV"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_broken_metadata_is_one_clear_line(self, change: dict[str, Any], message: str) -> None:
        config = config_from_huggingface(GEMMA_3N_E2B | {"eos_token_id": 1})
        metadata = gguf_description(config) | change
        with pytest.raises(CheckpointError, match=f"GGUF metadata: .*{message}"):
            config_from_gguf(metadata, tensor_shapes(config))


class TestGguf:
    @pytest.mark.parametrize("pattern", [None, 6])
    def test_gemma_3_leaves_out_what_all_its_models_share(self, pattern: int | None) -> None:
        change = {"gemma3.attention.sliding_window_pattern": pattern}
        config = config_from_gguf(GEMMA_270M | change, {"embed.weight": (262144, 640)})
        assert [i for i in range(18) if config.window_of(i) is None] == [5, 11, 17]
        assert config.window_of(0) == 512
        assert (config.rope_theta, config.local_rope_theta) == (1e6, 1e4)
        assert config.embedding_multiplier == 640**0.5
        assert config.score_scale == 256**-0.5
        assert config.activation == "gelu_tanh"
        assert config.tied_embeddings

    def test_the_default_model(self) -> None:
        assert config_from_gguf(SMOLLM2_GGUF, TIED) == config_from_huggingface(LLAMA)

    @pytest.mark.parametrize(
        "variant",
        [
            name
            for name, variant in VARIANTS.items()
            if FAMILIES[variant.family].from_gguf is not None
            # Scalings that GGUF does not state, or not as metadata.
            and name not in ("llama-dynamic", "llama-llama3", "phi3-long")
        ],
    )
    def test_both_formats_describe_the_same_model(self, variant: str, tmp_path: Path) -> None:
        folder = write_variant(variant, tmp_path)
        expected = config_from_huggingface(json.loads((folder / "config.json").read_text()))
        actual = config_from_gguf(gguf_description(expected), tensor_shapes(expected))
        if variant == "deepseek2-grouped-yarn":  # GGUF states one of the two factors
            scaling = replace(expected.rope_scaling, mscale=expected.rope_scaling.mscale_all_dim)
            expected = replace(expected, rope_scaling=scaling)
            actual = replace(actual, rope_scaling=scaling, attention_scale=expected.score_scale)
        if variant == "gpt-oss":  # GGUF states no limit, since all files have the same
            assert actual.swiglu_limit == 7.0
            expected = replace(expected, rope_scaling=actual.rope_scaling, swiglu_limit=7.0)
            assert actual.rope_scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)
            assert not actual.rope_scaling.truncate
        if expected.state_space is not None:  # GGUF has A itself
            space = replace(expected.state_space, logarithmic=False)
            if isinstance(space, DeltaRule):  # Qwen3.5's files have heads in another order
                space = replace(space, tiled=expected.family != "qwen3next")
                assert actual.experts is None or actual.experts.normalised
            expected = replace(expected, state_space=space)
            if expected.experts is not None:  # no layer has a dense MLP
                expected = replace(expected, ffn=expected.experts.ffn)
        if variant == "llama-yarn":  # GGUF states the factor that the other format implies
            assert actual.rope_scaling.attention_factor == pytest.approx(1.1386, abs=1e-4)
            expected = replace(expected, rope_scaling=actual.rope_scaling)
            assert actual.rope_scaling.original_context == 64
        assert actual == expected

    def test_end_of_turn_tokens_end_an_answer_too(self) -> None:
        ids = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
        assert config_from_gguf(SMOLLM2_GGUF | ids, TIED).eos_token_ids == (2, 7)

    def test_a_lone_linear_factor_of_old_files_counts(self) -> None:
        config = config_from_gguf(SMOLLM2_GGUF | {"llama.rope.scale_linear": 4.0}, TIED)
        assert config.rope_scaling == RopeScaling(kind="linear", factor=4.0)

    def test_frequency_factors_stand_for_llama3_scaling(self) -> None:
        factors = [1.0] * 16 + [8.0] * 16
        scaling = config_from_gguf(SMOLLM2_GGUF, TIED, factors).rope_scaling
        assert scaling == RopeScaling(kind="factors", frequency_factors=tuple(factors))

    @pytest.mark.parametrize(
        ("factors", "message"),
        [([1.0] * 31, "31 values.*needs 32"), ([0.0] * 32, "above 0"), ([float("nan")] * 32, "")],
        ids=["short", "zero", "nan"],
    )
    def test_broken_frequency_factors(self, factors: list[float], message: str) -> None:
        with pytest.raises(CheckpointError, match=f"rope_freqs.weight .*{message}"):
            config_from_gguf(SMOLLM2_GGUF, TIED, factors)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"general.architecture": "gemma2"},
                "'gemma2' is not supported; midfill runs deepseek2, gemma, gemma3, gemma3n, ",
            ),
            ({"general.architecture": "mistral"}, "'mistral' is not supported"),
            ({"general.architecture": None}, "'general.architecture' is missing"),
            ({"llama.block_count": None}, "'llama.block_count' is missing"),
            ({"llama.attention.head_count_kv": [3, 3]}, "head_count_kv' must be a whole number"),
            ({"llama.attention.layer_norm_rms_epsilon": None}, "epsilon' is missing"),
            ({"llama.expert_count": 8}, "mixture-of-experts"),
            ({"llama.rope.dimension_count": 32}, "partial rotary embeddings .32 of 64"),
            ({"llama.attention.value_length": 32}, "different sizes"),
            ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
            (
                {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
                "factor' must be above 0",
            ),
            (
                {
                    "llama.attention.sliding_window": 8,
                    "llama.attention.sliding_window_pattern": 4,
                },
                "list of 30 flags",
            ),
        ],
        ids=str,
    )
    def test_an_unsupported_model_is_one_line_that_says_why(
        self, change: dict[str, object], message: str
    ) -> None:
        with pytest.raises(CheckpointError, match=f"GGUF metadata: .*{message}") as caught:
            config_from_gguf(SMOLLM2_GGUF | change, TIED)
        assert "\n" not in str(caught.value)

    def test_a_file_without_an_embedding(self) -> None:
        with pytest.raises(CheckpointError, match="no token embedding"):
            config_from_gguf(SMOLLM2_GGUF, {})

    def test_which_families_interleave_the_rotary_halves(self) -> None:
        interleaved = {name for name, family in FAMILIES.items() if family.gguf_interleaved_rotary}
        assert interleaved == {"llama", "granite", "granitehybrid"}


PHI3: dict[str, Any] = LLAMA | {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [1.0 + i for i in range(48)],
    },
}


class TestPhi3:
    def test_phi_4_mini_turns_a_part_of_each_head_by_frequencies_of_long_texts(self) -> None:
        config = config_from_huggingface(PHI3)
        assert (config.head_dim, config.rotary_dim, config.context) == (128, 96, 131072)
        assert config.rope_scaling.frequency_factors == tuple(1.0 + i for i in range(48))
        assert config.rope_scaling.attention_factor == pytest.approx(1.1902, abs=1e-4)
        assert config.sliding_window is None

    def test_a_short_context_has_those_of_short_texts(self) -> None:
        config = config_from_huggingface(PHI3 | {"max_position_embeddings": 4096})
        assert config.rope_scaling.frequency_factors == (1.0,) * 48
        assert config.rope_scaling.attention_factor == 1.0

    def test_phi_4_turns_all_by_the_usual_ones(self) -> None:
        config = config_from_huggingface(without(PHI3, "rope_scaling", "partial_rotary_factor"))
        assert config.rotary_dim == config.head_dim
        assert config.rope_scaling == RopeScaling()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"partial_rotary_factor": 0.01}, "must leave whole pairs"),
            ({"partial_rotary_factor": 2.0}, "must leave whole pairs"),
            ({"partial_rotary_factor": 0.5}, "'long_factor' must be 32 numbers above 0"),
            (
                {"rope_scaling": PHI3["rope_scaling"] | {"long_factor": ["a"]}},
                "'long_factor' must be a list of numbers",
            ),
            ({"rope_scaling": {"type": "llama4"}}, "RoPE scaling 'llama4' is not supported"),
        ],
        ids=str,
    )
    def test_what_it_cannot_be_is_one_line(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            config_from_huggingface(PHI3 | change)
        assert "\n" not in str(caught.value)
