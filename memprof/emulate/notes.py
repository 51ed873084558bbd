"""Say what is not real in a recording made on a device of ``memprof emulate``."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter

#: Launches of Triton kernels whose results were left as they were, by the kernel's name; torch.compile's among them.
UNCOMPUTED: Counter[str] = Counter()
#: Packages whose own operators compute their values on the emulated device.
COMPUTED_PACKAGES: set[str] = set()


def values_max() -> int:
    """Return how many elements a tensor may have for its operator to be computed."""
    return int(os.environ.get("MEMPROF_EMULATE_VALUES_MAX", 2**24))


def _with_values() -> bool:
    return os.environ.get("MEMPROF_EMULATE_VALUES", "0") not in ("", "0")


def emulation_notes() -> list[str]:
    """Return notes for a recording, from what :mod:`memprof.emulate.launch` put in the environment; [] elsewhere."""
    env = os.environ
    if not env.get("MEMPROF_EMULATE_HOME"):
        return []
    notes = [
        "recorded on an emulated device (memprof emulate): the allocator and its bytes are real; no kernel ran, and "
        "all times are this machine's, not a GPU's"
    ]
    if not _with_values():
        notes.append("no values were computed: losses, rewards and generated lengths are meaningless")
    else:
        most = f"{values_max():,} elements"
        notes.append(f"operators with tensors above {most} were not computed: their results are zeros")
    if copies := env.get("MEMPROF_EMULATE_COPY_MAX"):
        notes.append(f"copies above {int(copies):,} bytes were left out")
    if float(env.get("MEMPROF_EMULATE_CAPABILITY", "9.0")) in (9.0, 10.0):
        notes.append("on this GPU torch would use cuDNN attention; the emulated one uses flash attention")
    return notes


def uncomputed_notes() -> list[str]:
    """Return notes on operators and kernels that were not computed so far; [] where all were."""
    notes = []
    if UNCOMPUTED:
        which = _most_common(UNCOMPUTED)
        notes.append(f"Triton kernels that were not computed on the emulated device, with their launches: {which}")
    if operators := _uncomputed_operators():
        which = _most_common(operators)
        notes.append(f"operators whose CPU kernel is missing or failed, so that their results are zeros: {which}")
    foreign = "bitsandbytes" in sys.modules and "bitsandbytes" not in COMPUTED_PACKAGES
    if os.environ.get("MEMPROF_EMULATE_HOME") and _with_values() and foreign:
        notes.append(
            "bitsandbytes' own kernels were not computed on the emulated device: what they would have written (4-bit "
            "weights, 8-bit optimizer states and the parameters they step) is whatever lay in that memory"
        )
    return notes


def _most_common(counts: Counter[str]) -> str:
    names = ", ".join(f"{name} ({count})" for name, count in counts.most_common(5))
    return names + (f" and {len(counts) - 5} more" if len(counts) > 5 else "")


def _uncomputed_operators() -> Counter[str]:
    """Ask the values library, where this process has loaded it, for torch's operators that it could not compute."""
    path = os.path.join(os.environ.get("MEMPROF_EMULATE_HOME", ""), "libmemprof_emulator_values.so")
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return Counter()
    library.memprof_emulator_uncomputed.restype = ctypes.c_char_p
    lines = library.memprof_emulator_uncomputed().decode().splitlines()
    return Counter({name: int(calls) for name, _, calls in (line.partition(" ") for line in lines)})
