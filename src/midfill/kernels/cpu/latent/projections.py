"""What stands before and after attention in its absorbed form (``models.config.LatentAttention``).

Products with a head's part of W_UK or W_UV are small, and there are as many as heads. So threads
share the pairs of a head and up to 32 rows: each copies these rows' numbers of the head, and
multiplies them by itself. Multiplying both into the weights beforehand would take one product less,
but those of queries and outputs would have rank / plain_dim and rank / value_dim times as many
weights: in DeepSeek-Coder-V2-Lite 37 million per layer instead of 14 million.
"""

from midfill.kernels.cpu.activations import quantize
from midfill.kernels.cpu.calls import call_kernel
from midfill.kernels.cpu.clock import ATTENTION, NORM, QKV, ROTATE, end_phase
from midfill.kernels.cpu.decoder_data import Batch, DecoderConfig
from midfill.kernels.cpu.jit import kernel
from midfill.kernels.cpu.kv_cache import LayerKV, write_entry
from midfill.kernels.cpu.latent.data import (
    UNIT_ROWS,
    LatentDecoderWeights,
    LatentMemory,
    LatentSizes,
    LatentWorkspace,
)
from midfill.kernels.cpu.linear import LinearOutput, LinearWeights, Tiling
from midfill.kernels.cpu.memory import Float32Array
from midfill.kernels.cpu.rows import RopeTables, norm
from midfill.kernels.cpu.simd import LANES, load, store
from midfill.kernels.cpu.thread_pool import ThreadContext, take_work
from midfill.kernels.cpu.weight_formats import PANEL


@kernel
def _key_dim(sizes: LatentSizes) -> int:
    return sizes.rank + sizes.rotary_dim


@kernel
def _query_dim(sizes: LatentSizes) -> int:
    return sizes.plain_dim + sizes.rotary_dim


@kernel
def _copy(x: Float32Array, at: int, size: int, out: Float32Array, out_at: int) -> None:
    for i in range(0, size, LANES):
        store(out, out_at + i, load(x, at + i))


@kernel
def _rotate_pairs(
    x: Float32Array, at: int, rope: RopeTables, layer: int, position: int, out: Float32Array,
    first: int, second: int,
) -> None:  # fmt: skip
    """Turn pairs of neighbours; write their first and second numbers to ``out`` apart."""
    table = (rope.first[layer] + position) * rope.half
    for i in range(rope.half):
        c, s = rope.cos[table + i], rope.sin[table + i]
        low, high = x[at + 2 * i], x[at + 2 * i + 1]
        out[first + i] = low * c - high * s
        out[second + i] = high * c + low * s


@kernel
def _multiply_head(
    context: ThreadContext, linear: int, memory: LatentMemory, gathered: int, rows: int,
    weights: LinearWeights, panel: int, outputs: int, out: Float32Array, stride: int,
    products: Float32Array,
) -> None:  # fmt: skip
    """Multiply this thread's gathered rows by the panels of one head, without other threads."""
    alone = ThreadContext(context.thread * 0, context.thread * 0 + 1, context.sync, context.clock)
    matrix = LinearWeights(
        weights.packed, weights.panels[panel:], weights.bias, outputs, weights.inputs
    )
    call_kernel(
        linear,
        (
            alone, memory.gathered, gathered, matrix, context.thread * 0,
            LinearOutput(out, rows, stride, False, 1.0, products, False),
            Tiling(memory.tiles, products),
        ),
    )  # fmt: skip


@kernel
def compute_queries(
    context: ThreadContext, config: DecoderConfig, weights: LatentDecoderWeights, layer: int,
    rows: int, memory: LatentMemory, tiling: Tiling, maxima: Float32Array,
) -> None:  # fmt: skip
    """Compute queries from their latents, where they have any."""
    latent, sizes = weights.latent, weights.latent.sizes
    rank, stride, normed = sizes.query_rank, latent.project.outputs, memory.query_latents
    for row in range(context.thread, rows, context.threads):
        at = row * rank
        norm(memory.projected, row * stride, latent.query_norm, layer, normed.values, at)
        quantize(normed, at, rank)
    end_phase(context, NORM)
    out = LinearOutput(memory.queries, rows, latent.query.outputs, False, 1.0, maxima, False)
    call_kernel(
        config.linear, (context, normed, context.thread * 0, latent.query, layer, out, tiling)
    )
    end_phase(context, QKV)


