"""What caches of whole blocks cost."""

from midfill.infill.window import WindowRule
from midfill.lab.bench.edits.blocks import BLOCKS, blocks_table, measure_blocks
from midfill.lab.bench.edits.measure import mixed_session


def test_larger_blocks_cost_more_and_a_block_of_one_token_needs_no_alignment() -> None:
    window = WindowRule(2000, 600)
    costs = measure_blocks(mixed_session("mix", 40, 0), window)
    assert [each.block for each in costs] == list(BLOCKS)
    for layout in ("psm", "planner"):
        computed = [getattr(each, layout) for each in costs]
        assert computed == sorted(computed)
    assert costs[0].aligned == costs[0].planner
    assert all(each.planner < each.psm for each in costs)
    assert len(blocks_table(costs, 40, window).rows) == len(BLOCKS)
