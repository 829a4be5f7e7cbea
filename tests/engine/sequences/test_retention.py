"""Retention in the engine: KV of programs is kept while their tools run, and given back."""

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
from toy_engine import prompt, sampling, truth
from toy_runner import ToyRunner

from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.request import EngineOutput, RequestHints
from midfill.engine.scheduling.policies.background_prefill import BackgroundPrefill
from midfill.engine.scheduling.policies.continuum import Continuum
from midfill.engine.scheduling.policies.fcfs import FirstComeFirstServed
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission, QueueOrder
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.programs import FinishedTurn, Programs, RebuildCost
from midfill.engine.scheduling.scheduler import ProgramId
from midfill.engine.scheduling.step_cost import StepCost
from midfill.engine.sequences.retention import Retention
from midfill.engine.sequences.sequence import Sequence
from serving import check_idle, request

TOKEN_SECONDS = 0.02
FAST, SLOW = 5, 6  # tokens that answers consist of, and the tools that they call
TOOLS = {FAST: "fast", SLOW: "slow"}


class FixedCost(RebuildCost):
    """Each token takes the same time to compute."""

    def __init__(self) -> None:
        super().__init__(StepCost(), 16)

    def seconds(self, tokens: int) -> float:
        return TOKEN_SECONDS * tokens


class Forever(Continuum):
    """Keeps everything until slots are missing."""

    def time_to_live(self, turn: FinishedTurn) -> float:
        return inf


class Constant(Continuum):
    """Keeps the KV of every turn for the same time."""

    def time_to_live(self, turn: FinishedTurn) -> float:
        return 5.0


def called(sequence: Sequence) -> str:
    token_ids = sequence.tokens[sequence.prompt_length :]
    return TOOLS.get(int(token_ids[0]), "") if len(token_ids) else ""


