"""A function of CUDA's driver that the emulator lacks is named in a sentence; those that Triton links are stubbed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.emulate.process_hooks import missing_function
from memprof.emulate.stubs import stub_source
from memprof.emulate.symbols import linked_by_triton

_SCRIPT = """
import ctypes, os, sys
from memprof.emulate.process_hooks import attach
attach(False)
try:
    ctypes.CDLL(sys.argv[1], os.RTLD_NOW)
except OSError as error:
    raise RuntimeError("no kernel can be launched") from error
"""


def test_an_undefined_function_of_the_driver_ends_in_a_sentence(tmp_path: Path) -> None:
    """Triton 3.9 ended in `undefined symbol: cuStreamIsCapturing`, and nothing said whose it was."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "launcher.c").write_text("int cuNobodyHasThis(void); int launch(void) { return cuNobodyHasThis(); }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "launcher.c", "-o", "launcher.so"], cwd=tmp_path, check=True)
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "launcher.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("memprof emulate: the emulated driver has no cuNobodyHasThis, which")


def test_other_errors_name_none() -> None:
    assert missing_function(OSError("x.so: undefined symbol: PyObject_New")) == ""
    assert missing_function(None) == ""


def test_what_triton_links_is_read_from_its_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "triton" / "backends" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "driver.c").write_text("CUresult r = cuStreamIsCapturing(stream, &status);\n  custom(1); cudaFree(p);\n")
    found = linked_by_triton(tmp_path)
    assert found == {"cuStreamIsCapturing"}
    assert "UNSUPPORTED(cuStreamIsCapturing)" in stub_source(found)
    assert linked_by_triton(tmp_path / "nowhere") == frozenset()
