"""Compute what another package's CUDA operators would have written, by the CPU kernels it brings: bitsandbytes'.

Such a package registers its operators with torch when it is imported. From then on each CUDA kernel of it does what an
operator of torch does on the emulated device: it runs, which asks for the memory, and its CPU kernel then runs on that
same memory (``native/values/operators.cpp``).
"""

from __future__ import annotations

import ctypes
import os
from types import ModuleType

from memprof.emulate.build import VALUES
from memprof.emulate.notes import COMPUTED_PACKAGES


def compute_operators(package: ModuleType) -> None:
    """Let the operators of a package compute their values; recordings note a package that registered none.

    Args:
        package: is imported, and names its operators after itself.
    """
    values = ctypes.CDLL(os.path.join(os.environ["MEMPROF_EMULATE_HOME"], VALUES))
    values.memprof_emulator_compute.argtypes = [ctypes.c_char_p]
    values.memprof_emulator_compute.restype = ctypes.c_size_t
    if values.memprof_emulator_compute(package.__name__.encode()):
        COMPUTED_PACKAGES.add(package.__name__)
