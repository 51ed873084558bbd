"""Start a command on a pretended card: the environment of its process, and of all that it starts."""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memprof.config.gpus import Gpu, find_gpu
from memprof.emulate.build import VALUES, built
from memprof.errors import UsageError
from memprof.units import parse_size
from memprof.vocabulary import EMULATED

_STARTUP = Path(__file__).parent / "startup"
MAX_DEVICES = 16
_CARD = "H100"


def environment(
    card: str | None = None,
    *,
    devices: int = 1,
    values: bool = True,
    values_max: int | None = None,
    copy_max: int | str | None = None,
    event_delay_us: int = 0,
    context: int | str | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment for a process that is to see pretended cards; torch must not be imported before.

    Args:
        card: a size such as ``"24GB"`` or a name of the GPU table; None is an H100.
        devices: how many there are.
        values: compute operators' values by their CPU kernels; False leaves memory as it is (``generate`` then ends at
            its longest only).
        values_max: elements; an operator with a larger tensor is left uncomputed (2**24 by default).
        copy_max: bytes; larger copies are left out, for models that are larger than this machine's memory.
        event_delay_us: microseconds after which an event is finished: blocks wait for their streams.
        context: bytes of the CUDA context; the GPU table's figure by default.
        base: what to add to; this process's environment by default.

    Raises:
        UsageError: there is no such card, or the emulator is not built.
    """
    if not 1 <= devices <= MAX_DEVICES:
        raise UsageError(f"{devices} devices: the emulator has 1 to {MAX_DEVICES}.")
    gpu, folder = find_card(card), built()
    found = dict(os.environ if base is None else base)
    own: dict[str, Any] = {
        "HOME": folder,
        "DEVICES": devices,
        "MEMORY": gpu.total_bytes,
        "CAPABILITY": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "SMS": gpu.multiprocessors,
        "NAME": f"{gpu.name} {EMULATED}",
        "CONTEXT": gpu.context_bytes if context is None else _size(context),
        "EVENT_DELAY_US": event_delay_us,
        "VALUES": int(values),
        "VALUES_MAX": values_max,
        "COPY_MAX": None if copy_max is None else _size(copy_max),
    }
    for name, value in own.items():
        found.pop(f"MEMPROF_EMULATE_{name}", None)
        if value is not None:
            found[f"MEMPROF_EMULATE_{name}"] = str(value)
    found["LD_LIBRARY_PATH"] = _before(found.get("LD_LIBRARY_PATH"), folder)
    found["PYTHONPATH"] = _before(found.get("PYTHONPATH"), _STARTUP)
    found["TRITON_LIBCUDA_PATH"] = str(folder)  # or Triton asks ldconfig
    found.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    found["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"  # cuDNN's attention, torch's first choice on an H100, is not there
    return found


def find_card(card: str | None) -> Gpu:
    """Find a card by name (``4090``) or size (``24GB``: an A100's capability with that memory); None is an H100.

    Raises:
        UsageError: neither, or no card of NVIDIA's.
    """
    found = find_gpu(card or _CARD)
    if found.maker != "nvidia":
        raise UsageError(f"--gpu {card!r}: memprof emulate supports NVIDIA GPUs only.")
    return found


def run(command: Sequence[str], card: str | None = None, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command in :func:`environment` and wait for it; its streams are this process's.

    Raises:
        UsageError: as :func:`environment`, or there is no such command.
    """
    try:
        return subprocess.run(list(command), env=environment(card, **options))
    except FileNotFoundError:
        raise UsageError(f"{command[0]}: there is no such command.") from None


def enter(card: str | None = None, **options: Any) -> None:
    """Put this very process, and all that it starts from now on, on a pretended card.

    The libraries are loaded before torch asks for them by their names, so no search path is needed.

    Raises:
        UsageError: as :func:`environment`, or torch was imported already.
    """
    if "torch" in sys.modules:
        raise UsageError("the emulator must be entered before torch is imported.")
    found = environment(card, **options)
    os.environ.update(found)
    folder = Path(found["MEMPROF_EMULATE_HOME"])
    for path in sorted(folder.glob("lib*.so*")):
        if path.name != VALUES:  # that one needs torch
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    runpy.run_path(str(_STARTUP / "sitecustomize.py"), run_name="memprof_emulate_startup")


def _before(paths: str | None, first: Path) -> str:
    others = [path for path in (paths or "").split(os.pathsep) if path and path != str(first)]
    return os.pathsep.join([str(first), *others])


def _size(value: int | str) -> int:
    return parse_size(value) if isinstance(value, str) else value
