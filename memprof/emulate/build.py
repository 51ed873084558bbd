"""Compile the emulator's libraries for the installed torch, once, into a folder of the environment."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from memprof.emulate.headers import find_headers
from memprof.emulate.stubs import stub_source
from memprof.emulate.symbols import Wanted, defined_functions, has_new_strings, wanted_by
from memprof.emulate.torch_build import TorchBuild, find_torch
from memprof.errors import InputError, UsageError

_NATIVE = Path(__file__).parent / "native"
# What writes C, or decides how it is compiled.
_GENERATORS = ("build.py", "headers.py", "stubs.py", "symbols.py")
_CORE = "libmemprof_emulator.so"
VALUES = "libmemprof_emulator_values.so"


def library_folder(torch: TorchBuild) -> Path:
    """Return where the libraries for a torch are or will be: its version and the sources decide the name."""
    root = os.environ.get("MEMPROF_EMULATOR") or os.path.join(sys.prefix, "share", "memprof-emulator")
    digest = hashlib.sha256()
    for path in sorted(p for p in [*_NATIVE.rglob("*"), *map(Path(__file__).with_name, _GENERATORS)] if p.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    return Path(root).absolute() / f"torch-{torch.version}-{digest.hexdigest()[:12]}"


def built() -> Path:
    """Return the folder of the libraries.

    Raises:
        UsageError: they are not built yet for this torch.
    """
    torch = find_torch()
    folder = library_folder(torch)
    if not (folder / VALUES).exists():
        raise UsageError(
            f"the emulator is not built for torch {torch.version}: run `memprof emulate --setup` (half a minute)."
        )
    return folder


def build(say: Callable[[str], None] = lambda _: None) -> Path:
    """Compile the libraries if that has not been done; return their folder.

    Args:
        say: called with what is being done.

    Raises:
        UsageError: torch's CUDA build, a compiler or CUDA's headers are missing.
        InputError: the folder cannot be written, or a compiler fails.
    """
    torch = find_torch()
    folder = library_folder(torch)
    if (folder / VALUES).exists():
        say(f"The emulator for torch {torch.version} is built: {folder}")
        return folder
    tools = _Tools(find_headers(torch))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InputError(
            f"{folder.parent}: cannot be written to ({error.strerror or error}); "
            "set MEMPROF_EMULATOR to another folder."
        ) from None
    try:
        say(f"Building the emulator for torch {torch.version}, CUDA {torch.cuda[0]}.{torch.cuda[1]} ...")
        _build_libraries(torch, tools, work)
        say("Building the operators' values ...")
        _build_values(torch, tools, work)
        shutil.rmtree(work / "objects")
        work.chmod(0o755)
        if not (folder / VALUES).exists():  # another process may have been faster
            work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(f"Built: {folder}")
    return folder


class _Tools:
    """The compilers; every call's failure is one sentence with the first error."""

    def __init__(self, include: Sequence[Path]) -> None:
        self._include = [f"-I{folder}" for folder in include]
        self._c = _compiler("CC", "gcc", "cc")
        self._cxx = _compiler("CXX", "g++", "c++")
        wanted: dict[str, object] = {"a C compiler (gcc)": self._c, "a C++ compiler (g++)": self._cxx}
        wanted |= {f"{tool} (of binutils)": shutil.which(tool) for tool in ("nm", "readelf")}
        if missing := [name for name, found in wanted.items() if found is None]:
            raise UsageError(f"memprof emulate --setup needs {' and '.join(missing)} (Debian: apt-get install g++).")

    def c(self, *arguments: str | Path) -> None:
        _compile([*(self._c or ()), "-O2", "-fPIC", "-fvisibility=hidden", *self._include, *map(str, arguments)])

    def cxx(self, *arguments: str | Path) -> None:
        _compile([*(self._cxx or ()), "-O1", "-fPIC", *map(str, arguments)])


def _compiler(variable: str, *names: str) -> list[str] | None:
    """Return a compiler as a command: of the environment (``ccache gcc``), or the first of these that is installed."""
    if told := shlex.split(os.environ.get(variable, "")):
        if shutil.which(told[0]) is None:
            raise UsageError(f"{variable}={os.environ[variable]}: there is no such command.")
        return told
    return next(([name] for name in names if shutil.which(name)), None)


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise InputError(f"{Path(command[0]).name} could not compile the emulator: {first.strip()}")


def _build_libraries(torch: TorchBuild, tools: _Tools, folder: Path) -> None:
    """Compile what is written by hand, stubs for the rest, and libraries by the names torch opens."""
    objects = folder / "objects"
    objects.mkdir()
    compiled = []
    version = f"-DEMULATED_CUDA={torch.cuda[0] * 1000 + torch.cuda[1] * 10}"
    for source in sorted(_NATIVE.glob("*.c")):
        compiled.append(objects / f"{source.stem}.o")
        tools.c("-Wall", "-Wno-unused-parameter", version, "-c", source, "-o", compiled[-1])
    wanted = wanted_by(torch)
    stubs = objects / "stubs.c"
    stubs.write_text(stub_source(wanted.functions - defined_functions(compiled)))
    tools.c("-Wno-builtin-declaration-mismatch", "-c", stubs, "-o", stubs.with_suffix(".o"))
    own = [*compiled, stubs.with_suffix(".o")]
    tools.c("-shared", f"-Wl,-soname,{_CORE}", "-o", folder / _CORE, *own, "-ldl", "-lpthread", "-lrt")
    for name, script in _named_libraries(wanted, objects):
        names = ["-shared", f"-Wl,-soname,{name}", *script, "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        tools.c(*names, "-o", folder / name, objects / "empty.c", f"-L{folder}", "-lmemprof_emulator")
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def _named_libraries(wanted: Wanted, objects: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each library's name and linker options; it holds its versions and its need of ours, nothing else."""
    (objects / "empty.c").write_text("static int nothing __attribute__((unused));\n")
    for name, versions in wanted.libraries.items():
        script = objects / f"{name}.map"
        script.write_text("".join(f"{version} {{ }};\n" for version in versions))
        yield name, [f"-Wl,--version-script,{script}"] if versions else []


def _build_values(torch: TorchBuild, tools: _Tools, folder: Path) -> None:
    include, lib = torch.folder / "include", torch.folder / "lib"
    tools.cxx(
        "-std=c++20", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(has_new_strings(torch))}",
        f"-I{include}", f"-I{include}/torch/csrc/api/include",
        _NATIVE / "values" / "operators.cpp", "-o", folder / VALUES,
        f"-L{lib}", f"-L{folder}", f"-Wl,-rpath-link,{folder}", "-Wl,-rpath,$ORIGIN",
        "-lc10", "-ltorch_cpu", "-ltorch_cuda", "-ltorch", "-lmemprof_emulator",
    )  # fmt: skip
