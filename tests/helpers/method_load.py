"""What holds of every method: an answer under load has the bits that it has alone."""

from collections.abc import Iterable

from made_methods import small_method

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.runners.cpu.runner import CpuRunner
from serving import Answer, FixedCost, build_engine, preempting_every, request, same, serve

Prompt = tuple[int, ...]


class Alone:
    """Answers of each method's small form (``small_method``), one request at a time."""

    def __init__(self, runner: CpuRunner, params: EngineSamplingParams) -> None:
        self._runner = runner
        self._params = params
        self._answers: dict[tuple[str, Prompt], Answer] = {}

    def __call__(self, name: str, tokens: Prompt) -> Answer:
        if (name, tokens) not in self._answers:
            [asked] = self._requests([tokens])
            self._answers[name, tokens] = serve(self._engine(name, 512), [asked])["0", 0]
        return self._answers[name, tokens]

    def check_load(self, name: str, prompts: list[Prompt], budget: int) -> None:
        """Check prompts served together, with a step cost that learns and with a fixed one."""
        for cost in (None, FixedCost(0.0)):
            self._check(name, prompts, self._engine(name, budget, cost))

    def check_preemption(self, name: str, prompts: list[Prompt], steps: int) -> None:
        """Check prompts served together, all of them preempted every few steps."""
        one = self._engine(name, 512)
        self._check(name, prompts, one, steps)
        assert one.stats().preemptions > 0

    def _check(
        self, name: str, prompts: list[Prompt], engine: Engine, preempted: int | None = None
    ) -> None:
        after_step = None if preempted is None else preempting_every(preempted)
        found = serve(engine, self._requests(prompts), after_step=after_step)
        for index, tokens in enumerate(prompts):
            assert same(found[str(index), 0], self(name, tokens))

    def _engine(self, name: str, budget: int, cost: FixedCost | None = None) -> Engine:
        method = small_method(name, self._runner.config)
        return build_engine(self._runner, token_budget=budget, method=method, step_cost=cost)

    def _requests(self, prompts: Iterable[Prompt]) -> list[EngineRequest]:
        return [request(str(at), tokens, self._params) for at, tokens in enumerate(prompts)]
