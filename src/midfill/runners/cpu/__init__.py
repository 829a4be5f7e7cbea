"""The runner on the CPU kernels."""

import midfill.kernels.cpu  # noqa: F401 - before anything here imports Numba