@dataclass
class World:
    """An engine on a clock that only steps and the test advance; steps don't at speed 0."""

    order: QueueOrder
    slots: int = 180
    max_running: int = 2
    tool_of: Callable[[Sequence], str] = called
    now: float = 0.0
    speed: float = 1.0
    outputs: list[EngineOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.retention = self.programs = None
        if isinstance(self.order, Continuum):
            self.programs = Programs(FixedCost())
            self.retention = Retention(self.order, self.programs, self.tool_of)
        self.engine = Engine(
            ToyRunner(self.slots),
            (),
            EngineOptions(max_running=self.max_running, lookahead=64),
            policy=BackgroundPrefill(
                OrderedAdmission(SarathiServe(16, self.max_running), self.order)
            ),
            retention=self.retention,
            clock=self,
        )

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return time.perf_counter()

    def ask(
        self, name: str, tokens: list[int], program: str = "", tool: int | None = FAST,
        tenant: str = "", **hints: bool,
    ) -> None:  # fmt: skip
        """Queue a request whose answer is one token that ends it; three that don't without one."""
        stops, bias = ((), {}) if tool is None else ((tool,), {tool: 100.0})
        params = sampling(max_tokens=3, logit_bias=bias, stop_token_ids=stops)
        given = RequestHints(program=program, **hints)
        self.engine.add(request(name, tokens, params, tenant, hints=given))

    def step(self) -> list[EngineOutput]:
        before = self.engine.stats().computed_tokens
        outputs = self.engine.step()
        rows = self.engine.stats().computed_tokens - before
        self.now += self.speed * (0.001 + TOKEN_SECONDS * rows)
        assert self.available <= self.slots
        return outputs

    def run(self) -> list[str]:
        """Run until nothing is left; return all requests in the order of their first tokens."""
        while self.engine.has_work():
            self.outputs += self.step()
        return list(dict.fromkeys(each.request_id for each in self.outputs))

    def turn(self, name: str, tokens: list[int], program: str, **options: Any) -> int:
        """Run one request to its end; return how many of its tokens were cached."""
        self.ask(name, tokens, program, **options)
        self.run()
        return self.outputs[-1].cached_tokens or 0

    @property
    def pins(self) -> int:
        assert self.retention is not None
        return len(self.retention)

    @property
    def available(self) -> int:
        stats = self.engine.stats()
        return stats.slots_free + stats.slots_cached


def flood(world: World, count: int = 4) -> None:
    """Serve prompts that no program needs, and that fill what is left of the pool."""
    for number in range(count):
        world.turn(f"other {number}", prompt(60, 50 + number), "", tool=None)


class TestPins:
    def test_a_pinned_context_outlives_a_flood_that_evicts_others(self) -> None:
        cached = {}
        for order in (Continuum(), FirstComeFirstServed()):
            world = World(order)
            world.turn("a1", prompt(80), "a")
            world.speed = 0.0
            flood(world)
            cached[type(order)] = world.turn("a2", [*prompt(80), FAST, *prompt(9, 3)], "a")
        assert cached == {Continuum: 80, FirstComeFirstServed: 0}

    def test_its_slots_are_counted_until_it_is_released(self) -> None:
        world = World(Forever())
        world.turn("a1", prompt(80), "a")
        assert world.engine.stats().slots_pinned == 80
        assert world.available == world.slots - 80
        world.turn("a2", [*prompt(80), FAST, 1], "a", last_step=True)
        assert world.engine.stats().slots_pinned == 0

    def test_the_answers_are_the_same_as_without_pins(self) -> None:
        def served(order: QueueOrder) -> list[list[int]]:
            world = World(order, tool_of=lambda sequence: "fast")
            context, answers = prompt(40), []
            for number in range(4):
                expected = truth(context)
                length = next(n for n in range(1, 12) if expected[n] not in expected[:n])
                params = sampling(stop_token_ids=(expected[length],))
                name = str(number)
                hints = RequestHints(program="a")
                world.engine.add(request(name, context, params, hints=hints))
                world.run()
                answer = [
                    token
                    for output in world.outputs
                    if output.request_id == name
                    for token in output.token_ids
                ]
                assert answer == expected[: length + 1]
                answers.append(answer)
                assert world.retention is None or world.pins == 1
                flood(world, 1)
                context = [*context, *answer, *prompt(5, number)]
            return answers

        assert served(Forever(max_pinned=1.0)) == served(FirstComeFirstServed())

    def test_pins_end_with_their_time_even_if_nothing_happens(self) -> None:
        world = World(Continuum())
        assert world.engine.idle_seconds() is None
        world.turn("a1", prompt(80), "a")
        assert world.pins == 1
        assert world.available == world.slots - 80
        assert not world.engine.has_work()
        seconds = world.engine.idle_seconds()
        assert seconds is not None
        assert 0.0 < seconds < 2.0
        world.now += seconds
        assert world.engine.idle_seconds() == 0.0
        assert world.engine.has_work()
        assert world.engine.step() == []
        assert world.pins == 0
        assert world.engine.idle_seconds() is None
        check_idle(world.engine)

    def test_a_due_pin_stays_while_its_follow_up_waits(self) -> None:
        world = World(Continuum(), max_running=1)
        world.turn("a1", prompt(80), "a")
        world.ask("busy", prompt(60, 9), tool=None)
        world.step()
        world.ask("a2", [*prompt(80), FAST, *prompt(9, 3)], "a")
        world.now += 100.0
        world.step()
        assert world.pins == 1
        world.run()
        assert world.outputs[-1].cached_tokens == 80

    @pytest.mark.parametrize("order", [Forever(max_pinned=1.0), Continuum(max_pinned=1.0)])
    def test_pins_that_fill_the_pool_never_stop_others(self, order: Continuum) -> None:
        world = World(order)
        for number in range(12):
            assert world.turn(f"{number}", prompt(70, number), f"program {number}") <= 2
        assert 1 <= world.pins <= 2
        world.turn("large", prompt(140, 99), "", tool=None)
        assert len({each.request_id for each in world.outputs}) == 13

    def test_decodes_take_the_slots_of_pins_before_they_preempt_each_other(self) -> None:
        world = World(Forever(max_pinned=1.0), slots=110)
        world.turn("a1", prompt(50), "a")
        for name in "bc":
            params = sampling(max_tokens=25)
            world.engine.add(request(name, prompt(20, ord(name)), params))
        world.run()
        assert world.engine.stats().preemptions == 0
        assert world.pins == 0

    def test_pins_hold_a_share_of_the_pool_at_most(self) -> None:
        world = World(Forever(max_pinned=0.5))
        for number in range(3):
            world.turn(f"{number}", prompt(60, number), f"program {number}")
        assert world.pins == 1

    @pytest.mark.parametrize(
        "options", [{"last_step": True}, {"tool": None}, {"tool": 9}, {"program": ""}]
    )
    def test_what_has_no_next_turn_is_not_pinned(self, options: dict[str, Any]) -> None:
        world = World(Forever())
        world.turn(**{"name": "a1", "tokens": prompt(40), "program": "a"} | options)
        assert world.pins == 0
        check_idle(world.engine)

    def test_a_follow_up_with_another_text_ends_the_pin_too(self) -> None:
        world = World(Forever())
        world.turn("a1", prompt(60), "a")
        assert world.turn("a2", prompt(60, 5), "a", tool=None) == 0
        assert world.pins == 0
        check_idle(world.engine)

    def test_the_last_step_clears_the_program(self) -> None:
        world = World(Forever())
        world.turn("a1", prompt(60), "a")
        world.turn("a2", prompt(60), "a", last_step=True)
        assert world.pins == 0
        world.turn("again", prompt(30, 4), "a")
        assert world.pins == 1

    def test_programs_of_tenants_with_the_same_name_are_apart(self) -> None:
        world = World(Forever())
        world.turn("a1", prompt(40), "a", tenant="us")
        world.turn("b1", prompt(40), "a", tenant="them", tool=None)
        assert world.pins == 1

    def test_a_cancelled_answer_may_have_ended_at_a_stop_string(self) -> None:
        world = World(Forever(), tool_of=lambda sequence: "fast")
        hints = RequestHints(program="a")
        world.engine.add(request("a1", prompt(40), sampling(), hints=hints))
        world.engine.add(request("b1", prompt(40, 2), sampling(), hints=hints))
        for _ in range(4):
            world.step()
        world.engine.cancel("a1")
        assert world.pins == 1


class TestOrder:
    @pytest.mark.parametrize(
        ("order", "expected"),
        [
            (Continuum(), ["a1", "busy", "a2", "b1"]),
            (FirstComeFirstServed(), ["a1", "busy", "b1", "a2"]),
        ],
    )
    def test_a_follow_up_of_an_early_program_comes_before_a_later_program(
        self, order: QueueOrder, expected: list[str]
    ) -> None:
        world = World(order, max_running=1)
        world.turn("a1", prompt(20), "a", tool=None)  # not pinned: it calls no tool
        world.ask("busy", prompt(30, 9), tool=None)
        world.step()
        world.ask("b1", prompt(20, 1), "b")
        world.now += 0.1
        world.ask("a2", prompt(25), "a")
        assert world.run() == expected


class TestReplay:
    """Twenty programs of six turns, a pool for about six contexts; one tool takes a minute."""

    turns = 6

    def replay(self, order: QueueOrder, *, share: bool = True) -> tuple[int, float, World]:
        """Return the prompt tokens computed, the mean time of programs, and the world."""
        world = World(order, slots=330, max_running=3)
        chance = random.Random(4)
        contexts = [prompt(30, 100 + number) for number in range(20)]
        events = [(0.6 * number, number, 0) for number in range(20)]
        first, last = {number: time for time, number, _ in events}, {}
        while events or world.engine.has_work():
            while events and events[0][0] <= world.now:
                _, number, turn = heapq.heappop(events)
                tool = SLOW if number % 4 == 0 and turn == 2 else FAST
                world.ask(
                    f"{number}/{turn}", contexts[number], str(number), tool,
                    "" if share else f"{number}/{turn}", last_step=turn == self.turns - 1,
                )  # fmt: skip
                contexts[number] = [*contexts[number], tool, *prompt(10, 7 * number + turn)]
            if not world.engine.has_work():
                world.now = max(world.now, events[0][0])
                continue
            for output in world.step():
                number, turn = map(int, output.request_id.split("/"))
                if turn == self.turns - 1:
                    last[number] = world.now
                    continue
                seconds = 60.0 if output.token_ids[0] == SLOW else chance.uniform(0.2, 1.0)
                heapq.heappush(events, (world.now + seconds, number, turn + 1))
        assert len(last) == 20
        check_idle(world.engine)
        computed = world.engine.stats().computed_tokens
        return computed, sum(last[n] - first[n] for n in last) / len(last), world

    def test_it_computes_less_and_programs_end_sooner(self) -> None:
        computed, seconds, world = self.replay(Continuum(min_samples=4))
        for order, share in (
            (FirstComeFirstServed(), False),  # KV is freed when a request ends
            (FirstComeFirstServed(), True),  # the least recently used is evicted
            (Forever(min_samples=4, max_pinned=1.0), True),
        ):
            others_computed, others_seconds, _ = self.replay(order, share=share)
            assert computed < others_computed
            assert seconds < others_seconds
        assert world.programs is not None
        assert self.kept("fast", Continuum(min_samples=4), world) > 0.2
        assert self.kept("slow", Continuum(min_samples=4), world) == 0.0
        assert self.kept("slow", Constant(), world) > 0.0

    @staticmethod
    def kept(tool: str, policy: Continuum, world: World) -> float:
        """Return for how long a policy keeps 80 tokens after a call of a tool."""
        programs = world.programs
        assert programs is not None
        name = ProgramId("", f"afterwards {tool}")
        programs.record_arrival(name, world.now)
        turn = programs.finish_turn(name, tool, 80, world.now, last_step=False)
        assert turn is not None
        return policy.time_to_live(turn)
