"""CPU kernels, compiled on the user's machine by Numba; no toolchain is needed.

One rule holds for everything here: the result of a row (a token) does not depend on which other
rows are in the batch, on the number of threads, or on how a prompt was cut into chunks. Sums run
in one fixed order for every shape of batch, so results are equal bit for bit.

Kernels are typed by Numba when they are first called. The annotations are for the reader and for
mypy; generated code (``intrinsic``) takes LLVM values, whose types are ``Any``.
"""
