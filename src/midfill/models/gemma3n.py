"""Gemma 3n's text models: streams of hidden rows, and embeddings for each layer beside the usual.

What Gemma 3 doesn't have is described where it is configured: ``altup.AltUp``, and
``ModelConfig.kv_sharing_layers``, ``value_norms``, ``gate_cutoffs`` and ``logits_cap``. Norms
multiply by their weights, every fifth layer sees everything, and scores aren't scaled, since
queries and keys are normed.

Keys of GGUF files and names of their tensors are those of llama.cpp's converter
(conversion/gemma.py, gguf-py). It takes for granted that four streams are there and the first is
the one that layers compute with; so does midfill, of both formats.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import NormalDist

from midfill.models import gguf_config, huggingface_config
from midfill.models.altup import STREAMS, AltUp
from midfill.models.config import ModelConfig
from midfill.models.family import ConfigFields, Family, Shapes
from midfill.models.gemma3 import MODULES, read_global_theta, read_local_theta

_PATTERN = 5
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_CAP = 30.0
_MAX_LAYERS = 10_000
_SPARSE_LAYERS, _SPARSITY = 10, 0.95
"""The first layers' gates, where a file doesn't say, in models of more layers than these."""

_LAYER_MODULES = {
    "laurel_left": "laurel.linear_left",
    "laurel_right": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
    "altup": "altup",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict": "altup.prediction_coefs",
    "altup_correct": "altup.correction_coefs",
    "layer_gate": "per_layer_input_gate",
    "layer_out": "per_layer_projection",
    "layer_norm": "post_per_layer_input_norm",
}
_OUTER_MODULES = {
    "layer_embed": "model.embed_tokens_per_layer",
    "layer_project": "model.per_layer_model_projection",
    "layer_project_norm": "model.per_layer_projection_norm",
    **{f"altup_proj.{i}": f"model.altup_projections.{i}" for i in range(STREAMS - 1)},
    **{f"altup_unembed.{i}": f"model.altup_unembed_projections.{i}" for i in range(STREAMS - 1)},
}
_GGUF_MODULES = {
    "laurel_l": "laurel_left",
    "laurel_r": "laurel_right",
    "laurel_post_norm": "laurel_norm",
    "altup_correct_scale": "altup",
    "altup_router": "altup_router",
    "altup_router_norm": "altup_router_norm",
    "altup_predict_coef": "altup_predict",
    "altup_correct_coef": "altup_correct",
    "inp_gate": "layer_gate",
    "proj": "layer_out",
    "post_norm": "layer_norm",
}


def _from_huggingface(fields: ConfigFields) -> ModelConfig:
    _check_streams(fields, "altup_active_idx", "altup_num_inputs")
    if not fields.flag("altup_correct_scale", True):
        raise fields.error("'altup_correct_scale' must be true")
    if fields.flag("attention_bias", False):
        raise fields.error("'attention_bias' is not supported")
    activation = fields.text("hidden_activation", "gelu_pytorch_tanh")
    config = huggingface_config.read_decoder(
        _with_one_size(fields, "intermediate_size"),
        "gemma3n",
        activation=activation,
        tied_embeddings=True,
        layer_type=huggingface_config.FULL,
    )
    _check_layers(fields, config.layers)
    windowed = huggingface_config.read_windowed_layers(fields, config.layers)
    capped = fields.get("final_logit_softcapping") is not None
    stated = capped or not fields.states("final_logit_softcapping")
    config = replace(
        config,
        rope_theta=read_global_theta(fields, config),
        local_rope_theta=read_local_theta(fields),
        # transformers' defaults, which don't follow from the hidden size.
        head_dim=fields.size("head_dim", 256),
        kv_heads=fields.size("num_key_value_heads", 2),
        sliding_window=fields.size("sliding_window", 512),
        windowed_layers=_usual_windows(config.layers) if windowed is None else windowed,
        kv_sharing_layers=fields.integer("num_kv_shared_layers", 15),
        gate_cutoffs=_cutoffs_of_shares(fields, config.layers),
        logits_cap=fields.number("final_logit_softcapping", _CAP) if stated else None,
        altup=AltUp(
            laurel_rank=fields.size("laurel_rank", 64),
            layer_width=fields.size("hidden_size_per_layer_input", 256),
            layer_vocab=fields.size("vocab_size_per_layer_input", 262_144),
        ),
    )
    return _gemma(config, fields)


def _from_gguf(fields: ConfigFields, shapes: Shapes) -> ModelConfig:
    _check_streams(fields, "altup.active_idx", "altup.num_inputs")
    own = _with_one_size(fields, "feed_forward_length")
    _check_layers(fields, fields.size("block_count"))
    config = gguf_config.read_decoder(own, shapes, "gemma3n", full_every=_PATTERN)
    for name in ("layers.0.laurel_left.weight", "layer_embed.weight"):
        if len(shapes.get(name, ())) != 2:
            raise fields.error(f"the file holds no matrix {name!r}, as midfill calls it")
    config = replace(
        config,
        activation="gelu_tanh",
        rope_theta=fields.number("rope.freq_base", _THETA),
        local_rope_theta=fields.number("rope.freq_base_swa", _LOCAL_THETA),
        kv_sharing_layers=fields.integer("attention.shared_kv_layers", max(config.layers - 20, 0)),
        gate_cutoffs=_cutoffs_of_deviations(fields, config.layers),
        logits_cap=fields.number("final_logit_softcapping", _CAP),
        altup=AltUp(
            laurel_rank=shapes["layers.0.laurel_left.weight"][0],
            layer_width=fields.size("embedding_length_per_layer_input", 256),
            layer_vocab=shapes["layer_embed.weight"][0],
        ),
    )
    return _gemma(config, fields)


def _gemma(config: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """Return a configuration with what is the same in all files, checked."""
    windowed = config.windowed_layers
    config = replace(
        config,
        qk_norm=True,
        value_norms=True,
        post_norms=True,
        attention_scale=1.0,
        embedding_multiplier=config.hidden**0.5,
        sliding_window=config.sliding_window if windowed is None or windowed else None,
        windowed_layers=windowed or None,
    )
    if config.logits_cap is not None and config.logits_cap <= 0:
        raise fields.error(f"'final_logit_softcapping' must be above 0, not {config.logits_cap}")
    _check_sharing(config, fields)
    return config


def _check_layers(fields: ConfigFields, layers: int) -> None:
    if layers > _MAX_LAYERS:
        raise fields.error(f"a model can't have {layers} layers; midfill reads up to {_MAX_LAYERS}")


def _check_sharing(config: ModelConfig, fields: ConfigFields) -> None:
    """Check that each layer without K and V finds those of another one."""
    count = config.kv_sharing_layers
    if not 0 <= count < config.layers:
        raise fields.error(
            f"{count} of {config.layers} layers can't share KV; one at least has to keep its own"
        )
    first = config.layers - count
    kept = {config.window_of(layer) for layer in range(first)}
    for layer in range(first, config.layers):
        if config.window_of(layer) not in kept:
            raise fields.error(
                f"layer {layer} can't share KV: no layer before layer {first} sees as much"
            )


def _check_streams(fields: ConfigFields, active: str, count: str) -> None:
    for name, wanted in ((active, 0), (count, STREAMS)):
        if fields.integer(name, wanted) != wanted:
            raise fields.error(f"{name!r} must be {wanted}, not {fields.integer(name)}")


def _with_one_size(fields: ConfigFields, key: str) -> ConfigFields:
    """Return the same fields, where MLPs' sizes that are listed by layer are one number."""
    if not isinstance(fields.get(key), list):
        return fields
    sizes = set(fields.whole_numbers(key))
    if len(sizes) != 1:
        raise fields.error(f"{key!r} with other sizes in other layers is not supported")
    return fields.with_value(key, sizes.pop())


