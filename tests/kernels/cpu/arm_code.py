"""Program that compiles products for an ARM chip, wherever it runs; prints their machine code.

Numba's variables name the chip: NUMBA_CPU_NAME and NUMBA_CPU_FEATURES.
"""

import platform

import llvmlite.binding
import numpy as np
from numba import typeof, types


def aim_at_arm() -> None:
    """Make Numba compile for ARM; it looks when the first kernel is defined."""
    llvmlite.binding.initialize_all_targets()
    llvmlite.binding.initialize_all_asmprinters()
    llvmlite.binding.get_process_triple = lambda: "aarch64-unknown-linux-gnu"
    platform.machine = lambda: "aarch64"


def main() -> None:
    from midfill.kernels.cpu.dots import quantized_product
    from midfill.kernels.cpu.jit import kernel
    from midfill.kernels.cpu.weight_formats import WeightFormat

    multiply_bytes = quantized_product(1, WeightFormat.Q8_0)
    multiply_nibbles = quantized_product(1, WeightFormat.Q4_1)
    multiply_codes = quantized_product(1, WeightFormat.MXFP4)

    @kernel
    def both(x, x_at, stride, groups, panel, panel_at, ahead, tile, at):  # type: ignore[no-untyped-def]
        multiply_bytes(x, x_at, stride, groups, panel, panel_at, ahead, tile, at)
        multiply_nibbles(x, x_at, stride, groups, panel, panel_at, ahead, tile, at)
        multiply_codes(x, x_at, stride, groups, panel, panel_at, ahead, tile, at)

    number, data = types.intp, [typeof(np.zeros(1, kind)) for kind in (np.uint8, np.float32)]
    both.compile((data[0], *[number] * 3, data[0], *[number] * 2, data[1], number))
    print(*both.inspect_asm().values())


if __name__ == "__main__":
    aim_at_arm()
    main()