@kernel
def rotate_and_store(
    context: ThreadContext, config: DecoderConfig, weights: LatentDecoderWeights, kv: LayerKV,
    layer: int, batch: Batch, queries: Float32Array, stride: int, space: LatentWorkspace,
) -> None:  # fmt: skip
    """Write keys into their slots, and the rotated part of queries to where attention reads them.

    Args:
        queries: float32, what was computed of them: query_heads * (plain_dim + rotary_dim) numbers
            per row.
        stride: elements from one row of ``queries`` to the next.
    """
    latent, sizes, memory = weights.latent, weights.latent.sizes, space.latent
    rope, heads, size = weights.decoder.rope, config.query_heads, _key_dim(weights.latent.sizes)
    half, quarter = size // 2, sizes.rank // 2
    width = latent.project.outputs
    for row in range(context.thread, len(batch.token_ids), context.threads):
        position = batch.positions[row]
        at, key = row * width + width - size, row * size
        norm(memory.projected, at, latent.key_norm, layer, memory.projected, at)
        _copy(memory.projected, at, quarter, memory.keys, key)
        _copy(memory.projected, at + quarter, quarter, memory.keys, key + half)
        _rotate_pairs(
            memory.projected, at + sizes.rank, rope, layer, position, memory.keys, key + quarter,
            key + half + quarter,
        )  # fmt: skip
        entry = kv.first_entry + batch.write_slots[row]
        write_entry(memory.keys, key, size, kv.cache.keys, kv.cache.key_scales, entry)
        for head in range(heads):
            at = row * stride + head * _query_dim(sizes) + sizes.plain_dim
            to = (row * heads + head) * size + quarter
            _rotate_pairs(queries, at, rope, layer, position, space.decoder.qkv, to, to + half)


@kernel
def absorb_queries(
    context: ThreadContext, config: DecoderConfig, weights: LatentDecoderWeights, layer: int,
    rows: int, queries: Float32Array, stride: int, space: LatentWorkspace,
) -> None:  # fmt: skip
    """Write W_UK^T q of each head to where attention reads it; arguments as above."""
    sizes, memory = weights.latent.sizes, space.latent
    heads, size, plain = config.query_heads, _key_dim(weights.latent.sizes), sizes.plain_dim
    own = context.thread * UNIT_ROWS * max(plain, sizes.rank)
    outputs = sizes.rank // 2
    units = (rows + UNIT_ROWS - 1) // UNIT_ROWS * heads
    work = take_work(context.sync, 1)
    while work < units:
        head, first = work % heads, work // heads * UNIT_ROWS
        count = min(UNIT_ROWS, rows - first)
        for r in range(count):
            at = (first + r) * stride + head * _query_dim(sizes)
            _copy(queries, at, plain, memory.gathered.values, own + r * plain)
        quantize(memory.gathered, own, count * plain)
        panel = (layer * heads + head) * (sizes.rank // PANEL)
        for part in range(2):
            to = (first * heads + head) * size + part * (size // 2)
            _multiply_head(
                context, config.linear, memory, own, count, weights.latent.absorb,
                panel + part * (outputs // PANEL), outputs, space.decoder.qkv[to:], heads * size,
                space.decoder.products[context.thread],
            )  # fmt: skip
        work = take_work(context.sync, 1)
    end_phase(context, ROTATE)


@kernel
def expand_values(
    context: ThreadContext, config: DecoderConfig, weights: LatentDecoderWeights, layer: int,
    rows: int, space: LatentWorkspace,
) -> None:  # fmt: skip
    """Compute W_UV of what attention has summed up, head by head."""
    sizes, memory, attended = weights.latent.sizes, space.latent, space.decoder.attended.values
    heads, size, width = config.query_heads, _key_dim(weights.latent.sizes), sizes.value_dim
    rank, quarter = sizes.rank, sizes.rank // 2
    own = context.thread * UNIT_ROWS * max(sizes.plain_dim, rank)
    units = (rows + UNIT_ROWS - 1) // UNIT_ROWS * heads
    work = take_work(context.sync, 1)
    while work < units:
        head, first = work % heads, work // heads * UNIT_ROWS
        count = min(UNIT_ROWS, rows - first)
        for r in range(count):
            at, to = ((first + r) * heads + head) * size, own + r * rank
            _copy(attended, at, quarter, memory.gathered.values, to)
            _copy(attended, at + size // 2, quarter, memory.gathered.values, to + quarter)
        quantize(memory.gathered, own, count * rank)
        to = (first * heads + head) * width
        _multiply_head(
            context, config.linear, memory, own, count, weights.latent.expand,
            (layer * heads + head) * (width // PANEL), width, memory.expanded.values[to:],
            heads * width, space.decoder.products[context.thread],
        )  # fmt: skip
        for r in range(count):
            quantize(memory.expanded, to + r * heads * width, width)
        work = take_work(context.sync, 1)
    end_phase(context, ATTENTION)
