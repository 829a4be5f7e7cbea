"""A change moves the bounds that it should, by as much as the bytes and operations it saves."""

import pytest

from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill_lab.bench.ceiling.changes import find_crossovers, moved_bounds
from midfill_lab.bench.ceiling.results import CeilingOptions, Moved
from midfill_lab.bench.roofline.bounds import bound_step
from midfill_lab.bench.roofline.ceilings import Resource, Roofline
from midfill_lab.bench.roofline.work import LAYER_GROUPS, Matrices, ModelSize, Rows, step_work

MODEL = ModelSize(
    groups={
        name: Matrices(stored_bytes=1_000_000, weights=2_000_000, arithmetic=Resource.INT8)
        for name in (*LAYER_GROUPS, "head")
    },
    windows=(None, None, 64),
    query_heads=4,
    kv_heads=2,
    head_dim=32,
    kv_cache_dtype=KVCacheDtype.F16,
)
MACHINE = Roofline(
    reads={1: 1e9},
    int8_per_second=4e11,
    bfloat16_per_second=1e11,
    float32_per_second=1e11,
)
OPTIONS = CeilingOptions(prefill=(256, 1024), contexts=(100, 20_000), streams=(1, 8))
POOL = 100_000_000


@pytest.fixture(scope="module")
def moved() -> dict[str, Moved]:
    return {each.name: each for each in moved_bounds(MODEL, MACHINE, OPTIONS, POOL)}


def test_nothing_changed_is_the_model_as_it_is(moved: dict[str, Moved]) -> None:
    plain = moved["nothing"]
    assert plain.kv_bytes == 3 * 2 * 2 * 32 * 2  # layers, K and V, heads, numbers, bytes
    assert plain.users == POOL // (768 * 20_000)
    assert plain.decode_many == bound_step(step_work(MODEL, [Rows(8, 20_000)]), MACHINE).seconds
    assert plain.prefill == bound_step(step_work(MODEL, [Rows(1, 0, 1024)]), MACHINE).seconds


def test_less_kv_holds_more_users_and_decodes_faster_but_prefills_no_faster(
    moved: dict[str, Moved],
) -> None:
    plain, half, quarter = (
        moved[name] for name in ("nothing", "half of the KV kept", "a quarter of the KV kept")
    )
    assert plain.kv_bytes == 2 * half.kv_bytes == 4 * quarter.kv_bytes
    assert plain.users < half.users < quarter.users
    assert plain.decode_many > half.decode_many > quarter.decode_many
    assert plain.prefill == half.prefill == quarter.prefill
    int8 = moved["KV in int8"]
    assert int8.kv_bytes == 3 * 2 * 2 * (32 + 4)
    assert plain.decode_one > int8.decode_one
    assert plain.prefill == int8.prefill


def test_fewer_rows_and_pairs_prefill_faster_and_hold_as_much(moved: dict[str, Moved]) -> None:
    plain = moved["nothing"]
    for name in ("half of the prompt's rows run", "a fifth of the prompt's pairs"):
        assert moved[name].prefill < plain.prefill
        assert moved[name].kv_bytes == plain.kv_bytes
        assert moved[name].users == plain.users
        assert moved[name].decode_many == plain.decode_many


def test_products_bind_from_the_rows_at_which_they_take_longer_than_their_weights() -> None:
    rows = find_crossovers(MODEL, MACHINE, 10).rows
    reading, computing = 1_000_000 / 1e9, 2 * 2_000_000 / 4e11
    assert (rows - 1) * computing <= reading < rows * computing


def test_kv_is_more_bytes_than_the_weights_from_a_context_on() -> None:
    context = find_crossovers(MODEL, MACHINE, 1_000_000).context
    assert context is not None

    def read(tokens: int) -> int:
        return 2 * 2 * 32 * 2 * (2 * (tokens + 1) + min(tokens + 1, 64))

    assert read(context - 1) <= MODEL.weight_bytes < read(context)
    assert find_crossovers(MODEL, MACHINE, 100).context is None


def test_attention_outgrows_products_in_long_prompts() -> None:
    prompt = find_crossovers(MODEL, MACHINE, 1_000_000).prompt
    assert prompt is not None

    def seconds(tokens: int) -> tuple[float, float]:
        bound = bound_step(step_work(MODEL, [Rows(1, 0, tokens)]), MACHINE)
        return bound.seconds_of("attention"), bound.seconds_of(*LAYER_GROUPS)

    before, products_before = seconds(prompt - 1)
    after, products_after = seconds(prompt)
    assert before <= products_before
    assert after > products_after
    assert find_crossovers(MODEL, MACHINE, 100).prompt is None
