"""Name the places that hold memory: the user's or the model's line on a stack, and each place's own share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from memprof.frame_paths import text_path
from memprof.report.advice import Place
from memprof.report.allocations import Allocation
from memprof.vocabulary import Category

if TYPE_CHECKING:
    from memprof.analysis.views import Views

#: Name at most so many places; fewer where they hold half.
MOST = 4
_HALF = 0.5
# A place that holds less than this is not named as a cause.
_SHOWN = 0.01

# Frames outside Python: by their file's ending, or because there is no file.
_NATIVE = re.compile(r"^\?\?|^:0 |^<nofile>|\.(?:cpp|cc|cxx|h|hpp|c|S|cu|cuh|pyx|o|so(?:\.\d+)*):\d")
# Frames of the interpreter's own library.
_LIBRARY = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\](?!.*(?:site-packages|dist-packages))")
# The script that starts memprof.
_SCRIPT = re.compile(r"[/\\](?:bin|Scripts)[/\\]memprof(?:\.exe)?:\d")
# Packages that carry out what a model's or a trainer's line asks for. That line, where one is on the stack, says more.
_PLUMBING = {
    "accelerate", "apex", "beartype", "bitsandbytes", "deepspeed", "einops", "einx", "flash_attn", "jaxtyping",
    "liger_kernel", "lightning", "numpy", "opt_einsum", "peft", "pytorch_lightning", "ray", "torch", "torchao",
    "transformer_engine", "transformers", "triton", "xformers",
}  # fmt: skip
# Lines of these are a place: a model's code, and the optimizer that makes its own state.
_PLACES = ("torch/optim/", "transformers/models/")


def place_of(stack: Sequence[str]) -> str:
    """Return the innermost frame of the user's, a model's or a trainer's code; else the innermost in Python, or ""."""
    python = python_frames(stack)
    outside = [frame for frame in python if not is_torch(frame)]
    return next((frame for frame in outside if not _is_plumbing(frame)), next(iter([*outside, *python]), ""))


def users_line(stack: Sequence[str]) -> str:
    """Return the innermost frame of the user's own files, which they can change; "" where none is on the stack."""
    return next(filter(is_users, stack), "")


def is_users(frame: str) -> bool:
    """Tell whether a frame lies in the user's own files, and not in a library or the interpreter."""
    return not (is_native(frame) or starts_command(frame) or is_torch(frame) or text_path(frame).rooted)


def python_frames(stack: Sequence[str]) -> list[str]:
    """Return the frames in Python, the innermost first, without what only starts a command."""
    return [frame for frame in stack if not is_native(frame) and not starts_command(frame)]


def starts_command(frame: str) -> bool:
    """Tell whether a frame is click's or of memprof's script: all that a command's own tensors have on their stack."""
    file = text_path(frame)
    return (file.rooted and file.path.startswith("click/")) or bool(_SCRIPT.search(frame))


def without_folders(frame: str) -> str:
    """Return ``train.py:9 step`` of a frame with its file's whole path."""
    return re.split(r"[/\\]", frame)[-1]


def is_native(frame: str) -> bool:
    """Tell whether a frame lies outside Python: in C++, CUDA or a library without a source file."""
    return bool(_NATIVE.search(frame))


def is_torch(frame: str) -> bool:
    """Tell whether a frame is of torch, but for its optimizers, or of the interpreter and its library."""
    file = text_path(frame)
    torch = file.rooted and file.path.startswith("torch/") and not file.path.startswith("torch/optim/")
    return torch or frame.startswith("<") or is_library(frame)


def is_library(frame: str) -> bool:
    """Tell whether a frame is of the interpreter's own library."""
    return bool(_LIBRARY.search(frame))


def _is_plumbing(frame: str) -> bool:
    file = text_path(frame)
    return file.rooted and file.path.split("/")[0] in _PLUMBING and not file.path.startswith(_PLACES)


def places_at_peak(views: Views, category: Category) -> list[Place]:
    """List the places that hold most of a category at the peak, the largest first.

    Every allocation alive then is counted. ``share`` is of the whole category.
    """
    return largest_places(bytes_by_line(stacks_at_peak(views, category)), views.peak.categories[category])


def stacks_at_peak(views: Views, category: Category) -> list[tuple[Sequence[str], int]]:
    """List the distinct stacks of a category's allocations at the peak, with the bytes of each."""
    import numpy as np  # here, so that --help loads none

    rows = views.peak.rows
    rows = rows[views.attribution.category[rows] == category.code]
    stacks, which = np.unique(views.timeline.stack[rows], return_inverse=True)
    held = np.bincount(which, views.timeline.size[rows], minlength=len(stacks))
    return [(views.stacks.of(int(stack)), round(n)) for stack, n in zip(stacks, held, strict=True)]


def bytes_by_line(found: Iterable[tuple[Sequence[str], int]]) -> dict[str, int]:
    """Add up bytes by the line (:func:`place_of`) that allocated them, the largest first."""
    sums: dict[str, int] = {}
    for stack, n_bytes in found:
        if frame := place_of(stack):
            sums[frame] = sums.get(frame, 0) + n_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def listed_places(groups: Iterable[Allocation], category: str, whole: int) -> list[Place]:
    """List places as :func:`places_at_peak` does, from the allocations that a report lists."""
    return largest_places(bytes_by_line((g.stack, g.bytes) for g in groups if g.category == category), whole)


def largest_places(sums: Mapping[str, int], whole: int) -> list[Place]:
    """Choose the places to name of those in ``sums``, which has the largest first; ``whole`` is their category."""
    places: list[Place] = []
    for frame, n_bytes in list(sums.items())[:MOST]:
        if n_bytes < _SHOWN * whole or sum(place.bytes for place in places) >= _HALF * whole:
            break
        places.append(Place(frame=frame, bytes=n_bytes, share=round(n_bytes / whole, 4)))
    return places
