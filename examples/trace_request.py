"""Trace one infill request: the layout, the plan and batch of every step, and the text.

Run it with: .venv/bin/python examples/trace_request.py

It asks twice for the same document, the second time with a few characters typed at the caret, so
that the second answer shows what the planner and the prefix cache save.
"""

from typing import Any

from midfill.arrays import RunnerArray
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import scheduler_policy, speculation
from midfill.engine.scheduling.scheduler import SchedulerPolicy, ScheduleState, StepPlan
from midfill.frontend.generation import PromptGeneration
from midfill.frontend.prompt import Prompt
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.sampling import SamplingParams
from midfill.infill.formats import Sentinel
from midfill.infill.layout import PromptLayout
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.models.tokens.tokenizer import Tokenizer, keeps_tokens_of
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from midfill.runners.loading import load_runner

PREFIX = 'import math\n\n\ndef circle_area(radius):\n    """The area of a circle."""\n    return ma'
SUFFIX = "\n\n\nprint(circle_area(2.0))\n"
SAMPLING = SamplingParams(temperature=0.0, max_tokens=16)


class TracedPolicy:
    """A scheduler policy that prints each plan of another one."""

    def __init__(self, policy: SchedulerPolicy) -> None:
        self._policy = policy

    def plan(self, state: ScheduleState) -> StepPlan:
        """Plan one step."""
        plan = self._policy.plan(state)
        for name in ("preempt", "admit", "chunks", "decodes", "background"):
            if chosen := getattr(plan, name):
                print(f"  plan   {name}: {list(chosen)}")
        return plan


class TracedRunner:
    """A runner that prints each batch before another one computes it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: ForwardBatch) -> RunnerArray:
        """Return logits [outputs, vocab] float32."""
        lengths = (batch.kv_indptr[1:] - batch.kv_indptr[:-1]).tolist()
        print(
            f"  batch  {batch.rows} rows of {batch.requests} request, positions"
            f" {batch.positions[0]} to {batch.positions[-1]}, KV lengths {lengths},"
            f" {len(batch.logit_rows)} of the rows want logits"
        )
        return self._runner.forward(batch)


def show_prompt(layout: PromptLayout, prompt: Prompt) -> None:
    """Print a layout's segments in the order the model reads them."""
    for segment in layout.segments:
        if isinstance(segment, Sentinel):
            print(f"  layout {'sentinel':9} {segment.text}")
        else:
            print(f"  layout {segment.role:9} {segment.text!r}")
    print(
        f"  prompt {len(prompt.token_ids)} tokens; token healing: the model rewrites"
        f" {prompt.begins_with!r}"
    )


def answer(engine: Engine, tokenizer: Tokenizer, prompt: Prompt, request_id: str) -> None:
    """Run one request to its end and print what every step brings."""
    engine.add(prompt.request(request_id, SAMPLING))
    response = PromptGeneration(prompt, SAMPLING, tokenizer)
    while not response.finished:
        for output in engine.step():
            delta = response.push(output)
            tokens = [tokenizer.token_text(token_id) for token_id in output.token_ids]
            print(f"  tokens {tokens} -> text {'' if delta is None else delta.text!r}")
    usage = response.usage
    print(f"  usage  {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens were cached")


def main() -> None:
    """Load the default model and trace two requests."""
    options = ModelOptions(kv_memory=64 * 2**20)
    adapter = resolve_adapter(DEFAULT_MODEL, None)
    checkpoint = open_model(resolve(DEFAULT_MODEL), adapter, options.weights)
    tokenizer = checkpoint.tokenizer
    runner = load_runner(checkpoint, options)
    engine = Engine(
        TracedRunner(runner),
        tokenizer.eos_token_ids,
        EngineOptions(),
        policy=TracedPolicy(scheduler_policy(options, runner.config.layers)),
        speculation=speculation(options),
        token_bytes=tokenizer.token_bytes,
    )
    format = fim_format(checkpoint)
    prompts = PromptEncoder(checkpoint, format, runner.config.context)
    # The encoder has a planner of its own; this one plans the same layouts, to show them.
    planner = Planner(
        format, PlannerOptions(fragments=True, keeps_tokens=keeps_tokens_of(tokenizer))
    )
    for number, prefix in enumerate((PREFIX, PREFIX + "th.pi * ")):
        print(f"\nrequest {number}: {prefix[-16:]!r} | {SUFFIX[:16]!r}")
        request = InfillRequest(prefix=prefix, suffix=SUFFIX)
        prompt = prompts.infill(request)
        show_prompt(planner.plan_and_record(request), prompt)
        answer(engine, tokenizer, prompt, f"request-{number}")


if __name__ == "__main__":
    main()
