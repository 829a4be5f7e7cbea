"""A step takes at least what each part takes of its scarcest resource, and all bytes together."""

import pytest

from midfill_lab.bench.roofline.bounds import bound_part, bound_step, bound_steps
from midfill_lab.bench.roofline.ceilings import Resource, Roofline
from midfill_lab.bench.roofline.work import PartWork

MACHINE = Roofline(
    reads={1_000: 100.0, 10_000: 10.0},
    int8_per_second=50.0,
    bfloat16_per_second=40.0,
    float32_per_second=20.0,
    cache_bytes=2_000,
)


def work(bytes: float, operations: float, arithmetic: Resource = Resource.INT8) -> PartWork:
    return PartWork("part", bytes, operations, arithmetic)


def test_a_part_waits_for_the_slower_of_reading_and_computing() -> None:
    reading = bound_part(work(20_000, 40_000), MACHINE)
    assert (reading.seconds, reading.resource) == (2_000, Resource.MEMORY)
    computing = bound_part(work(20_000, 200_000), MACHINE)
    assert (computing.seconds, computing.resource) == (4_000, Resource.INT8)
    slower = bound_part(work(20_000, 200_000, Resource.FLOAT32), MACHINE)
    assert (slower.seconds, slower.resource) == (10_000, Resource.FLOAT32)


def test_what_fits_the_cache_is_read_from_it() -> None:
    found = bound_part(work(1_500, 0), MACHINE)
    assert (found.seconds, found.resource) == (15, Resource.CACHE)


def test_parts_follow_one_another() -> None:
    found = bound_step([work(20_000, 0), work(0, 500_000), work(0, 5_000_000)], MACHINE)
    assert found.seconds == 2_000 + 10_000 + 100_000
    assert found.resource is Resource.INT8
    assert found.bytes == 20_000
    assert found.operations == 5_500_000


def test_parts_that_fit_the_cache_one_by_one_may_not_fit_it_together() -> None:
    parts = [work(1_000, 0)] * 12
    assert sum(bound_part(part, MACHINE).seconds for part in parts) == 120
    found = bound_step(parts, MACHINE)
    assert (found.seconds, found.resource) == (1_200, Resource.MEMORY)


def test_steps_add_up_part_by_part() -> None:
    steps = [[work(20_000, 0), work(0, 500)], [work(20_000, 0), work(0, 1_500)]]
    found = bound_steps(steps, MACHINE)
    assert found.seconds == pytest.approx(2_000 + 10 + 2_000 + 30)
    assert [part.seconds for part in found.parts] == [4_000, 40]
    assert found.resource is Resource.MEMORY


def test_bounds_grow_with_bytes_and_operations() -> None:
    sizes = range(0, 30_000, 250)
    by_bytes = [bound_step([work(size, 900)] * 3, MACHINE).seconds for size in sizes]
    assert by_bytes == sorted(by_bytes)
    by_operations = [bound_step([work(900, size)] * 3, MACHINE).seconds for size in sizes]
    assert by_operations == sorted(by_operations)


def test_nothing_takes_no_time() -> None:
    assert bound_step([work(0, 0)], MACHINE).seconds == 0
