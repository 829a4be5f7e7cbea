"""Fuzz the parsers with atheris, guided by branches, from seeds and from what earlier runs kept.

    make fuzz                                 # all targets, a million inputs
    make fuzz TARGETS="gguf planner" RUNS=0.1 # these, a tenth of their inputs

Each target runs in a process of its own. An input that shows a bug is written to
``build/fuzz/TARGET/`` and named at the end: fix the bug, then put the input, made as small as
possible, into ``tests/fuzz/regressions/TARGET/``.
"""

import argparse
import logging
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "fuzz"
REGRESSIONS = Path(__file__).parent / "regressions"
SECONDS = 60  # of wall time, also beside other work: an input that takes longer hangs its parser
MEGABYTES = 4096


INPUTS = {
    "gguf-header": 150_000,
    "gguf": 50_000,
    "kv-blob": 50_000,
    "safetensors": 100_000,
    "model-folder": 50_000,
    "midfill-json": 50_000,
    "lora-config": 50_000,
    "gguf-tokenizer": 80_000,
    "tokenizer-folder": 80_000,
    "chat-template": 50_000,
    "bodies": 100_000,
    "template": 50_000,
    "planner": 10_000,
    "key-file": 40_000,
    "authorization": 20_000,
    "events": 45_000,
    "metrics": 20_000,
    "lsp-frames": 5_000,
}
"""Inputs by target, a million in all; fewer where each takes longer."""


def main() -> int:
    """Fuzz the targets that the command line names, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(INPUTS))
    parser.add_argument("--runs", type=float, default=1.0, help="share of the inputs")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = set(given.targets) - set(INPUTS)
    if unknown:
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    if given.one:
        fuzz(given.targets[0], given.runs)
    return max([fuzz_in_process(name, given.runs) for name in given.targets or INPUTS])


def fuzz_in_process(name: str, share: float) -> int:
    """Fuzz a target in a process of its own; return 1 if that has found a bug."""
    log = BUILD / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, name, "--runs", str(share), "--one"]
    started = time.monotonic()
    with log.open("wb") as file:
        failed = subprocess.run(command, stdout=file, stderr=file, check=False).returncode != 0
    took = time.monotonic() - started
    result = f"a bug: see {log}" if failed else f"{runs_of(name, share)} inputs in {took:.0f} s"
    print(f"{name}: {result}", flush=True)
    return int(failed)


def runs_of(name: str, share: float) -> int:
    """Return the number of inputs of a target."""
    return max(1, round(INPUTS[name] * share))


def fuzz(name: str, share: float) -> NoReturn:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    with atheris.instrument_imports(include=["midfill"]):
        from fuzzing.targets import TARGETS
    target = TARGETS[name]
    folder, corpus = BUILD / name, BUILD / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    kept = REGRESSIONS / name
    regressions = [path.read_bytes() for path in kept.iterdir()] if kept.is_dir() else []
    for number, seed in enumerate([*target.seeds(), *regressions]):
        (corpus / f"seed-{number}").write_bytes(seed)
    options: dict[str, object] = {
        "runs": runs_of(name, share),
        "max_len": target.max_bytes,
        "timeout": SECONDS,
        "rss_limit_mb": MEGABYTES,
        "artifact_prefix": f"{folder}{os.sep}",
        "print_final_stats": 1,
    }
    if target.words:
        options["dict"] = folder / "words"
        lines = (f'"{_escaped(word)}"\n' for word in target.words)
        (folder / "words").write_text("".join(lines))
    arguments = [f"-{option}={value}" for option, value in options.items()]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], target.run)
    atheris.Fuzz()
    raise AssertionError("it ends the process")


def _escaped(word: bytes) -> str:
    return "".join(f"\\x{byte:02X}" for byte in word)


if __name__ == "__main__":
    sys.exit(main())
