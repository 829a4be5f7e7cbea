"""Where Triton's kernels can run: on a GPU, or interpreted on the CPU (TRITON_INTERPRET=1)."""

import os
from importlib.util import find_spec

import pytest
import torch

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or (TRITON_DEVICE == "cpu" and not _INTERPRETED),
    reason="needs a GPU, or Triton with TRITON_INTERPRET=1",
)
