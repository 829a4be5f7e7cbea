"""Where things are in the table of quantised blocks (``quantized.py``), and how large they may be.

Kernels are compiled with these numbers, so the digest that names their compilations covers this
file.
"""

# Columns of QuantizedBlocks.table: tokens of a block, its first place in ``cells``, how many cells
# it fills, then its streams, keys first.
TOKENS, CELLS_AT, CELLS, STREAMS = 0, 1, 2, 3
# Fields of a stream: its first byte in the block, bits per code, groups of channels whose codes
# have a scale and a zero per token, which terms there are per channel, rank, and outliers.
BYTES_AT, BITS, GROUPS, CHANNELS, RANK, OUTLIERS = 0, 1, 2, 3, 4, 5
STREAM_FIELDS = 6
BLOCK_FIELDS = STREAMS + 2 * STREAM_FIELDS
CHANNEL_SCALE, CHANNEL_ZERO = 1, 2
"""Bits of ``CHANNELS``."""

MAX_RANK = 16
"""The kernels' memory has room for so many."""
MAX_OUTLIER_PLACES = 1 << 16
"""An outlier's place, token * head_dim + channel, has 16 bits."""
BITS_PER_CODE = (1, 2, 3, 4, 8)
