"""What the libraries are compiled for: the installed torch, whichever it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from memprof.emulate.symbols import has_new_strings
from memprof.emulate.torch_build import TorchBuild, find_torch

pytest.importorskip("torch")

_ERROR = "#include <string>\nnamespace c10 { struct Error { Error(std::string); }; Error::Error(std::string) {} }\n"


@pytest.mark.parametrize("new", [False, True])
def test_strings_are_those_torch_was_compiled_with(new: bool, tmp_path: Path) -> None:
    """Wheels before torch 2.7 have the strings of before C++11; a library with others would not load."""
    compiler = shutil.which("g++")
    assert compiler, "the emulator was built with it"
    (tmp_path / "lib").mkdir()
    (tmp_path / "error.cpp").write_text(_ERROR)
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-D_GLIBCXX_USE_CXX11_ABI={int(new)}", "error.cpp", "-o", "lib/libc10.so"],
        cwd=tmp_path, check=True,
    )  # fmt: skip
    assert has_new_strings(TorchBuild(tmp_path, "2.6.0+cu124", (12, 4))) == new


def test_the_installed_torch_s_strings_are_what_it_says() -> None:
    import torch

    assert has_new_strings(find_torch()) == torch._C._GLIBCXX_USE_CXX11_ABI
