"""Run this project's modules on a device that is emulated: in a child process with torch's CUDA build."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from typing import Any

from benchmarks.tabling import ROOT

_ENVIRONMENT = """
import json, sys
from memprof.emulate.launch import environment
less = {} if sys.argv[3] == "0" else {"values_max": int(sys.argv[3]), "copy_max": int(sys.argv[3])}
print(json.dumps(environment(sys.argv[1], values=sys.argv[2] == "1", devices=int(sys.argv[4]), **less)))
"""


def python() -> str:
    """Return the interpreter that has torch's CUDA build; ``MEMPROF_CUDA_PYTHON`` names another."""
    return os.environ.get("MEMPROF_CUDA_PYTHON", str(ROOT / ".venv-cuda" / "bin" / "python"))


#: Elements of the largest tensors with values (masks of all tokens among them: the lean trainer trims by them), and
#: bytes of the largest copies: a model may be larger than this machine's memory.
_SMALL = 65536


@functools.cache
def _environment(card: str, *, values: bool, most: int, devices: int) -> dict[str, str]:
    asked = [python(), "-c", _ENVIRONMENT, card, str(int(values)), str(most), str(devices)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: dict[str, str] = json.loads(done.stdout)
    return {**found, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def ask(
    module: str,
    question: dict[str, Any],
    card: str,
    *,
    alloc_conf: str = "",
    values: bool = True,
    most: int | None = _SMALL,
    devices: int = 1,
    timeout: float = 3600,
) -> dict[str, Any]:
    """Run ``python -m MODULE`` on the emulated GPU and return the JSON of its last line.

    ``values``: operators on tensors of up to ``most`` elements (None: on all) are computed; else none is.

    Raises:
        RuntimeError: the process failed; the message is the end of what it said.
    """
    found = _environment(card, values=values, most=most or 0, devices=devices)
    if alloc_conf:
        found = {**found, "PYTORCH_CUDA_ALLOC_CONF": alloc_conf}
    done = subprocess.run(
        [python(), "-W", "ignore", "-m", module], input=json.dumps(question), capture_output=True, text=True, cwd=ROOT,
        env=found, timeout=timeout, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class Asked:
    """A module that answers one line of JSON after the other, on the emulated GPU.

    ``most``: elements of the largest tensors with values; None: all have them.
    """

    def __init__(self, module: str, card: str, most: int | None = None) -> None:
        own = _environment(card, values=True, most=most or 0, devices=1)
        self._process = subprocess.Popen(
            [python(), "-W", "ignore", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=own,
        )  # fmt: skip

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask, and wait for the answer.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                found: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return found
        raise RuntimeError("the process that trains has ended")
