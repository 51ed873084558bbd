"""``memprof emulate`` where it cannot run: one sentence each. What it does on a CUDA build: tests/cuda/emulator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from memprof.emulate import headers, launch, torch_build
from memprof.emulate.build import _compiler, build
from memprof.emulate.launch import find_card
from memprof.emulate.torch_build import TorchBuild
from memprof.errors import UsageError
from tests.cli.test_cli import shell


def install(folder: Path, version: str = "2.13.0+cu130", cuda: str | None = "'13.0'") -> None:
    """Lay out what an installed torch has on disk, so far as it is looked at before anything is compiled."""
    (folder / "torch" / "lib").mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (folder / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")
    if cuda is not None:
        (folder / "torch" / "lib" / "libtorch_cuda.so").touch()


def emulate(*arguments: str, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the packages of ``path`` before all others."""
    return shell("emulate", *arguments, env={**os.environ, "PYTHONPATH": str(path), **env})


def test_a_torch_without_cuda_is_refused(tmp_path: Path) -> None:
    install(tmp_path, "2.13.0+cpu", None)
    for arguments in (["--setup"], ["--", "python", "train.py"]):
        done = emulate(*arguments, path=tmp_path)
        assert done.returncode == 2
        assert "memprof: memprof emulate needs a CUDA build of torch, and torch 2.13.0+cpu has no" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_torch_whose_emulator_is_not_built_is_refused(tmp_path: Path) -> None:
    install(tmp_path)
    done = emulate("--", "python", "train.py", path=tmp_path, MEMPROF_EMULATOR=str(tmp_path / "none"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "the emulator is not built for torch 2.13.0+cu130: run `memprof emulate --setup`" in done.stderr


def test_an_old_torch_is_refused(tmp_path: Path) -> None:
    install(tmp_path, "2.5.1+cu124", "'12.4'")
    done = emulate("--setup", path=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs torch 2.6 or later, and torch 2.5.1+cu124 is installed" in done.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = emulate("--out", str(tmp_path / "file" / "below"), "--", "python", "train.py", path=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "file/below: cannot be written to (file is no folder)" in done.stderr


def test_nothing_to_run_is_refused(tmp_path: Path) -> None:
    done = emulate(path=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "requires a command" in done.stderr


def test_missing_headers_are_named_for_torch_s_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "triton" / "backends" / "nvidia" / "include"
    (old / "crt").mkdir(parents=True)
    (old / "crt" / "host_defines.h").touch()
    (old / "cuda.h").write_text("#define CUDA_VERSION 12080\n")
    torch = TorchBuild(tmp_path / "torch", "2.13.0+cu130", (13, 0))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(headers, "TOOLKIT", tmp_path / "toolkit")
    with pytest.raises(UsageError, match=r"CUDA 13's headers were not found \(found.*12\.8\).*nvidia-cuda-runtime and"):
        headers.find_headers(torch)
    (old / "cuda.h").write_text("#define CUDA_VERSION 13010\n")
    assert headers.find_headers(torch) == [old]


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = TorchBuild(tmp_path / "torch", "2.13.0+cu130", (13, 0))
    monkeypatch.setattr("memprof.emulate.build.find_torch", lambda: torch)
    monkeypatch.setattr("memprof.emulate.build.find_headers", lambda _: [tmp_path])
    monkeypatch.setenv("MEMPROF_EMULATOR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UsageError, match=r"needs a C compiler \(gcc\) and a C\+\+ compiler .* and nm"):
        build()


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build.platform, "machine", lambda: "aarch64")
    with pytest.raises(UsageError, match=r"runs on Linux x86_64, and this is .* aarch64"):
        torch_build.find_torch()


@pytest.mark.parametrize(("card", "words"), [("MI300X", "NVIDIA GPUs only"), ("none", "give its memory")])
def test_cards_it_cannot_be_are_refused(card: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launch.environment(card)


@pytest.mark.parametrize("devices", [0, 17])
def test_numbers_of_cards_it_cannot_have_are_refused(devices: int) -> None:
    with pytest.raises(UsageError, match="1 to 16"):
        launch.environment(devices=devices)


def test_a_compiler_of_the_environment_is_a_command_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "env python")
    assert _compiler("CC", "gcc") == ["env", "python"]
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(UsageError, match="CXX=no-such-compiler -O3: there is no such command"):
        _compiler("CXX", "g++")


def test_a_card_named_behind_the_command_is_said_to_be_the_commands(tmp_path: Path) -> None:
    install(tmp_path)
    for before, said in (([], True), (["--gpu", "24GB"], False)):
        command = [*before, "--", "python", "train.py", "--gpu", "24GB"]
        done = emulate(*command, path=tmp_path, MEMPROF_EMULATOR=str(tmp_path))
        assert ("--gpu after the command belongs to the command; the emulated GPU is H100" in done.stderr) is said


def test_a_card_of_another_maker_is_refused() -> None:
    for name in ("MI300X", "Arc A770"):
        with pytest.raises(UsageError, match="supports NVIDIA GPUs only"):
            find_card(name)
    assert find_card("24GB").maker == "nvidia"
