"""The path that stack rules see: a frame's file name from the folder on that it was imported from.

Where a program lies says nothing about what it is: ``/home/u/trl/train.py`` is no file of TRL, and an environment below
a folder called memprof holds no file of memprof. So folders above the import root are cut off. The root is found so:

1. The last ``site-packages`` or ``dist-packages``, or the last ``.egg`` or ``.whl`` after it: everything below is
   installed, under its import name.
2. Without one (a source checkout, ``PYTHONPATH``, a zip, Bazel, the working folder of Ray or Spark), a package's own
   structure tells, as ``packages.toml`` lists it: ``torch/nn/modules/``, ``trl/trainer/*_trainer.py``. The last folder
   in the path that is followed by files of its package is the root, never the first that only has the name.
3. memprof's own files are those below the folder this memprof runs from, those its recorder named in the snapshot (an
   editable install runs ``memprof.integrations`` from ``<checkout>/integrations``), and by (2) ``memprof/`` followed by
   one of its modules, of this version or of those before.
4. What TorchInductor wrote is ``torchinductor/ab/cab....py``: the folder repeats letters of the file's name.

All else is the program's own; its root is not known and its path stays whole.

What stays ambiguous: a file of the program's own whose name and folders are exactly those of a package
(``/home/u/transformers/trainer.py``) counts as that package's, as a copy or a fork of it should; an uninstalled version
of a package whose module is not in the list counts as the program's own.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FramePath", "OwnFolder", "frame_path", "own_folders", "package_names", "recorded_own_folders", "text_path"]

# A folder with "/" between its parts and at its end, and what it is imported as ("memprof/integrations").
OwnFolder = tuple[str, str]

OWN = "memprof"
INDUCTOR = "torchinductor"

# Packages that lie beside memprof/ in a checkout, and inside it where memprof was installed from a wheel.
_BESIDE = ("integrations", "reports")
_PLACE = re.compile(r"(.*):\d+(?: |$)", re.DOTALL)
_INSTALLED = ("site-packages", "dist-packages")
_ARCHIVE = re.compile(r".+\.(?:egg|whl)", re.IGNORECASE)
# A hash of 51 letters, and letters 1 and 2 of it as the folder; a folder of the usual name makes any length believed.
_INDUCTOR = re.compile(
    r"(?:.*/)?(?:torchinductor_[^/]*/([a-z0-9]{2})/c\1\w*|([a-z0-9]{2})/c\2[a-z0-9]{40,})\.py", re.DOTALL
)


class FramePath(NamedTuple):
    """A path with "/" between its parts; ``rooted`` says that its first part is an import name."""

    path: str
    rooted: bool


def frame_path(file: str, own: Sequence[OwnFolder] = ()) -> FramePath:
    """The path of a frame's file that rules see; the head of this module says how it is found.

    Args:
        file: the file name as recorded, of any system.
        own: folders of the memprof that recorded, beside those of this one.
    """
    path = file.replace("\\", "/")
    if "/" not in path or path[0] == "<":
        return FramePath(path, False)
    if "/." in path or "//" in path:
        path = posixpath.normpath(path)
    return _own(path, own) or _installed(path) or _in_package(path) or _by_inductor(path) or FramePath(path, False)


@lru_cache(maxsize=1)
def own_folders() -> tuple[OwnFolder, ...]:
    """The folders this memprof runs from, each with what it is imported as."""
    here = Path(os.path.abspath(__file__)).parent
    # Frames may name a folder as it was given or as links resolve it.
    return tuple(dict.fromkeys([*_below(here), *_below(here.resolve())]))


def _below(package: Path) -> Iterator[OwnFolder]:
    yield package.as_posix() + "/", "memprof"
    for name in _BESIDE:
        beside = package.parent / name
        # Beside an installed memprof, a folder of that name is another package.
        if not (package / name).is_dir() and (beside / "__init__.py").is_file():
            yield beside.as_posix() + "/", f"memprof/{name}"


def recorded_own_folders(extra: Mapping[str, Any]) -> tuple[OwnFolder, ...]:
    """The folders that the recording memprof ran from, as a snapshot's ``"memprof"`` key names them."""
    rows = extra.get("own_folders") or []
    return tuple((str(folder), str(name)) for folder, name, *_ in rows if folder and str(name).split("/")[0] == OWN)


def text_path(frame: str) -> FramePath:
    """:func:`frame_path` of a frame written as ``file:line function``."""
    place = _PLACE.match(frame)
    return _path_of_text(place.group(1) if place else frame)


@lru_cache(maxsize=65536)
def _path_of_text(file: str) -> FramePath:
    return frame_path(file)


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
    """The path from the last folder on that bears a package's name and is followed by files of that package."""
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
    """What matches any of the entries of ``packages.toml``."""
    texts = []
    for entry in entries:
        text = re.escape(entry).replace(r"\*", "[^/]*")
        texts.append(text + "." if entry.endswith("/") else text + "c?$")
    return re.compile("|".join(texts), re.DOTALL)


def _own_files(rooms: dict[str, str]) -> Iterator[str]:
    """memprof's modules, of earlier versions and of this one, below ``memprof/``."""
    for room, names in rooms.items():
        for name in names.split():
            yield f"{name}.py" if room == "." else f"{room}/{name}.py"
    for folder, name in own_folders():
        below = name.partition("/")[2]
        for file in Path(folder).rglob("*.py"):
            inner = posixpath.join(below, file.relative_to(folder).as_posix())
            if inner != "__init__.py":  # any folder may hold one
                yield inner


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    """Read ``packages.toml``."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_name("packages.toml").read_text(encoding="utf-8"))
    return table
