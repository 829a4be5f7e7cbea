"""A program that starts the CPU runner on a checkpoint and answers, for test_start_conditions.py.

Arguments: the checkpoint's folder and the number of threads, 0 for the default. Prints JSON.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from midfill.kernels.cpu.decoder import forward
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch

PROMPT, ANSWER = 70, 30


def main() -> None:
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    doing: set[str] = set()
    runner = CpuRunner.load(
        open_checkpoint(folder), slots=PROMPT + ANSWER, threads=threads or None, weights="q8",
        progress=lambda what, done, total: doing.add(what),
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(4, runner.config.vocab, PROMPT).tolist()
    slots = np.arange(PROMPT + ANSWER, dtype=np.int32)
    logits = hashlib.sha256()
    done = 0
    for _ in range(ANSWER):
        rows = slots[done : len(tokens)]
        batch = ForwardBatch(
            np.array(tokens[done:], np.int32), rows, rows, np.array([0, len(rows)], np.int32),
            np.array([0, len(tokens)], np.int32), slots[: len(tokens)],
            np.array([len(rows) - 1], np.int32),
        )  # fmt: skip
        last = runner.forward(batch)[-1]
        logits.update(last.tobytes())
        done = len(tokens)
        tokens.append(int(last.argmax()))
    report = {
        "tokens": tokens[PROMPT:],
        "logits": logits.hexdigest(),
        "threads": runner.threads,
        "description": runner.description,
        "packed": "packing weights" in doing,
        "compiled": bool(forward.stats.cache_misses),
    }
    runner.close()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
