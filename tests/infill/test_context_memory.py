"""The memory of contexts, over all tenants: counted with its objects, and bounded."""

import gc
import tracemalloc

from midfill.infill.context_files import ContextFile
from midfill.infill.context_planner import ContextPlanner
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.planner import Planner
from midfill.infill.request import InfillRequest

FORMAT = FimFormat("psm", Sentinel("<PRE>", 1), Sentinel("<SUF>", 2), Sentinel("<MID>", 3))


def request(tenant: str, round_number: int, files: int = 20) -> InfillRequest:
    return InfillRequest(
        prefix="a",
        suffix="b",
        tenant=tenant,
        context_files=tuple(
            ContextFile(f"x = {tenant}{round_number}{number}\n", f"{round_number}-{number}.py")
            for number in range(files)
        ),
    )


def test_what_is_counted_is_no_less_than_what_is_taken() -> None:
    planner = ContextPlanner(FORMAT, 1000, max_bytes=32_000_000)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for tenant in range(40):
            for round_number in range(12):
                planner.order_and_record(request(str(tenant), round_number))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < after - before <= planner.memory().held_bytes


def test_tenants_that_came_longest_ago_are_forgotten() -> None:
    planner = ContextPlanner(FORMAT, 1000, max_bytes=100_000)
    for tenant in range(100):
        planner.order_and_record(request(str(tenant), 0))
        memory = planner.memory()
        assert memory.held_bytes <= memory.max_bytes == 100_000
    assert 1 < len(planner._orders) < 100
    assert "99" in planner._orders


def test_a_planner_tells_what_documents_and_contexts_take() -> None:
    planner = Planner(FORMAT)
    assert {kind: memory.held_bytes for kind, memory in planner.memory().items()} == {
        "documents": 0,
        "contexts": 0,
    }
    planner.plan_and_record(request("", 0))
    assert all(0 < one.held_bytes <= one.max_bytes for one in planner.memory().values())
