"""Find an installed CUDA torch without importing it: that needs the emulator's libraries."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from memprof.errors import UsageError

# The oldest that was tried, and the oldest that the lean trainer runs with.
_OLDEST = (2, 6)


@dataclass(frozen=True)
class TorchBuild:
    """A CUDA build of torch: where it is, its version, and its CUDA version as ``(13, 0)``."""

    folder: Path
    version: str
    cuda: tuple[int, int]

    @property
    def libraries(self) -> list[Path]:
        """List torch's own shared libraries."""
        return sorted((self.folder / "lib").glob("lib*.so"))

    @property
    def packages(self) -> Path:
        """Return the folder of installed packages that torch is in."""
        return self.folder.parent


def find_torch() -> TorchBuild:
    """Find the torch of this environment.

    Raises:
        UsageError: there is none, it is built without CUDA, or this machine cannot run the emulator.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UsageError(f"memprof emulate runs on Linux x86_64, and this is {platform.system()} {platform.machine()}.")
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise UsageError("memprof emulate needs a CUDA build of torch, and torch is not installed.")
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '([^']+)'", text, re.M)
    cuda = re.search(r"^cuda\b[^=]*= '(\d+)\.(\d+)'", text, re.M)
    if version is None or cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        name = f"torch {version.group(1)}" if version else "the torch that is installed"
        raise UsageError(
            f"memprof emulate needs a CUDA build of torch, and {name} has no CUDA: install one into an environment of "
            "its own, such as pip install --no-deps 'torch===2.13.0' (three equals signs; the nvidia packages are not "
            "needed)."
        )
    if tuple(int(n) for n in version.group(1).split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(f"memprof emulate needs torch {oldest} or later, and torch {version.group(1)} is installed.")
    return TorchBuild(folder, version.group(1), (int(cuda.group(1)), int(cuda.group(2))))
