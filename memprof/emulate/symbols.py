"""Read what torch's libraries and Triton ask of NVIDIA's: functions they link or look up, libraries, versions."""

from __future__ import annotations

import mmap
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memprof.emulate.torch_build import TorchBuild

_LINKED = re.compile(
    r"(__cuda|cuda[A-Z]|cu[A-Z][a-z]|cublas|cudnn|cusparse|cusolver|cupti|cufft|curand|nvrtc|nccl|nvshmem)\w*"
)
# The driver's and NVML's functions, which are opened at run time.
_LOOKED_UP = re.compile(
    rb"\0(cu(?:Init|Ctx|Dev|Event|Func|Get|Graph|GreenCtx|Launch|Link|Mem|Module|Multicast|Pointer|Stream)[A-Za-z0-9_]*"
    rb"|nvml[A-Z][A-Za-z0-9_]+)(?=\0)"
)
_CALLED = re.compile(r"\b(cu[A-Z][a-z]\w*) *\(")
_LOOKING = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libcaffe2_nvrtc.so")
_LIBRARY = re.compile(r"lib(?:cu|nccl|nvrtc|nvshmem_host)[A-Za-z_]*\.so\.\d+")


@dataclass(frozen=True)
class Wanted:
    """``functions`` by name; ``libraries``: file name -> the symbol versions that torch asks of it."""

    functions: frozenset[str]
    libraries: dict[str, tuple[str, ...]]


def wanted_by(torch: TorchBuild) -> Wanted:
    """Read what torch's libraries want, beside the driver and NVML, which are opened by name."""
    functions: set[str] = set()
    libraries: dict[str, set[str]] = {"libcuda.so.1": set(), "libnvidia-ml.so.1": set()}
    for library in torch.libraries:
        undefined = _output("nm", "-D", "--undefined-only", "--format=just-symbols", library)
        functions.update(name for line in undefined if _LINKED.fullmatch(name := line.strip().partition("@")[0]))
        for line in _output("readelf", "-d", library):
            if "(NEEDED)" in line and (needed := _LIBRARY.search(line)):
                libraries.setdefault(needed.group(), set())
        for name, version in _versions(_output("readelf", "-V", library)):
            if name in libraries:
                libraries[name].add(version)
    functions.update(_looked_up(torch.folder / "lib" / name for name in _LOOKING))
    functions.update(linked_by_triton(torch.packages))
    return Wanted(frozenset(functions), {name: tuple(sorted(versions)) for name, versions in libraries.items()})


def has_new_strings(torch: TorchBuild) -> bool:
    """Tell whether torch's C++ was compiled with the strings of C++11; wheels before torch 2.7 were not."""
    defined = _output("nm", "-D", "--defined-only", "--format=just-symbols", torch.folder / "lib" / "libc10.so")
    return any(name.startswith("_ZN3c105Error") and "__cxx11" in name for name in defined)


def defined_functions(objects: Iterable[Path]) -> frozenset[str]:
    """Return the functions that compiled files define."""
    lines = (line.split() for line in _output("nm", "--defined-only", *objects))
    return frozenset(parts[2] for parts in lines if len(parts) == 3 and parts[1] == "T")


def _looked_up(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            # The zero before a name is the end of the one before it, so matches must not eat the zero after them.
            yield from {match.group(1).decode() for match in _LOOKED_UP.finditer(content)}


def linked_by_triton(packages: Path) -> frozenset[str]:
    """Read which of the driver's functions Triton calls in the C that it compiles on the machine it runs on."""
    source = packages / "triton" / "backends" / "nvidia" / "driver.c"
    text = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
    return frozenset(_CALLED.findall(text))


def _versions(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield a library's name and a version wanted of it, from readelf's version needs section."""
    library = ""
    for line in lines:
        if found := re.search(r"File: (\S+)", line):
            library = found.group(1)
        if found := re.search(r"Name: (\S+)", line):
            yield library, found.group(1)


def _output(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout.splitlines()
