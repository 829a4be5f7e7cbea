"""CPU kernels, compiled on the user's machine by Numba; no toolchain is needed.

One rule holds for everything here: the result of a row (a token) does not depend on which other
rows are in the batch, on the number of threads, or on how a prompt was cut into chunks. Sums run
in one fixed order for every shape of batch, so results are equal bit for bit.

Kernels are typed by Numba when they are first called. The annotations are for the reader and for
mypy; generated code (``intrinsic``) takes LLVM values, whose types are ``Any``.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from midfill.system.python_child import in_library_folder


def _import_numba() -> None:
    """Import Numba without the current folder's settings.

    Numba takes ``.numba_config.yaml`` from there when it is imported, and before it compiles. Such
    a file may name files that are then written, and turn compilation off. A program that has
    imported Numba itself keeps what it has.
    """
    if "numba" in sys.modules:
        return
    own = Path(".numba_config.yaml").exists()
    with in_library_folder() if own else nullcontext():
        from numba.core import config
    settings: Any = config
    settings._config_fname = ""


_import_numba()
