"""Cut a frame's file name down to its import path, which is what stack rules match.

The folders above a file do not tell which package it belongs to: ``/home/u/trl/train.py`` is no file of TRL, and an
environment below a folder called memprof holds no file of memprof. So the folders above the import root are cut off.
The root is found in this order:

1. The last ``site-packages`` or ``dist-packages`` folder, or the last ``.egg`` or ``.whl`` after it. Everything below
   it is installed under its import name.
2. Without such a folder (a source checkout, ``PYTHONPATH``, a zip, Bazel, the working folder of Ray or Spark), the
   structure of known packages decides. ``packages.toml`` lists it: ``torch/nn/modules/``, ``trl/trainer/*_trainer.py``.
   The root is the last folder in the path that bears a package's name and is followed by a file of that package.
3. memprof's own files lie below the folder this memprof runs from, or below a folder its recorder named in the snapshot
   (an editable install runs ``memprof.integrations`` from ``<checkout>/integrations``). By rule 2, ``memprof/``
   followed by a module of this version or an earlier one counts too.
4. Files written by TorchInductor are ``torchinductor/ab/cab....py``: the folder repeats letters of the file's name.

Every other file belongs to the user's program. Its root is not known and its path stays whole.

Three cases stay ambiguous. A user's file with exactly the name and folders of a package's file
(``/home/u/transformers/trainer.py``) counts as the package's, as a copy or a fork of it should. So does a user's file
below a folder that ``packages.toml`` lists whole, such as ``/home/u/vllm/worker/train.py``. A file of an uninstalled
package that ``packages.toml`` does not list counts as the user's.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from memprof.files import read_toml

# A folder, with "/" between its parts and at its end, and its import name ("memprof/integrations").
OwnFolder = tuple[str, str]

OWN = "memprof"
INDUCTOR = "torchinductor"

# These packages lie beside memprof/ in a checkout, and inside it after an installation from a wheel.
_BESIDE = ("integrations", "reports")
_PLACE = re.compile(r"(.*):\d+(?: |$)", re.DOTALL)
_INSTALLED = ("site-packages", "dist-packages")
_ARCHIVE = re.compile(r".+\.(?:egg|whl)", re.IGNORECASE)
# The file is named after a hash of 51 letters, and its folder after two of them. Below a folder of TorchInductor's
# usual name, a hash of any length is accepted.
_INDUCTOR = re.compile(
    r"(?:.*/)?(?:torchinductor_[^/]*/([a-z0-9]{2})/c\1\w*|([a-z0-9]{2})/c\2[a-z0-9]{40,})\.py", re.DOTALL
)


class FramePath(NamedTuple):
    """Hold a path with "/" between its parts; ``rooted`` is true when the first part is an import name."""

    path: str
    rooted: bool


def frame_path(file: str, own: Sequence[OwnFolder] = ()) -> FramePath:
    """Return the path that rules match for a frame's file; the module's docstring tells how it is found.

    Args:
        file: the file name as recorded, on any operating system.
        own: folders of the memprof that recorded the snapshot, in addition to those of this memprof.
    """
    path = file.replace("\\", "/")
    if "/" not in path or path[0] == "<":
        return FramePath(path, False)
    if "/." in path or "//" in path:
        path = posixpath.normpath(path)
    return _own(path, own) or _installed(path) or _in_package(path) or _by_inductor(path) or FramePath(path, False)


@lru_cache(maxsize=1)
def own_folders() -> tuple[OwnFolder, ...]:
    """Return the folders this memprof runs from, each with its import name."""
    here = Path(os.path.abspath(__file__)).parent
    # Frames may name a folder with its symbolic links or with them resolved.
    return tuple(dict.fromkeys([*_below(here), *_below(here.resolve())]))


def _below(package: Path) -> Iterator[OwnFolder]:
    yield package.as_posix() + "/", "memprof"
    for name in _BESIDE:
        beside = package.parent / name
        # Beside an installed memprof, a folder of that name is another package.
        if not (package / name).is_dir() and (beside / "__init__.py").is_file():
            yield beside.as_posix() + "/", f"memprof/{name}"


class RecordedFolder(Protocol):
    """A folder that a snapshot names, and what it is imported as."""

    @property
    def folder(self) -> str: ...

    @property
    def name(self) -> str: ...


def recorded_own_folders(recorded: Iterable[RecordedFolder]) -> tuple[OwnFolder, ...]:
    """Return the folders of the memprof that recorded a snapshot, from the ``own_folders`` of its run."""
    return tuple((own.folder, own.name) for own in recorded if own.folder and own.name.split("/")[0] == OWN)


def text_path(frame: str) -> FramePath:
    """Apply :func:`frame_path` to a frame written as ``file:line function``."""
    place = _PLACE.match(frame)
    return _path_of_text(place.group(1) if place else frame)


@lru_cache(maxsize=65536)
def _path_of_text(file: str) -> FramePath:
    return frame_path(file)


def short_path(path: str) -> str:
    """Shorten a path: begin at the library's name or at ``python3.x``; keep only the file name of other files."""
    return library_path(path) or re.split(r"[/\\]", path)[-1]


