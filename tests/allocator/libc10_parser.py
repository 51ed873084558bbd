"""Parse allocator settings with the installed torch's own parser, one process for each string.

``python -m tests.allocator.libc10_parser`` reads a JSON list of strings and prints what ``libc10.so`` makes of each: a
list of fields, or None where it refuses the string. The parser is a C++ singleton that reads the environment once and
ends the process on an error, so each string gets a fork. torch itself is not imported.
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
    print(json.dumps([_parsed(instance, text) for text in json.load(sys.stdin)]))


def _parsed(instance: Any, text: str) -> list[Any] | None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's message
        os.environ.pop("PYTORCH_ALLOC_CONF", None)
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = text
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
