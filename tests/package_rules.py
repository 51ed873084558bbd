"""The packages of the package, which may import which, and what the code really imports.

``python -m tests.draw_packages`` draws the table into ``docs/images/packages.svg`` and ``docs/architecture.md``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Folders of the checkout and the packages they are.
SOURCES = {"memprof": "memprof", "integrations": "memprof.integrations", "reports": "memprof.reports"}

#: They may be imported from everywhere and import nothing but each other. ``redact`` is a folder.
SHARED_MODULES = ("_version", "errors", "files", "foreign", "frame_paths", "redact", "text", "units", "vocabulary")

#: Each package, what it is for, and the packages it may import. A package comes after all that it imports: no circles.
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "_native": ("run the slowest loops in C, where they could be built", ()),
    "executors": ("run work in other processes and on clusters", ()),
    "report": ("describe runs, comparisons and plans as typed data: memprof's JSON", ()),
    "snapshot": ("read and write snapshot files, safely", ("_native", "report")),
    "allocator": ("model the caching allocator: its rules and settings", ("_native",)),
    "timeline": ("rebuild lifetimes, block sizes and reserved memory", ("snapshot", "allocator")),
    "attribution": ("decide what each allocation is for: evidence and rules", ("timeline", "snapshot")),
    "config": ("describe a run's settings, model shapes, GPUs and optimizers; decide what fits", ("report",)),
    "analysis": (
        "describe a run completely, as typed data",
        ("attribution", "config", "timeline", "allocator", "snapshot", "executors", "report"),
    ),
    "compat": ("name, check and patch what is private in other packages", ()),
    "assistants": ("answer assistants: run commands for them, read-only", ()),
    "oom": ("explain out-of-memory texts", ("attribution", "allocator", "report")),
    "emulate": ("run CUDA torch without a GPU", ("config", "compat")),
    "recording": (
        "record a run: sessions, phases, owners, both recorders",
        ("snapshot", "compat", "config", "emulate"),
    ),
    "plan": ("search what fits, by simulations in other processes", ("config", "executors", "report")),
    "advice": (
        "find what to change, estimated or simulated",
        ("config", "oom", "plan", "analysis", "attribution", "allocator", "snapshot", "report"),
    ),
    "reports": ("render answers: HTML, terminal, Markdown, JSON", ("analysis", "report")),
    "integrations": (
        "attach to trainers, trackers and TensorBoard",
        ("recording", "compat", "advice", "analysis", "report", "reports", "snapshot"),
    ),
    "instrument": (
        "watch runs without a trainer of ours: attach, collect, run",
        ("integrations", "recording", "compat", "analysis", "report", "reports", "emulate"),
    ),
    "grpo": ("train lean: TRL's trainer in less memory", ("config", "plan", "compat", "recording")),
    "simulate": (
        "run the trainer's step on fake tensors",
        ("config", "compat", "allocator", "snapshot", "analysis", "recording", "grpo", "plan", "report"),
    ),
    "demo": ("train a small model, profiled", ("integrations", "advice", "analysis", "report", "reports", "snapshot")),
    "cli": (
        "parse commands and connect the packages",
        (
            "advice", "analysis", "assistants", "config", "demo", "emulate", "executors", "oom", "plan", "recording",
            "report", "reports", "simulate", "instrument", "snapshot",
        ),
    ),
}  # fmt: skip

#: Imports against the rules, each inside a method: an analysis shows itself in a notebook, draws its figures and writes
#: its own page, so that it can do so however it was obtained.
AGAINST_THE_RULES = {
    ("memprof.analysis.analysis", "memprof.reports.figures"),
    ("memprof.analysis.analysis", "memprof.reports.notebook"),
    ("memprof.analysis.breakdown", "memprof.reports.figures"),
    ("memprof.analysis.breakdown", "memprof.reports.notebook"),
}


def modules() -> dict[str, Path]:
    """Every module of the package by its import name."""
    found = {}
    for folder, package in SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            inner = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((package, *inner))] = path
    return found


def imports(known: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """For each module the modules of ours that it imports, with a line; lazy and type-only imports included.

    Those of :data:`AGAINST_THE_RULES` are left out if they are in a function; each must be there.
    """
    left = set(AGAINST_THE_RULES)
    found: dict[str, dict[str, int]] = {}
    for name, path in known.items():
        lazy = _in_functions(path)
        found[name] = {}
        for target, line in _imported(name, path, known):
            if (name, target) in AGAINST_THE_RULES and line in lazy:
                left.discard((name, target))
            else:
                found[name][target] = line
    assert not left, f"no longer imported, so no longer an exception: {left}"
    return found


def _in_functions(path: Path) -> set[int]:
    """The lines of imports inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return {n.lineno for f in functions for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))}


def _imported(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            module = str(node.module)
            inner = [f"{module}.{alias.name}" for alias in node.names]
            targets = [full if full in known else module for full in inner]
        else:
            continue
        yield from ((target, node.lineno) for target in targets if target in known and target != name)


def package_of(module: str) -> str:
    """Return a module's package: a key of :data:`PACKAGES`, ``shared modules``, or ``memprof`` for its top level."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return "memprof"
    return "shared modules" if parts[1] in SHARED_MODULES else parts[1]


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that import each other, directly or around corners (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def arrows(graph: Mapping[str, Mapping[str, int]]) -> dict[tuple[str, str], list[str]]:
    """Imports between packages, each with the modules that make it."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, targets in graph.items():
        for target, line in targets.items():
            pair = package_of(module), package_of(target)
            if pair[0] != pair[1]:
                found.setdefault(pair, []).append(f"{module}:{line} imports {target}")
    return found
