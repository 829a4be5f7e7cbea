"""CPU kernels, compiled on the user's own machine by Numba; no toolchain is needed.

The rule that everything here keeps: what is computed for a row (a token) does not depend on
which other rows are in the batch, on how many threads work, or on how a prompt was cut into
chunks. Sums run in one fixed order for every shape of batch, so results are equal bit for bit.
"""
