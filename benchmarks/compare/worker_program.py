"""A program that loads a model with one version of midfill and times requests.

``python -m benchmarks compare speed`` runs this very file with both versions, which may lie far
apart. So it imports nothing but ``LLM`` and ``SamplingParams`` from the package, and only calls
what every version has.

It reads JSON lines and answers each with one:

    {"model": "smollm2-135m", "threads": null}        -> {"loaded": "smollm2-135m"}, comes first
    {"prompt": [token ids], "tokens": 64}             -> {"first_seconds": time to the first piece,
                                                          "later_seconds": from there to the end,
                                                          "later_tokens": tokens in that time}
    {"prompts": [[token ids], ...], "tokens": 64}     -> {"seconds": time of all answers at once}
"""

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midfill import LLM

_PARKED_SECONDS = 0.005
"""After a step, kernel threads wait for the next one for 1 to 2 ms before they sleep. Until then
they would take a core from the other version."""


def main() -> None:
    """Answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print doesn't get between the replies
    from midfill import LLM

    llm: LLM | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if llm is None:
            llm = LLM(request["model"], threads=request["threads"], speculation=False)
            reply: dict[str, Any] = {"loaded": request["model"]}
        elif "prompts" in request:
            reply = measure_streams(llm, request["prompts"], request["tokens"])
        else:
            reply = measure(llm, request["prompt"], request["tokens"])
        time.sleep(_PARKED_SECONDS)
        print(json.dumps(reply), file=replies, flush=True)


def measure(llm: "LLM", prompt: list[int], tokens: int) -> dict[str, float]:
    """Time one greedy answer of exactly ``tokens`` tokens."""
    from midfill import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    arrivals, counts = [], []
    started = time.perf_counter()
    for delta in llm.generate_stream(prompt, sampling):
        arrivals.append(time.perf_counter())
        counts.append(len(delta.token_ids))
    return {
        "first_seconds": arrivals[0] - started,
        "later_seconds": arrivals[-1] - arrivals[0],
        "later_tokens": sum(counts[1:]),
    }


def measure_streams(llm: "LLM", prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Time greedy answers of exactly ``tokens`` tokens to all prompts at once.

    The prompts are computed before, so that hardly more than decode is timed.
    """
    from midfill import SamplingParams

    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    started = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    main()
