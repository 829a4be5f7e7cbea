"""Call a server's API with whatever schemathesis makes of its OpenAPI description.

    make fuzz-api CALLS=50000

A tiny model answers. Calls that end with a status of 500 or more, or hang, are named at the end,
each as a curl command; the exit status is then 1.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from fuzzing.api import Calls, call, operations
from running_server import start
from tiny_checkpoints import write_tiny

_ROUND = 50  # calls of each operation before the next one's


def main() -> int:
    """Call all operations in turn until there were enough calls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=50_000)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    calls, number, started = Calls(), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny-llama")
        options = ("--kv-memory", "8MB", "--allow-method", "any", "--log-level", "warning")
        with start(model, *options) as server:
            known = list(operations(server.url))
            while len(calls) < given.calls and not calls.bugs:
                for operation in known:
                    call(operation, calls, _ROUND, number)
                number += 1
                print(f"{len(calls)} calls, {len(calls.bugs)} bugs", flush=True)
            restarts = server.metric("engine_restarts_total")
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(calls.statuses.items()))
    took = time.monotonic() - started
    print(
        f"{len(calls)} calls of {len(known)} operations in {took:.0f} s, answered with {statuses};"
        f" {restarts:.0f} restarts of the engine"
    )
    print(*calls.bugs, sep="\n")
    return 1 if calls.bugs or restarts else 0


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
