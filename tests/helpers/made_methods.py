"""Methods ready to be used with a model of any shape, made-up tables included."""

import numpy as np

from midfill.methods import calibration_store
from midfill.methods.calibration import Calibration
from midfill.methods.evict import compresskv, duoattention, razorattention, uncomp
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.registry import resolve_method
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_prefill import minference
from midfill.models.config import ModelConfig


def make_method(specification: str, config: ModelConfig) -> Method:
    """Return a method that is ready for a model; tables it needs are random."""
    method = resolve_method(specification)
    assert method is not None
    if not isinstance(method, ModelSpecific):
        return method
    digest = f"{config.layers:04}{config.query_heads:04}{config.kv_heads:04}" * 4
    for calibration in made_up_calibrations(digest, config):
        calibration_store.store(calibration)
    return method.for_model(ServedModel(config=config, digest=digest, token_bytes=_token_bytes))


def _token_bytes(token_id: int) -> bytes:
    """Every ninth token ends a sentence."""
    return b"." if token_id % 9 == 0 else b"a"


def made_up_calibrations(digest: str, config: ModelConfig) -> list[Calibration]:
    """Return random tables of all methods that need some."""
    rng = np.random.default_rng(0)
    scores = rng.random((2, config.layers, config.query_heads))
    heads = {"induction": scores[0], "echo": scores[1]}
    gates = {"gates": rng.random((config.layers, config.kv_heads))}
    evidence = {"heads": scores[0], "errors": rng.random(config.layers), "counted": np.ones(1)}
    entropy = {
        "marks": rng.integers(0, 9, (config.layers, config.kv_heads)).astype(np.float64),
        "entropy": rng.random((config.layers, config.kv_heads)),
    }
    patterns = {
        "pattern": rng.integers(0, len(minference.CANDIDATES), scores[0].shape).astype(np.float64),
        "size": np.ones_like(scores[0]),
    }
    made = (
        (minference, patterns),
        (razorattention, heads),
        (duoattention, gates),
        (compresskv, evidence),
        (uncomp, entropy),
    )
    return [
        Calibration(method.NAME, method.VERSION, digest, {}, (1, 1), tables)
        for method, tables in made
    ]


STREAMING_PREFILL = "duoattention:chunk=64"
"""A method of compression that is one of sparse prefill as well."""

SEARCHED_PROMPT = (
    "hip-prefill:k=32,window=24,sinks=4,dense_layers=1,chunk=64,dense=64"
    "+hip:window=24,sinks=4,dense_layers=1"
)
"""Searches for a prompt's keys, and for its answer's."""

_SMALL = {
    "razorattention": "sinks=4,recent=32,share=0,interval=16",
    "duoattention": "sinks=4,recent=32,interval=16",
    "minicache": "first=1,recent=40,interval=16",
    "kivi": "bits=4,residual=32,group=16",
    "zipcache": "high=8,low=4,window=16",
    "mikv": "ratio=0.3,low=4,interval=16",
    "gear": "block=32,buffer=16",
    "minference": "chunk=64,dense=64",
    "flexprefill": "chunk=64,dense=64,least=64,gamma=0.4",
    "lserve": "budget=192,sinks=4,recent=60",
    "hip": "k=48,window=24,sinks=4,dense_layers=1",
    "hip-prefill": "k=32,window=24,sinks=4,dense_layers=1,chunk=64,dense=64",
    "sentencekv": "budget=48,keep=2,start=4,recent=16,window=16",
    STREAMING_PREFILL: "sinks=4,recent=60,interval=0",
    SEARCHED_PROMPT: "k=48",
}
_WHOLE = {
    "razorattention": "recent=200",
    "duoattention": "recent=200",
    "minicache": "first=1,retain=1",
    "kivi": "residual=200",
    "zipcache": "salient=1,high=16",
    "mikv": "ratio=1",
    "gear": "buffer=200",
    "minference": "chunk=64,dense=0,scale=100",
    "flexprefill": "chunk=64,dense=0,least=64,gamma=1",
    "lserve": "budget=512,recent=400",
    "hip": "k=512,dense_layers=0",
    "hip-prefill": "k=512,dense_layers=0,chunk=64,dense=0",
    "sentencekv": "budget=400,keep=1",
    STREAMING_PREFILL: "sparsity=0,sinks=4,recent=32",
}


def small_method(name: str, config: ModelConfig) -> Method:
    """Return a method that drops keys of a prompt of 100 tokens, and none of one of 36.

    One that quantises does so with some keys of a prompt of 100 tokens. One of sparse prefill lists
    only some of those of a prompt of 400, and all of one of 64.
    """
    return make_method(_with_options(name, _SMALL.get(name, "budget=48")), config)


def whole_method(name: str, config: ModelConfig) -> Method:
    """Return a method that drops nothing of 200 tokens, or lists all keys."""
    return make_method(_with_options(name, _WHOLE.get(name, "budget=200")), config)


def _with_options(name: str, options: str) -> str:
    return f"{name}{',' if ':' in name else ':'}{options}"
