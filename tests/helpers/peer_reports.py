"""Comparisons of servers: small loads, and a report whose figures are easy to work out."""

import msgspec

from midfill.system.machine import describe_machine
from midfill_lab.bench.peers.results import (
    Figure,
    PeersOptions,
    PeersReport,
    ServerResult,
    figure,
)

SMALL_LOADS = PeersOptions(
    servers=("midfill",),
    prefill=(200, 9000),
    contexts=(16, 300),
    streams=(1, 3),
    decoded=300,
    users=(1,),
    rounds=2,
    output_tokens=4,
    keystrokes=3,
    document_tokens=400,
    session=3,
    repeats=2,
    round_repeats=1,
)
"""Every kind of load, for a tiny model; one prompt is longer than its context."""


def server_result(name: str, figures: list[Figure], **more: object) -> ServerResult:
    """Return a server's result with the fields that a test doesn't care for filled in."""
    fields: dict[str, object] = {
        "version": "1",
        "precision": "float32",
        "settings": "-t 2",
        "ready_seconds": 1.5,
        "peak_rss_bytes": 2_000_000_000,
        "weight_bytes": 100_000_000,
        "kv_bytes_per_token": 23_040,
        "bytes_per_second": 20e9,
        "skipped": {},
    }
    return msgspec.convert(
        {**fields, **more, "name": name, "figures": msgspec.to_builtins(figures)}, ServerResult
    )


def peers_report() -> PeersReport:
    """Return a comparison whose figures are easy to work out; no server is run for it."""
    decode, rounds = "decode at 16, 1 stream", "rounds, 1 user"
    own = [
        figure("rounds", rounds, "wall s", [10.0], layout="fim"),
        figure("rounds", rounds, "wall s", [4.0], layout="native"),
    ]
    plain = [figure("decode", decode, "tokens/s", [200.0, 190.0, 220.0], bound=250.0)]
    theirs = [
        figure("decode", decode, "tokens/s", [50.0], bound=200.0),
        figure("rounds", rounds, "wall s", [40.0], layout="fim"),
        figure("rounds", rounds, "wall s", [10.0], layout="efim"),
    ]
    return PeersReport(
        model="m",
        machine=describe_machine(),
        options=PeersOptions(contexts=(16,), streams=(1,)),
        kv_tokens=4096,
        servers=[
            server_result("midfill", own),
            server_result("midfill without speculation", plain),
            server_result(
                "llama.cpp", theirs, skipped={"prefill of 512": "too slow"}, error="it died"
            ),
        ],
        missing={"vllm": "pip install it"},
    )
