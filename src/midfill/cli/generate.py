"""``midfill generate``: continue a prompt, in this process."""

import sys
from typing import Annotated

import typer

from midfill.cli.options import (
    AdapterOption,
    BackendOption,
    DeviceOption,
    MaxTokensOption,
    MethodOption,
    ModelOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    ThreadsOption,
)


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: ModelOption = None,
    adapter: AdapterOption = None,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    method: MethodOption = "none",
) -> None:
    """Continue a prompt, and print what the model writes as it arrives."""
    from midfill.cli.progress import show_progress
    from midfill.frontend.sampling import SamplingParams
    from midfill.llm import LLM
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tuple(stop or ())
    )
    with show_progress() as progress:
        llm = LLM(
            model or DEFAULT_MODEL,
            backend=backend,
            device=device,
            threads=threads,
            method=method,
            adapter=adapter,
            progress=progress,
        )
    with llm:
        for delta in llm.generate_stream(text, sampling):
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
