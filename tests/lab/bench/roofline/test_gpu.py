"""The ceilings of a GPU, where there is one."""

import pytest

torch = pytest.importorskip("torch")

from midfill_lab.bench.roofline.gpu import (  # noqa: E402
    bfloat16_per_second,
    copied_per_second,
    gpu_name,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_gpus_ceilings_are_in_the_units_they_are_said_to_be_in() -> None:
    assert torch.__version__ in gpu_name("cuda")
    assert 1e10 < copied_per_second("cuda") < 1e14
    assert 1e12 < bfloat16_per_second("cuda") < 1e17
