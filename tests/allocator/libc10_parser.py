"""Parse allocator settings with the installed torch's own parser, one process for each environment.

``python -m tests.allocator.libc10_parser`` reads a JSON list of environments (the values of allocator settings by the
variable's name) and prints what ``libc10.so`` makes of each: a list of fields, or None where it refuses the settings.
The parser is a C++ singleton that reads the environment once and ends the process on an error, so each environment gets
a fork. torch itself is not imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

_INSTANCE = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig8instanceEv"


def main() -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    library = ctypes.CDLL(str(Path(spec.submodule_search_locations[0], "lib", "libc10.so")))
    instance = library[_INSTANCE]
    instance.restype = ctypes.c_void_p
    print(json.dumps([_parsed(instance, environment) for environment in json.load(sys.stdin)]))


def _parsed(instance: Any, environment: dict[str, str]) -> list[Any] | None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's message
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            os.environ.pop(name, None)
        os.environ.update(environment)
        os.write(write, json.dumps(_fields(instance())).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else None


def _fields(address: int) -> list[Any]:
    """Read ``AcceleratorAllocatorConfig`` as torch 2.13 lays it out (``c10/core/AllocatorConfig.h``)."""
    words = (ctypes.c_size_t * 8).from_address(address)
    large, split, rounding, begin, end, _, threshold, flags = words
    divisions = list((ctypes.c_size_t * ((end - begin) // 8)).from_address(begin))
    return [large, split, rounding, divisions, struct.unpack("d", struct.pack("Q", threshold))[0], bool(flags & 255)]


if __name__ == "__main__":
    main()
