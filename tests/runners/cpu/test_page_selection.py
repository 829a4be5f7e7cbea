"""Pages that rows choose within the step: the kernels choose what the plain form does."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from naive_attention import uniform_ragged_index
from tiny_checkpoints import VOCAB, write_variant

from midfill.config import KVCacheDtypeName
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan, KeyPart
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.page_selection import (
    PageRule,
    PageSelection,
    Search,
    SelectionRule,
)
from midfill.runners.forward.runner import Runner
from midfill.runners.forward.tree_search import TreeRule
from serving import torch_runner

SLOTS, BEFORE = 700, 333
RULE = PageRule(pages=4, page=16, summary=4)
TREE = TreeRule(blocks=20, block=2, window=24, sinks=5)
each_rule = pytest.mark.parametrize("rule", [RULE, TREE], ids=["pages", "tree"])
TOKENS = np.random.default_rng(0).integers(1, VOCAB, SLOTS).astype(np.int32)


@pytest.fixture(scope="module", params=[("f32", 1), ("f16", 2), ("bf16", 2)])
def cpu(llama: Checkpoint, request: pytest.FixtureRequest) -> Iterator[CpuRunner]:
    kv, threads = request.param
    runner = load(llama, kv, threads)
    yield runner
    runner.close()


def load(checkpoint: Checkpoint, kv: KVCacheDtypeName, threads: int) -> CpuRunner:
    return CpuRunner.load(
        checkpoint, slots=SLOTS, threads=threads, weights="f32", kv_cache_dtype=kv
    )


def batch(first: int, rows: int, plan: AttentionPlan | None = None, cells: int = 0) -> ForwardBatch:
    """Rows of one request whose token i is in slot i + 7; its first ``cells`` tokens are cells."""
    numbers = np.arange(first, first + rows, dtype=np.int32)
    slots = np.arange(cells + 7, 7 + first + rows, dtype=np.int32)
    return ForwardBatch(
        token_ids=TOKENS[numbers],
        positions=numbers,
        write_slots=numbers + 7,
        query_indptr=np.array([0, rows], np.int32),
        kv_indptr=np.array([0, len(slots)], np.int32),
        kv_slots=slots,
        logit_rows=np.arange(rows, dtype=np.int32),
        attention=() if plan is None else (plan,),
    )


def selection(
    runner: Runner,
    rows: int,
    made_by: list[int],
    of_row: list[int],
    *,
    rule: SelectionRule = RULE,
    first: int = BEFORE,
    heads: np.ndarray | None = None,
    before: np.ndarray | None = None,
    known: bool = False,
) -> PageSelection:
    config = runner.config
    count = rule.summaries(first + rows)
    shape = (len(made_by), config.layers, config.query_heads, rule.width)
    chosen = np.full(shape, -7, np.int32)
    if before is not None:
        chosen[0] = before
    every = np.arange(count, dtype=np.int32)
    return PageSelection(
        rule=rule,
        heads=np.ones((config.layers, config.kv_heads), bool) if heads is None else heads,
        of_row=np.array(of_row, np.int32),
        made_by=np.array(made_by, np.int32),
        chosen=chosen,
        entries=every[::-1].copy(),
        missing=every[:0] if known else every,
        pairs=np.zeros((rows, config.query_heads), np.int64),
    )


def run(runner: Runner, rows: int, plan: AttentionPlan | None, cells: int = 0) -> np.ndarray:
    return runner.forward(batch(BEFORE, rows, plan, cells)).copy()


def cells_of(runner: Runner, counts: np.ndarray) -> RaggedIndex:
    """The cells of the first counts[layer, head] tokens of each head."""
    heads = counts.size
    every = cells_of_slots(np.arange(7, 7 + BEFORE, dtype=np.int32), heads, SLOTS)
    kept = [row[:count] for row, count in zip(every, counts.reshape(-1), strict=True)]
    return RaggedIndex(np.concatenate(kept), np.cumsum([0, *map(len, kept)]).astype(np.int32))


class TestTheKernelsAgreeWithTheReference:
    def both(self, cpu: CpuRunner, checkpoint: Checkpoint, **changes: object) -> PageSelection:
        """Choices of six rows, in both runners; returns the kernels'."""
        made, found = [], []
        for runner in (torch_runner(checkpoint, slots=SLOTS), cpu):
            runner.forward(batch(0, BEFORE))
            own = selection(runner, 6, [0, 3], [0, 0, 0, 1, 1, 1], **changes)  # type: ignore[arg-type]
            found.append(run(runner, 6, AttentionPlan(selection=own)))
            made.append(own)
        if cpu.kv_cache_dtype.value == "f32":  # rounded keys may turn out to be better or worse
            np.testing.assert_allclose(found[1], found[0], atol=2e-3, rtol=0.0)
            assert np.array_equal(made[0].chosen, made[1].chosen)
            assert np.array_equal(made[0].pairs, made[1].pairs)
        return made[1]

    def test_choices_logits_and_counts(self, cpu: CpuRunner, llama: Checkpoint) -> None:
        own = self.both(cpu, llama)
        newest = [(BEFORE + row) // RULE.page for row in (0, 3)]
        assert (own.chosen[..., 0] == np.array(newest)[:, None, None]).all()
        assert (np.diff(own.chosen[..., 1:], axis=-1) > 0).all()
        assert len(np.unique(own.chosen[0, ..., 1:], axis=1)) > 1, "heads choose by themselves"
        read = 3 * RULE.page + np.arange(BEFORE, BEFORE + 6) % RULE.page + 1
        assert (own.pairs == cpu.config.layers * read[:, None]).all()

    @pytest.mark.parametrize(
        "rule",
        [
            TREE,
            replace(TREE, search=Search.FIRSTS),
            replace(TREE, search=Search.EVERY_KEY),
            replace(TREE, blocks=13, block=3, sinks=0),
            replace(TREE, block=1),
            replace(TREE, blocks=0),
            replace(TREE, blocks=1, window=1),
            replace(TREE, blocks=(BEFORE + 1 - 24 - 5) // 2 - 1),
        ],
    )
    def test_tree_searches(self, cpu: CpuRunner, llama: Checkpoint, rule: TreeRule) -> None:
        """Among them one that splits only its last nodes, and one that chooses nothing."""
        own = self.both(cpu, llama, rule=rule)
        firsts = [BEFORE + row + 1 - rule.window for row in (0, 3)]
        assert (own.chosen[..., 0] == np.array(firsts)[:, None, None]).all()
        blocks = own.chosen[..., 1:]
        assert (np.diff(blocks, axis=-1) > 0).all()
        if rule.blocks:
            assert blocks.min() >= 0
            assert blocks.max() < rule.candidates(BEFORE + 4)
        keys = rule.sinks + rule.blocks * rule.block + rule.window
        read = keys + np.array([0, 1, 2, 0, 1, 2])
        spare = own.pairs - cpu.config.layers * read[:, None]
        assert (spare <= 0).all()
        assert spare.min() >= -cpu.config.layers * (rule.block - 1), "the last block may be cut"

    @each_rule
    def test_heads_that_do_not_choose(
        self, cpu: CpuRunner, llama: Checkpoint, rule: SelectionRule
    ) -> None:
        heads = np.ones((cpu.config.layers, cpu.config.kv_heads), bool)
        heads[0, 0] = heads[1] = False
        own = self.both(cpu, llama, heads=heads, rule=rule)
        assert (own.chosen[:, 1, :, 0] == 0).all()
        assert (own.chosen[:, 1, :, 1:] == -1).all()


@pytest.mark.parametrize(
    ("rule", "tighter"),
    [
        (PageRule(pages=(BEFORE + 5) // 16 + 1, page=16, summary=4), RULE),
        (replace(TREE, blocks=(BEFORE + 5 - 24 - 5) // 2 + 1), TREE),
    ],
)
def test_a_budget_of_all_keys_gives_the_bits_of_dense_attention(
    cpu: CpuRunner, rule: SelectionRule, tighter: SelectionRule
) -> None:
    cpu.forward(batch(0, BEFORE))
    dense = run(cpu, 5, None)
    own = selection(cpu, 5, [0, 4], [0, 0, 0, 0, 1], rule=rule)
    assert np.array_equal(run(cpu, 5, AttentionPlan(selection=own)), dense)
    assert (own.pairs == cpu.config.layers * (BEFORE + 1 + np.arange(5))[:, None]).all()
    fewer = selection(cpu, 5, [0], [0] * 5, rule=tighter)
    assert not np.array_equal(run(cpu, 5, AttentionPlan(selection=fewer)), dense)


@each_rule
def test_a_row_has_the_same_bits_alone_and_with_others(cpu: CpuRunner, rule: SelectionRule) -> None:
    """Choices that were made before are used like those that the step makes."""
    cpu.forward(batch(0, BEFORE))
    own = selection(cpu, 6, [0, 3], [0, 0, 0, 1, 1, 1], rule=rule)
    whole = run(cpu, 6, AttentionPlan(selection=own))
    found, before = [], None
    for row in range(6):
        made = [0] if row in (0, 3) else [-1]
        one = selection(
            cpu, 1, made, [0], rule=rule, first=BEFORE + row, before=before,
            known=row not in (0, 3),
        )  # fmt: skip
        found.append(cpu.forward(batch(BEFORE + row, 1, AttentionPlan(selection=one))).copy())
        before = one.chosen[0]
    assert np.array_equal(np.concatenate(found), whole)


def test_summaries_are_kept_from_step_to_step(cpu: CpuRunner) -> None:
    """Those that are not missing are read as they were left, whatever became of the keys."""
    cpu.forward(batch(0, BEFORE))
    own = selection(cpu, 1, [0], [0])
    expected = run(cpu, 1, AttentionPlan(selection=own))
    again = selection(cpu, 1, [0], [0], known=True)
    assert np.array_equal(run(cpu, 1, AttentionPlan(selection=again)), expected)
    parts = cpu._part_attention()
    parts._summaries[:] = 0
    run(cpu, 1, AttentionPlan(selection=selection(cpu, 1, [0], [0], known=True)))
    empty = selection(cpu, 1, [0], [0], known=True)
    run(cpu, 1, AttentionPlan(selection=empty))
    assert (empty.chosen[..., 1:] == np.arange(RULE.pages - 1)).all(), "all scores are 0"
    assert parts.summary_bytes == parts._summaries.nbytes > 0


@each_rule
def test_cells_are_pages_like_slots(cpu: CpuRunner, rule: SelectionRule) -> None:
    """Where the first keys are cells, as after eviction, their pages are the same."""
    config = cpu.config
    cpu.forward(batch(0, BEFORE))
    slots = selection(cpu, 4, [0], [0] * 4, rule=rule)
    expected = run(cpu, 4, AttentionPlan(selection=slots))
    index = uniform_ragged_index(
        np.arange(7, 207, dtype=np.int32), config.layers * config.kv_heads, SLOTS
    )
    cells = selection(cpu, 4, [0], [0] * 4, rule=rule)
    found = run(cpu, 4, AttentionPlan(index, selection=cells), cells=200)
    assert np.array_equal(cells.chosen, slots.chosen)
    assert np.array_equal(found, expected)


@each_rule
def test_heads_may_hold_different_cells(
    cpu: CpuRunner, llama: Checkpoint, rule: SelectionRule
) -> None:
    """Heads that don't choose hold few keys, the others all."""
    config = cpu.config
    heads = np.ones((config.layers, config.kv_heads), bool)
    heads[0, 1] = heads[1, 0] = False
    counts = np.where(heads, 240, 30)
    found, made = [], []
    for runner in (torch_runner(llama, slots=SLOTS), cpu):
        runner.forward(batch(0, BEFORE))
        own = selection(runner, 3, [0, 2], [0, 0, 1], rule=rule, heads=heads)
        plan = AttentionPlan(cells_of(runner, counts), selection=own)
        found.append(run(runner, 3, plan, cells=240))
        made.append(own)
    if cpu.kv_cache_dtype.value == "f32":
        np.testing.assert_allclose(found[1], found[0], atol=2e-3, rtol=0.0)
        assert np.array_equal(made[0].pairs, made[1].pairs)


@each_rule
def test_other_requests_of_the_step_keep_their_bits(cpu: CpuRunner, rule: SelectionRule) -> None:
    cpu.forward(batch(0, BEFORE))
    alone = run(cpu, 1, AttentionPlan(selection=selection(cpu, 1, [0], [0], rule=rule)))
    plain = replace(batch(20, 5), write_slots=np.arange(650, 655, dtype=np.int32))
    plain = replace(plain, kv_slots=np.append(plain.kv_slots[:20], plain.write_slots))
    expected = cpu.forward(plain).copy()
    own = batch(BEFORE, 1)
    both = ForwardBatch(
        token_ids=np.append(plain.token_ids, own.token_ids),
        positions=np.append(plain.positions, own.positions),
        write_slots=np.append(plain.write_slots, own.write_slots),
        query_indptr=np.array([0, 5, 6], np.int32),
        kv_indptr=np.array([0, 25, 25 + len(own.kv_slots)], np.int32),
        kv_slots=np.append(plain.kv_slots, own.kv_slots),
        logit_rows=np.arange(6, dtype=np.int32),
        attention=(None, AttentionPlan(selection=selection(cpu, 1, [0], [0], rule=rule))),
    )
    found = cpu.forward(both)
    assert np.array_equal(found[:5], expected)
    assert np.array_equal(found[5:], alone)


@pytest.mark.parametrize(
    ("own_rule", "whole"),
    [(RULE, PageRule(pages=60, page=16, summary=4)), (TREE, replace(TREE, blocks=200))],
    ids=["pages", "tree"],
)
def test_windowed_layers_keep_their_window(
    tmp_path_factory: pytest.TempPathFactory, own_rule: SelectionRule, whole: SelectionRule
) -> None:
    """Where only some layers see all, these choose; the others read their window as before."""
    folder = write_variant("gemma3", tmp_path_factory.mktemp("tiny") / "gemma")
    checkpoint = open_checkpoint(folder)
    runner = load(checkpoint, "f32", 2)
    reference = torch_runner(checkpoint, slots=SLOTS)
    try:
        assert {
            runner.config.window_of(layer) is None for layer in range(runner.config.layers)
        } == {
            True,
            False,
        }
        found, made = [], []
        for each in (reference, runner):
            each.forward(batch(0, BEFORE))
            own = selection(each, 3, [0, 2], [0, 0, 1], rule=own_rule)
            found.append(run(each, 3, AttentionPlan(selection=own)))
            made.append(own)
        np.testing.assert_allclose(found[1], found[0], atol=5e-3, rtol=0.0)
        runner.forward(batch(0, BEFORE))
        dense = run(runner, 3, None)
        own = selection(runner, 3, [0], [0] * 3, rule=whole)
        np.testing.assert_allclose(
            run(runner, 3, AttentionPlan(selection=own)), dense, atol=1e-4, rtol=0.0
        )
    finally:
        runner.close()


@pytest.mark.parametrize("kv", ["i8", "i4"])
def test_quantised_pools_are_refused(llama: Checkpoint, kv: KVCacheDtypeName) -> None:
    runner = load(llama, kv, 1)
    try:
        with pytest.raises(ValueError, match="keys that are not quantised"):
            run(runner, 1, AttentionPlan(selection=selection(runner, 1, [0], [0])))
    finally:
        runner.close()


class TestRefused:
    def refuse(self, cpu: CpuRunner, message: str, plan: AttentionPlan) -> None:
        with pytest.raises(ValueError, match=message):
            run(cpu, 2, plan)

    def test_choices_that_do_not_fit(self, cpu: CpuRunner) -> None:
        fits = selection(cpu, 2, [0], [0, 0])
        for changed, message in (
            (replace(fits, rule=PageRule(1)), "at least 2 pages"),
            (replace(fits, rule=PageRule(4, 16, 5)), "whole summaries"),
            (replace(fits, rule=TreeRule(4, window=0)), "needs a window"),
            (replace(fits, rule=TreeRule(-1)), "needs a window and blocks"),
            (replace(fits, rule=TreeRule(4, search=Search.SUMMARIES)), "no summaries"),
            (replace(fits, chosen=fits.chosen[:, :1]), "another model"),
            (replace(fits, of_row=fits.of_row[:1]), "1 rows, not 2"),
            (replace(fits, of_row=fits.of_row + 1), "choices 0 to 0"),
            (replace(fits, made_by=fits.made_by + 1), "a later one makes"),
        ):
            self.refuse(cpu, message, AttentionPlan(selection=changed))
        listed = KeyPart(np.zeros(0, np.int32))
        self.refuse(cpu, "it has no keys", AttentionPlan(parts=(listed,), selection=fits))