def _usual_windows(layers: int) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if (layer + 1) % _PATTERN)


def _cutoffs_of_shares(fields: ConfigFields, layers: int) -> tuple[float | None, ...]:
    """Read which share of each layer's gates doesn't count."""
    key = "activation_sparsity_pattern"
    if fields.get(key) is None:
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        return _by_layer(sparse, layers)
    listed = isinstance(fields.get(key), list)
    shares = fields.numbers(key) if listed else (fields.number(key),) * layers
    if len(shares) != layers or not all(0 <= share < 1 for share in shares):
        raise fields.error(f"{key!r} must list {layers} numbers from 0 on and below 1")
    return _unless_dense(NormalDist().inv_cdf(share) if share else None for share in shares)


def _cutoffs_of_deviations(fields: ConfigFields, layers: int) -> tuple[float | None, ...]:
    """Read by how many standard deviations a gate must be above the mean; -inf means any."""
    key = "activation_sparsity_scale"
    found = fields.get(key)
    if found is None:
        return _by_layer(min(_SPARSE_LAYERS, layers), layers)
    listed = found if isinstance(found, list) else []
    numbers = [n for n in listed if isinstance(n, float) and n < math.inf]
    if len(numbers) != layers or len(listed) != layers:
        raise fields.error(f"{key!r} must list {layers} numbers, one per layer")
    return _unless_dense(n if n > -math.inf else None for n in numbers)


def _by_layer(sparse: int, layers: int) -> tuple[float | None, ...]:
    cutoff = NormalDist().inv_cdf(_SPARSITY)
    return _unless_dense(cutoff if layer < sparse else None for layer in range(layers))


def _unless_dense(cutoffs: Iterable[float | None]) -> tuple[float | None, ...]:
    """Return cutoffs; none if no layer has one."""
    found = tuple(cutoffs)
    return found if any(cutoff is not None for cutoff in found) else ()


FAMILY = Family(
    name="gemma3n",
    from_huggingface=_from_huggingface,
    huggingface_modules=MODULES | _LAYER_MODULES | _OUTER_MODULES,
    from_gguf=_from_gguf,
    gguf_modules=_GGUF_MODULES,
    model_type="gemma3n_text",
    multimodal_type="gemma3n",
)
