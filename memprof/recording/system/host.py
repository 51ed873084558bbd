"""Collect facts about the machine and the process from what is there: /proc, psutil, the installed packages."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any

from memprof._version import __version__
from memprof.recording.guard import FailureGuard

_PACKAGES = ("transformers", "trl", "peft", "accelerate", "bitsandbytes", "torchao", "deepspeed", "vllm")


def rss_bytes() -> int:
    """Return resident bytes of this process (0 where nothing tells)."""
    try:
        return _resident("self")
    except Exception as error:
        if not isinstance(error, _NOT_THERE):
            _reading.shut(error)
    try:
        import psutil

        return int(psutil.Process().memory_info().rss)
    except Exception:
        return 0


def _resident(process: str) -> int:
    """Return a process's resident bytes; OSError where there is no such process, or no ``/proc``."""
    pages = _proc(f"{process}/statm").split()  # nothing once the process has ended
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _proc(name: str) -> bytes:
    """Return what a file under ``/proc`` says. Every step reads some, so without Python's layers over a file."""
    file = os.open(f"/proc/{name}", os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(file, 2**16), b""))
    finally:
        os.close(file)


#: What a system without ``/proc``, or one that tells nothing there, raises; so does a process that has ended.
_NOT_THERE = (FileNotFoundError, ProcessLookupError, PermissionError)
_reading = FailureGuard(lost="what the process's host memory is made of")
#: Lines of ``/proc/self/status`` and the parts they are counted as.
_STATUS = {b"RssAnon": "host_anon", b"RssFile": "host_files", b"RssShmem": "host_shared"}


def host_parts() -> dict[str, int]:
    """Return what the process's resident memory is made of, in bytes, as far as the system tells (Linux).

    ``host_anon`` (heaps and other private memory), ``host_files`` (mapped files), ``host_shared`` (``/dev/shm``: Ray's
    object store, tensors of workers), ``host_children`` (resident memory of child processes, such as dataloader
    workers; pages they share with this one count again), ``host_arenas`` (freed, but kept by glibc's arenas; part of
    ``host_anon``). Costs a few reads of ``/proc``; what it holds and cannot be read is said once.
    """
    found: dict[str, int] = _reading(_parts) or {}
    if (ask := _mallinfo()) is not None:
        found["host_arenas"] = int(ask().fordblks)
    return found


def _parts() -> dict[str, int]:
    found = {}
    with suppress(*_NOT_THERE):
        for line in _proc("self/status").splitlines():
            name, _, rest = line.partition(b":")
            if name in _STATUS:
                found[_STATUS[name]] = int(rest.split()[0]) * 1024
        found["host_children"] = _children_bytes()
    return found


def _children_bytes() -> int:
    total = 0
    for thread in os.listdir("/proc/self/task"):
        with suppress(*_NOT_THERE):  # the thread has ended
            for child in _proc(f"self/task/{thread}/children").split():
                with suppress(*_NOT_THERE):  # the process has ended
                    total += _resident(child.decode())
    return total


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: ten ``size_t``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


@cache
def _mallinfo() -> Any:
    try:
        ask = ctypes.CDLL(None).mallinfo2  # glibc 2.33 and later
    except (OSError, AttributeError, TypeError):
        return None
    ask.restype = _MallInfo
    return ask


def versions() -> dict[str, str]:
    """Return versions of memprof, Python, torch and the libraries of a GRPO run that are installed."""
    found = {"memprof": __version__, "python": platform.python_version()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        if getattr(torch.version, "cuda", None):
            found["cuda"] = str(torch.version.cuda)
        if getattr(torch.version, "hip", None):
            found["hip"] = str(torch.version.hip)
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def node_name(redact: bool = False) -> str:
    """Return what tells this machine from the others of a run: its name, or its number where names are left out."""
    number = os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or os.environ.get("SLURM_NODEID") or "0"
    return f"node-{number}" if redact else platform.node() or f"node-{number}"


def device_name(device_type: str, index: int) -> str:
    """Return what the device calls itself."""
    if device_type == "cuda":
        import torch

        return str(torch.cuda.get_device_name(index))
    if device_type == "cpu":
        return platform.processor() or platform.machine() or "cpu"
    return device_type


def device_total(device_type: str, index: int) -> int | None:
    """Return bytes of memory the device has; for a CPU, the machine's."""
    if device_type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(index).total_memory)
    if device_type == "cpu":
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
    return None


def host_section() -> dict[str, Any]:
    """Return the ``host`` part of a snapshot; torch counts pinned blocks rounded up, whatever was asked for."""
    return {
        "pinned_bytes": pinned_bytes(),
        "pinned_requested_bytes": None,
        "managed_bytes": 0,
        "rss_bytes": rss_bytes(),
    }


def pinned_bytes() -> int | None:
    """Return pinned host bytes torch's allocator holds, in use or cached; None where torch does not count them."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    try:
        stats = torch.cuda.host_memory_stats()
        # Up to torch 2.9 "allocated" is what is in use and "reserved" what is held; later "allocated" is what is held.
        return int(stats.get("reserved_bytes.current", stats.get("allocated_bytes.current", 0)))
    except Exception:
        return None
