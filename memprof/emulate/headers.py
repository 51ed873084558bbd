"""Find CUDA's C headers: Triton's own copy, NVIDIA's header wheels, or an installed toolkit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from memprof.emulate.torch_build import TorchBuild
from memprof.errors import UsageError

TOOLKIT = Path("/usr/local/cuda")


def find_headers(torch: TorchBuild) -> list[Path]:
    """Return include folders with ``cuda.h`` and what it includes, of torch's major version of CUDA.

    Raises:
        UsageError: there are none.
    """
    seen = []
    for folders in _candidates(torch):
        if not all(any((f / name).is_file() for f in folders) for name in ("cuda.h", "crt/host_defines.h")):
            continue
        version = _version(next(f / "cuda.h" for f in folders if (f / "cuda.h").is_file()))
        if version is not None and version[0] == torch.cuda[0]:
            return folders
        seen.append(f"{folders[0]} ({'.'.join(map(str, version or ('?',)))})")
    other = f" (found, of another version: {', '.join(seen)})" if seen else ""
    suffix = "" if torch.cuda[0] >= 13 else f"-cu{torch.cuda[0]}"
    crt = "nvidia-cuda-crt" if torch.cuda[0] >= 13 else f"nvidia-cuda-nvcc{suffix}"
    raise UsageError(
        f"CUDA {torch.cuda[0]}'s headers were not found{other}: install triton (it brings them), the wheels "
        f"nvidia-cuda-runtime{suffix} and {crt}, or a CUDA toolkit, and set CUDA_HOME if it is not in /usr/local/cuda."
    )


def _candidates(torch: TorchBuild) -> Iterator[list[Path]]:
    nvidia = torch.packages / "nvidia"
    yield [nvidia / f"cu{torch.cuda[0]}" / "include"]
    yield [nvidia / name / "include" for name in ("cuda_runtime", "cuda_nvcc", "cuda_crt")]
    yield [torch.packages / "triton" / "backends" / "nvidia" / "include"]
    if home := os.environ.get("CUDA_HOME"):
        yield [Path(home) / "include"]
    yield [TOOLKIT / "include"]


def _version(header: Path) -> tuple[int, int] | None:
    found = re.search(r"^#define CUDA_VERSION\s+(\d+)", header.read_text(encoding="utf-8", errors="replace"), re.M)
    return (int(found.group(1)) // 1000, int(found.group(1)) % 1000 // 10) if found else None
