"""Run this project's modules on a device that is emulated: in a child process with torch's CUDA build."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.tabling import ROOT
from memprof.config.gpus import Gpu

__all__ = ["ask"]

_FULL_SIZE = {"values_max": 8192, "copy_max": "64KiB"}


def environment(
    card: Gpu, *, values: bool = True, values_max: int | None = None, copy_max: str | None = None
) -> dict[str, str]:
    """Return the environment of a process that sees an emulated ``card``."""
    home = Path(os.environ["FAKECUDA_HOME"])
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(home / "lib"),
        "PYTHONPATH": str(home / "py"),
        "TRITON_CACHE_DIR": str(home / "triton"),
        "TRITON_LIBCUDA_PATH": str(home / "lib"),
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        "FAKECUDA_VALUES": str(int(values)),
        "FAKECUDA_VALUES_MAX": str(values_max),
        "FAKECUDA_COPY_MAX": str(copy_max),
        "FAKECUDA_MEMORY": str(card.total_bytes),
        "FAKECUDA_CONTEXT": str(card.context_bytes),
        "FAKECUDA_CC": "{}.{}".format(*card.capability),
        "FAKECUDA_SMS": str(card.multiprocessors),
        "FAKECUDA_NAME": card.name,
    }


def ask(
    module: str, question: dict[str, Any], card: Gpu, *, alloc_conf: str = "", timeout: float = 3600
) -> dict[str, Any]:
    """Run ``python -m MODULE`` on the emulated card and return the JSON of its last line.

    Raises:
        RuntimeError: the process failed; the message is the end of what it said.
    """
    python = os.environ.get("MEMPROF_CUDA_PYTHON", str(ROOT / ".venv-cuda" / "bin" / "python"))
    found = environment(card, **_FULL_SIZE)
    found.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if alloc_conf:
        found["PYTORCH_CUDA_ALLOC_CONF"] = alloc_conf
    done = subprocess.run(
        [python, "-W", "ignore", "-m", module], input=json.dumps(question), capture_output=True, text=True, cwd=ROOT,
        env=found, timeout=timeout, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
