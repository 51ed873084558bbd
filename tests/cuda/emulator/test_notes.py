"""What a run on the emulated device is told: kernels that were not computed, and that nothing was recorded."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from memprof.emulate import notes as emulated  # noqa: E402
from memprof.emulate.notes import uncomputed_notes  # noqa: E402
from tests.cuda.emulated import command_line, device  # noqa: E402
from tests.cuda.emulator.test_command import emulate  # noqa: E402

_COMPILED = """
import torch
from memprof.emulate.notes import uncomputed_notes
squares = torch.compile(lambda x: (x * x + 1).sin())
squares(torch.ones(64, device="cuda"))
print(uncomputed_notes())
"""


def _printed_by(program: str, folder: Path) -> str:
    """Run a program on the emulated device and return what it prints."""
    script = folder / "program.py"
    script.write_text(program)
    done = command_line([sys.executable, str(script)], env=device())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_of_torch_compile_are_named(tmp_path: Path) -> None:
    printed = _printed_by(_COMPILED, tmp_path)
    assert "were not computed on the emulated device" in printed
    assert "of torch.compile (1)" in printed


_DEPTHWISE = """
import torch
from memprof.emulate.notes import uncomputed_notes
print(uncomputed_notes())
torch.nn.functional.conv1d(torch.ones(1, 4, 8, device="cuda"), torch.ones(4, 1, 3, device="cuda"), groups=4)
print(uncomputed_notes())
"""


def test_operators_without_a_cpu_kernel_are_named(tmp_path: Path) -> None:
    before, after = _printed_by(_DEPTHWISE, tmp_path).splitlines()[-2:]
    assert before == "[]"
    assert "results are zeros: aten::_conv_depthwise2d (1)" in after


def test_bitsandbytes_is_noted_where_it_registered_no_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("bitsandbytes" in note for note in uncomputed_notes())
    monkeypatch.setattr(emulated, "COMPUTED_PACKAGES", set())
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    assert any("bitsandbytes' own kernels were not computed" in note for note in uncomputed_notes())


def test_a_script_without_a_model_is_told_that_nothing_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import torch\ntorch.ones(8, device='cuda')\n")
    done = emulate("--", "python", "x.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "memprof emulate: nothing was recorded: no model's forward ran on the GPU.\n"
