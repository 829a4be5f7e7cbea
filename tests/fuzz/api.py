"""Call a server's API, and a gateway in front of a server, with whatever could hurt them.

    make fuzz-api CALLS=100000 ANSWERS=2000

A fifth of the calls schemathesis makes of the API's OpenAPI description; the others are bytes
(``fuzzing.connections``). Then a gateway gets hostile answers (``fuzzing.upstreams``). A tiny model
answers, beside a warm tier whose folder was poisoned. Calls that end with a status of 500 or more
that is not documented, or hang, are named at the end; the exit status is then 1.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from fuzzing.api import Calls, call, operations
from fuzzing.connections import ByteCalls, Stalls, endpoints
from fuzzing.upstreams import attack
from running_server import RunningServer, start
from tiny_checkpoints import write_tiny

_ROUND = 10  # calls of each operation that schemathesis makes before the next one's
_AS_BYTES = 4  # times as many calls as bytes
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Send the calls, then the answers; return 1 if there were bugs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    good = not given.calls or call_server(given.calls, given.seed)
    logging.disable(logging.CRITICAL)
    if given.answers:
        good = answer_gateway(given.answers, given.seed) and good
    return 0 if good else 1


def call_server(most: int, first: int) -> bool:
    """Send calls to a server; return whether it bore them."""
    calls, number, started, grown = Calls(), first, time.monotonic(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny-llama")
        poisoned = poison(Path(folder) / "kv")
        options = ("--kv-memory", "8MB", "--allow-method", "any", "--log-level", "error",
               "--document-memory", "512K",
                   "--client-timeout", "1", "--warm-tier-disk", "8MB",
                   "--warm-tier-folder", str(poisoned), "--batch-storage", "8MB",
                   "--batch-folder", str(Path(folder) / "batches"))  # fmt: skip
        with start(model, *options) as server, Stalls(server.url, server.process.pid) as stalls:
            known = list(operations(server.url))
            described = endpoints(server.get("/openapi.json").json())
            sent = ByteCalls(server.url, described, calls, stalls)
            while len(calls) < most and len(calls.bugs) < 20:
                before = len(calls)
                for operation in known:
                    call(operation, calls, _ROUND, number)
                last = 10**7 * number + _AS_BYTES * max(_ROUND, len(calls) - before)
                sent.send_all(range(10**7 * number, last))
                number += 1
                if not grown and len(calls) > most // 2:
                    grown = sum(memory(server))
                each = " + ".join(f"{one:.1f}" for one in memory(server))
                said = f"{len(calls)} calls, {len(calls.bugs)} bugs, {stalls.worst:.3f} s stall"
                print(f"{said} ({stalls.during[:200]}), {each} MB", flush=True)
            grown = sum(memory(server)) - grown if grown else 0.0
            restarts = server.metric("engine_restarts_total")
            answered = server.complete(prompt="a = ", max_tokens=2)["choices"]
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(calls.statuses.items()))
    print(
        f"{len(calls)} calls of {len(known)} operations in {time.monotonic() - started:.0f} s,"
        f" answered with {statuses} (0: none); {restarts:.0f} restarts of the engine;"
        f" {len(stalls.over)} stalls over 100 ms, the longest {stalls.worst:.3f} s;"
        f" {grown:+.1f} MB since the first half"
    )
    print(*stalls.over[:20], *calls.bugs, sep="\n")
    return not (calls.bugs or restarts or stalls.over) and bool(answered)


def answer_gateway(most: int, seed: int) -> bool:
    """Give hostile answers to a gateway; return whether it bore them."""
    run = asyncio.run(attack(range(most), seed))
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(run.statuses.items()))
    print(
        f"{run.answers} hostile answers, of which clients got {statuses}; the longest stall"
        f" {run.stall:.3f} s (answers {run.stalled_by}); {run.grown_bytes / 1e6:+.1f} MB since the"
        " first half"
    )
    print(*run.bugs, sep="\n")
    return not run.bugs and run.stall <= 0.1


def memory(server: RunningServer) -> list[float]:
    """Return the megabytes of a server and of its engine, once it is idle."""
    server.wait_until_settled()
    processes = [server.process.pid, *server.engine_processes()]
    pages = (int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in processes)
    return [one * _PAGE / 1e6 for one in pages]


def poison(folder: Path) -> Path:
    """Make a warm tier's folder that holds what an attacker, or a crash, could have left."""
    for name in ("0" * 32, "f" * 32):
        model = folder / name
        model.mkdir(0o700, parents=True)
        (model / "lock").symlink_to("/dev/null")
        (model / f"{'ab' * 32}.kv").write_bytes(os.urandom(5000))
        (model / f"{'cd' * 32}.kv").symlink_to("/dev/zero")
        (model / f"{'ef' * 32}.kv").mkdir()
        (model / ".x.partial").write_bytes(bytes(9_000_000))
    folder.chmod(0o700)
    return folder


def write_model(folder: Path) -> Path:
    """Write a tiny model that has a chat template, too."""
    write_tiny("llama", folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings["chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    path.write_text(json.dumps(settings))
    return folder


if __name__ == "__main__":
    sys.exit(main())
