"""Range asymmetric numeral systems: symbols to bits, and back, with a static table per channel.

After Duda, "Asymmetric numeral systems", 2013, arXiv 1311.2540: a state of 31 bits that bytes move
in and out of. A code has about as many bits as its symbols have information under the tables.
"""

import numpy as np
from numpy.typing import NDArray

from midfill.kernels.cpu.jit import entry_point

PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
"""Sum of a table's frequencies. Each symbol's is at least 1."""

_LOW = 1 << 23
_STATE_BYTES = 4

Symbols = NDArray[np.uint8]
Bytes = NDArray[np.uint8]
Cumulative = NDArray[np.uint16]


def code_bound(symbols: int) -> int:
    """Return the most bytes that the code of so many symbols can have."""
    return 2 * symbols + _STATE_BYTES


@entry_point
def encode_symbols(
    symbols: Symbols, per_channel: int, cumulative: Cumulative, bins: int, out: Bytes
) -> int:
    """Write the code of symbols to the end of ``out``; return where it begins.

    Args:
        symbols: uint8 [channels * per_channel], below ``bins``.
        per_channel: symbols per channel.
        cumulative: uint16 [channels * (bins + 1)]: of each channel, sums of the frequencies of the
            symbols before, from 0 to TOTAL.
        bins: number of symbols that there are.
        out: uint8 [code_bound(symbols)].
    """
    state, at = np.int64(_LOW), len(out)
    for channel in range(len(symbols) // per_channel - 1, -1, -1):
        table = channel * (bins + 1)
        for number in range((channel + 1) * per_channel - 1, channel * per_channel - 1, -1):
            entry = table + np.int64(symbols[number])
            start = np.int64(cumulative[entry])
            frequency = np.int64(cumulative[entry + 1]) - start
            limit = ((_LOW >> PROBABILITY_BITS) << 8) * frequency
            while state >= limit:
                at -= 1
                out[at] = state & 255
                state >>= 8
            state = ((state // frequency) << PROBABILITY_BITS) + state % frequency + start
    for _ in range(_STATE_BYTES):
        at -= 1
        out[at] = state & 255
        state >>= 8
    return at


@entry_point
def decode_symbols(
    code: Bytes, per_channel: int, cumulative: Cumulative, bins: int, symbols: Symbols
) -> int:
    """Read symbols from a code; return how many bytes were read, -1 if it is cut off.

    Whatever the code holds, only ``symbols`` is written, with symbols below ``bins``.

    Args:
        code: uint8.
        per_channel, cumulative, bins: see ``encode_symbols``.
        symbols: uint8 [channels * per_channel], to be filled.
    """
    size = len(code)
    if size < _STATE_BYTES:
        return -1
    state, at = np.int64(0), _STATE_BYTES
    for number in range(_STATE_BYTES):
        state = (state << 8) | np.int64(code[number])
    for channel in range(len(symbols) // per_channel):
        table = channel * (bins + 1)
        for number in range(channel * per_channel, (channel + 1) * per_channel):
            place = state & (TOTAL - 1)
            low, high = 0, bins
            while high - low > 1:
                middle = (low + high) >> 1
                if np.int64(cumulative[table + middle]) <= place:
                    low = middle
                else:
                    high = middle
            symbols[number] = low
            start = np.int64(cumulative[table + low])
            frequency = np.int64(cumulative[table + low + 1]) - start
            state = frequency * (state >> PROBABILITY_BITS) + place - start
            while state < _LOW:
                if at >= size:
                    return -1
                state = (state << 8) | np.int64(code[at])
                at += 1
    return at
