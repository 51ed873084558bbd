"""List what both versions are asked: memprof's command lines, with snapshots relative to one folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

KINDS = ("report", "compare", "explain", "simulate", "demo")
DEMO_RUNS = ("full", "lora")

_STEP = (
    *("--model", "Qwen/Qwen2.5-0.5B-Instruct", "--prompt-length", "64", "--completion-length", "64"),
    *("--num-generations", "4", "--per-device-train-batch-size", "4", "--gradient-accumulation-steps", "1"),
)
_SIMULATED = {
    "full": ("--dtype", "bfloat16"),
    "lora": ("--lora-r", "16"),
    "lean": ("--recipe", "lean", "--lora-r", "16"),
}


@dataclass(frozen=True)
class Question:
    """One command line of memprof.

    ``name`` is where the answer is kept. ``screen`` marks text for people, which may change on purpose.
    ``leaves`` names the report files that the command writes, where it does not print JSON.
    """

    name: str
    arguments: tuple[str, ...]
    screen: bool = False
    leaves: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`."""
        return self.name.split("/")[0]


def snapshots_below(folders: dict[str, Path]) -> dict[str, list[str]]:
    """Name every pickle below each folder as ``<label>/<path in the folder>``, sorted."""
    return {
        label: sorted(f"{label}/{path.relative_to(folder).as_posix()}" for path in folder.rglob("*.pickle"))
        for label, folder in folders.items()
    }


def questions(kind: str, files: dict[str, list[str]], *, quick: bool = False) -> list[Question]:
    """List the questions of one kind about ``files``, as :func:`snapshots_below` names them."""
    every = [file for group in files.values() for file in group]
    if kind == "report":
        return [question for file in every for question in _reports(file)]
    if kind == "explain":
        return [Question(f"explain/{_stem(file)}", ("explain", file, "--all", "--json", "-")) for file in every]
    if kind == "compare":
        return [question for group in files.values() for question in _comparisons(group)]
    if kind == "simulate":
        return [
            Question(f"simulate/{name}", ("simulate", *_STEP, *settings, "--json", "-"))
            for name, settings in _SIMULATED.items()
        ]
    name, options = ("demo-quick", ("--quick",)) if quick else ("demo", ())
    written = tuple(f"{name}/{run}.json" for run in DEMO_RUNS)
    return [Question(f"demo/{name}", ("demo", *options, "--out", name), leaves=written)]


def _reports(file: str) -> Iterator[Question]:
    stem = _stem(file)
    yield Question(f"report/{stem}", ("report", file, "--json", "-"))
    yield Question(f"report/{stem}.all", ("report", file, "--allocations", "all", "--json", "-"))
    yield Question(f"report/{stem}.text", ("report", file), screen=True)
    yield Question(f"report/{stem}.markdown", ("report", file, "--format", "markdown"), screen=True)


def _comparisons(group: Sequence[str]) -> Iterator[Question]:
    """Put each file beside the next of its folder, and the last beside a published table."""
    for one, other in pairwise(group):
        yield Question(f"compare/{_stem(one)}", ("compare", one, other, "--json", "-"))
    for last in group[-1:]:
        beside = ("--published", "unsloth-2025", "--capacity", "24GB")
        yield Question(f"compare/{_stem(last)}.published", ("compare", last, *beside, "--json", "-"))


def _stem(file: str) -> str:
    return file.removesuffix(".pickle")
