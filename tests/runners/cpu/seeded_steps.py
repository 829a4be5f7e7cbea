"""Program that runs the forward pass and the sampler on fixed inputs, for test_arm.py.

Its model has a layer in each weight format. Arguments: formats of KV, by name ("F16"). Prints JSON:
digests of hidden rows and logits, and the tokens that are chosen, by format.
"""

import hashlib
import json
import platform
import sys
from pathlib import Path

import numpy as np
from numba.core.registry import cpu_target

sys.path.append(str(Path(__file__).parents[2] / "helpers"))
from ggml_blocks import QUANTIZED_KINDS, random_matrix
from packed_steps import Sequence, Stepper

from midfill.engine.request import EngineSamplingParams
from midfill.engine.sampling.sampler import SampleRow, sample
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.kernels.cpu.neon import has_dot_products
from midfill.models.config import ModelConfig, tensor_shapes
from midfill.runners.cpu.packed_model import pack_model
from midfill.runners.cpu.runner import CpuRunner
from midfill.stored_tensor import StoredTensor

KINDS = (*QUANTIZED_KINDS, "f32")
"""How each layer's matrices are stored; the head's are as the last but one."""
SLOTS = 300
SAMPLINGS = (
    EngineSamplingParams(),
    EngineSamplingParams(temperature=0.7, top_k=20),
    EngineSamplingParams(temperature=1.3, top_p=0.8, repetition_penalty=1.2),
    EngineSamplingParams(min_p=0.02, typical_p=0.9, presence_penalty=0.5),
)


class SeededModel:
    """Random weights in every format; implements ``weight_packing.TensorSource``."""

    config = ModelConfig(
        "llama", layers=len(KINDS), hidden=256, query_heads=8, kv_heads=2, head_dim=32, ffn=256,
        vocab=300, context=512, tied_embeddings=False,
    )  # fmt: skip
    path = Path()

    def names(self) -> list[str]:
        return list(tensor_shapes(self.config))

    def tensor(self, name: str) -> StoredTensor:
        shape = tensor_shapes(self.config)[name]
        parts = name.split(".")
        kind = KINDS[int(parts[1])] if parts[0] == "layers" else "q8_0"
        if len(shape) == 2 and kind != "f32":
            tensor = random_matrix(kind, *shape, size=shape[1] ** -0.5)
            return StoredTensor(name, shape, kind, tensor.data)
        # Uniform numbers: those of other distributions come from the system's own functions.
        values = np.random.default_rng(len(name)).random(shape, np.float32) + np.float32(0.5)
        if len(shape) == 2:
            values = (values - 1) * np.float32(0.125)
        return StoredTensor(name, shape, "f32", values)


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def token_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SeededModel.config.vocab, count).tolist()


def layers_alone(runner: CpuRunner) -> dict[str, str]:
    """Run layer by layer a step with prompts of several lengths, two of them begun before."""
    stepper = Stepper(runner)
    begun = [Sequence(token_ids(count, count)) for count in (70, 20)]
    stepper.step([(sequence, 17) for sequence in begun])
    new = Sequence(token_ids(44, 44))
    batch = stepper.pack([(begun[0], 1), (new, 44), (begun[1], 3)])
    hidden = runner.embed(batch)
    results = {"embedding": digest(hidden)}
    for layer, kind in enumerate(KINDS):
        runner.run_layers(batch, hidden, layer, layer + 1)
        results[f"layer of {kind}"] = digest(hidden)
    logits = runner.compute_logits(batch, hidden)
    assert np.isfinite(logits).all()
    return results | {"head": digest(logits)}


def answers(runner: CpuRunner) -> dict[str, object]:
    """Compute prompts whole and in chunks, choose the most likely tokens, and sample others."""
    stepper = Stepper(runner)
    sequences = [Sequence(token_ids(44, 1)), Sequence(token_ids(9, 2))]
    logits = [stepper.prefill(sequences[0]), stepper.prefill(sequences[1], (1, 2, 4))]
    results: dict[str, object] = {"logits": [digest(each) for each in logits]}
    draws = np.random.default_rng(3).random((len(SAMPLINGS), len(logits[0])))
    history = np.array(sequences[0].tokens, np.int32)
    for number, (params, row) in enumerate(zip(SAMPLINGS, draws.tolist(), strict=True)):
        rows = [SampleRow(i, params, history, 30, draw) for i, draw in enumerate(row)]
        sampled = sample(runner.logits_ops, logits[0], rows)
        results[f"sampling {number}"] = [token and token.token_id for token in sampled]
    stepper.decode(sequences, [each[-1] for each in logits], 12)
    return results | {"tokens": [sequence.tokens for sequence in sequences]}


def fill_cells(runner: CpuRunner) -> None:
    """Fill the KV cache with bytes that mean NaN: no kernel may compute with what is free."""
    cells = np.arange(SLOTS * runner.config.layers * runner.config.kv_heads, dtype=np.int32)
    widths = runner.cells.layout.widths
    runner.cells.restore(cells, tuple(np.full((len(cells), w), 255, np.uint8) for w in widths))


def main() -> None:
    model = pack_model(SeededModel())
    results, ticks = {}, 0
    for name in sys.argv[1:]:
        runner = CpuRunner(SeededModel.config, model, KVCacheDtype[name], slots=SLOTS, threads=2)
        fill_cells(runner)
        results[name] = layers_alone(runner) | answers(runner)
        ticks += int(runner.phase_ticks().sum())
        runner.close()
    machine = {
        "machine": platform.machine(),
        "dot_products": has_dot_products(cpu_target.target_context),
        "ticks": ticks,
    }
    print(json.dumps({"results": results, **machine}))


if __name__ == "__main__":
    main()