def library_path(path: str) -> str | None:
    """Return a file's path from its library's name or from ``python3.x`` on; None for other files."""
    parts = re.split(r"[/\\]+", path)
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] in ("site-packages", "dist-packages"):
            return "/".join(parts[i + 1 :])
        if re.fullmatch(r"python3\.\d+", parts[i]):
            return "/".join(parts[i:])
    return None


@lru_cache(maxsize=1)
def package_names() -> frozenset[str]:
    """First parts that only a rooted path may match: the packages whose structure is known."""
    return frozenset({*_table()["packages"], OWN, INDUCTOR})


def _own(path: str, own: Sequence[OwnFolder]) -> FramePath | None:
    for folder, name in (*own, *own_folders()):
        if path.startswith(folder) and not _installed(below := path[len(folder) :]):
            return FramePath(f"{name}/{below}", True)
    return None


def _installed(path: str) -> FramePath | None:
    parts = path.split("/")
    for i in range(len(parts) - 2, -1, -1):
        if parts[i].lower() in _INSTALLED or _ARCHIVE.fullmatch(parts[i]):
            return FramePath("/".join(parts[i + 1 :]), True)
    return None


def _in_package(path: str) -> FramePath | None:
    """Return the path from the last folder that bears a package's name and is followed by a file of that package."""
    parts = path.split("/")
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] in package_names() and _structure(parts[i]).match("/".join(parts[i + 1 :])):
            return FramePath("/".join(parts[i:]), True)
    return None


def _by_inductor(path: str) -> FramePath | None:
    if not _INDUCTOR.fullmatch(path):
        return None
    return FramePath("/".join([INDUCTOR, *path.split("/")[-2:]]), True)


@cache
def _structure(name: str) -> re.Pattern[str]:
    """Match a known package's files by their path below its folder; compiled for the packages that occur."""
    if name == INDUCTOR:
        return re.compile("(?!)")
    table = _table()
    return _one_of(sorted(set(_own_files(table[OWN]))) if name == OWN else table["packages"][name].split())


def _one_of(entries: Sequence[str]) -> re.Pattern[str]:
    """Compile a pattern that matches any of these entries of ``packages.toml``."""
    texts = []
    for entry in entries:
        text = re.escape(entry).replace(r"\*", "[^/]*")
        texts.append(text + "." if entry.endswith("/") else text + "c?$")
    return re.compile("|".join(texts), re.DOTALL)


def _own_files(packages: dict[str, str]) -> Iterator[str]:
    """Yield the paths of memprof's modules below ``memprof/``, of earlier versions and of this one."""
    for package, names in packages.items():
        for name in names.split():
            yield f"{name}.py" if package == "." else f"{package}/{name}.py"
    for folder, name in own_folders():
        below = name.partition("/")[2]
        for file in Path(folder).rglob("*.py"):
            inner = posixpath.join(below, file.relative_to(folder).as_posix())
            if inner != "__init__.py":  # any folder may hold one
                yield inner


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    """Read ``packages.toml``."""
    return read_toml(Path(__file__).with_name("packages.toml"))
