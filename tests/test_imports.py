"""What importing costs, and which way imports may go."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import draw_packages, package_rules

ROOT = Path(__file__).resolve().parents[1]

# Loaded only when something is recorded, trained or drawn.
HEAVY = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "pandas")
# Beside those, not even `memprof --help` may load these.
NOT_FOR_HELP = (*HEAVY, "numpy", "plotly", "rich", "msgspec")

# Packages that work without torch; a torch import at their top level would break `memprof report`.
TORCH_FREE = (
    "advice", "allocator", "analysis", "attribution", "cli", "compat", "config", "demo", "oom", "plan", "reports",
    "instrument", "snapshot", "timeline",
)  # fmt: skip


def loaded_after(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    script = f"{code}\nimport json, sys; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def source_files() -> list[Path]:
    return [path for top in ("memprof", "integrations", "reports") for path in (ROOT / top).rglob("*.py")]


def test_importing_memprof_is_cheap() -> None:
    assert loaded_after("import memprof").isdisjoint(NOT_FOR_HELP)


def test_importing_the_demo_is_cheap() -> None:
    assert loaded_after("import memprof.demo").isdisjoint(HEAVY)


def test_help_loads_nothing_heavy() -> None:
    code = "from memprof.cli import main\ntry: main(['--help'])\nexcept SystemExit as end: assert not end.code"
    assert loaded_after(code).isdisjoint(NOT_FOR_HELP)


def test_explaining_a_text_loads_nothing_heavy() -> None:
    """With frames too, whose phase is looked up in attribution's table of stacks."""
    text = '  File "/x/torch/optim/adamw.py", line 1, in step\n    y\nCUDA out of memory. Tried to allocate 1.00 GiB'
    code = (
        f"from memprof.oom import Failure, explain_log, find_failures\n(failure,) = explain_log({text!r}).failures\n"
        "assert failure.phase == 'optimizer_step'"
    )
    assert loaded_after(code).isdisjoint({*NOT_FOR_HELP} - {"msgspec"})


def test_analysing_needs_no_torch() -> None:
    assert loaded_after("import memprof; memprof.analyze, memprof.load_snapshot").isdisjoint(HEAVY)


def test_analysing_compiles_no_pattern_of_out_of_memory_texts() -> None:
    loaded_after("import sys, memprof; memprof.analyze\nassert 'memprof.oom.known_messages' not in sys.modules")


def test_public_names_are_there() -> None:
    loaded_after(
        "import memprof\n"
        "for name in memprof.__all__: getattr(memprof, name)\n"
        "assert set(memprof.__all__) <= set(dir(memprof))"
    )


@pytest.mark.parametrize("before", ["", "from memprof import phase", "import memprof.recording.api"])
def test_record_can_be_called_whatever_was_imported_before(before: str) -> None:
    """The function and the package it lives in have one name."""
    loaded_after(f"{before}\nfrom memprof import record\nassert callable(record), record\nimport memprof.recording.api")


def test_unknown_names_are_refused() -> None:
    import memprof

    with pytest.raises(AttributeError, match="no_such_name"):
        memprof.no_such_name  # noqa: B018


def test_mapped_packages_are_the_trees_own_files() -> None:
    """From the repository root too, where a plain ``import reports`` would find a second copy."""
    code = "import memprof.reports, memprof.integrations; print(memprof.reports.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "reports" / "__init__.py"


def test_nobody_imports_the_mapped_folders_by_their_bare_name() -> None:
    bare = ("integrations", "reports")
    files = [*source_files(), *(p for top in ("tests", "examples", "benchmarks") for p in (ROOT / top).rglob("*.py"))]
    found = [f"{path}:{line} {name}" for path in files for line, name in imports_of(path) if name.split(".")[0] in bare]
    assert not found


def test_torch_free_packages_import_no_torch_at_the_top() -> None:
    """Also not behind a condition: a top-level import of torch is one, wherever it stands."""
    found = []
    for path in source_files():
        package = path.relative_to(ROOT).parts
        top_level = len(package) == 2 or package[1] in TORCH_FREE
        torch_free = package[0] == "reports" or (package[0] == "memprof" and top_level)
        imports = imports_of(path, top_level=True) if torch_free else ()
        found += [f"{path}:{line}" for line, name in imports if name.split(".")[0] in HEAVY]
    assert not found


@pytest.fixture(scope="module")
def graph() -> dict[str, dict[str, int]]:
    return package_rules.imports(package_rules.modules())


def test_no_circles_between_files(graph: dict[str, dict[str, int]]) -> None:
    """Lazy and type-only imports count: a reader follows them all the same."""
    assert package_rules.circles(graph) == []


def test_packages_import_what_the_table_allows(graph: dict[str, dict[str, int]]) -> None:
    found = []
    for (package, other), where in package_rules.arrows(graph).items():
        known = package_rules.PACKAGES.get(package)
        allowed = {"shared modules", *known[1]} if known else set()
        if package == "memprof":  # the package itself: lazy homes of the public names, and `python -m memprof`
            allowed = {"shared modules", "advice", "analysis", "cli", "instrument", "recording", "snapshot"}
            allowed |= {"integrations", "reports"}
        found += where if other not in allowed else []
    assert not found


def test_every_arrow_of_the_table_is_needed(graph: dict[str, dict[str, int]]) -> None:
    real = set(package_rules.arrows(graph))
    table = {(package, other) for package, (_, below) in package_rules.PACKAGES.items() for other in below}
    assert not table - real


def test_packages_stand_above_what_they_import() -> None:
    seen: set[str] = set()
    for package, (_, below) in package_rules.PACKAGES.items():
        assert seen.issuperset(below), package
        seen.add(package)


def test_the_table_names_every_room() -> None:
    folders = {p.parent.name for p in (ROOT / "memprof").glob("*/__init__.py")}
    shared = set(package_rules.SHARED_MODULES)
    assert set(package_rules.PACKAGES) == (folders - shared) | {"integrations", "reports"}
    top = {p.stem for p in (ROOT / "memprof").glob("*.py")}
    assert top | (folders & shared) == {"__init__", "__main__", *shared}
    assert len(top) <= 10


def test_no_folder_is_too_full_to_scan() -> None:
    tops = ("memprof", "integrations", "reports", "tests", "benchmarks", "examples")
    folders = [f for top in tops for f in [ROOT / top, *(ROOT / top).rglob("*")] if f.is_dir()]
    full = {str(f): n for f in folders if (n := len(list(f.glob("*.py")))) > 15}
    assert not full


def test_the_drawing_is_the_table() -> None:
    """Made anew by ``python -m tests.draw_packages``."""
    assert draw_packages.PICTURE.read_text(encoding="utf-8") == draw_packages.picture()
    page = draw_packages.PAGE.read_text(encoding="utf-8")
    assert page == draw_packages.page_with_listing(page)


def imports_of(path: Path, *, top_level: bool = False) -> Iterator[tuple[int, str]]:
    """Line and module of each absolute import, types' aside; with ``top_level`` those importing the file runs."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = _run_on_import(tree.body) if top_level else _walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under ``if TYPE_CHECKING``."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield from _walk(child)


def _run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements outside functions and outside ``if TYPE_CHECKING``."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _run_on_import(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from _run_on_import(getattr(node, block, []))


@pytest.mark.parametrize(
    ("missing", "name", "extra"),
    [("transformers", "MemProfCallback", "record"), ("torch", "MemProfCallback", "record")],
)
def test_a_missing_extra_is_one_sentence_with_the_command(missing: str, name: str, extra: str) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    script = (
        f"import sys; sys.modules[{missing!r}] = None\nimport memprof\n"
        f"try: memprof.{name}\nexcept ModuleNotFoundError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith(f"memprof.{name} needs {missing}: pip install '.[{extra}]' in a checkout of memprof")
    assert "pip install 'grpo-memprof" not in done.stdout  # no registry has it
    assert ".whl" not in done.stdout  # nor is there a wheel


@pytest.mark.parametrize("call", ["record('x.pickle').__enter__()", "attach(None)"])
def test_recording_without_torch_names_the_extra(call: str) -> None:
    script = (
        f"import sys; sys.modules['torch'] = None\nimport memprof\n"
        f"try: memprof.{call}\nexcept ModuleNotFoundError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert "needs torch: pip install '.[record]' in a checkout of memprof" in done.stdout, done.stdout + done.stderr


def test_a_misspelt_name_fails_a_type_check(tmp_path: Path) -> None:
    """The module's ``__getattr__`` is hidden from type checkers, which would take any name otherwise."""
    program = tmp_path / "program.py"
    program.write_text("import memprof\nmemprof.analyze\nmemprof.analyse\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--follow-imports=silent", str(program)]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert 'Module has no attribute "analyse"' in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("error:") == 1, done.stdout


def test_the_files_that_begin_first_are_there() -> None:
    from tests.conftest import SLOWEST

    assert [name for name in SLOWEST if not (Path(__file__).parent / name).is_file()] == []


_SCRIPTED = re.compile(r"^[ \t]*from (memprof(?:\.\w+)*) import ([\w, ]+)$", re.MULTILINE)


def test_programs_kept_as_text_import_what_there_is() -> None:
    """A benchmark's or a test's child is a string: no linter follows a module that was renamed into it."""
    wrong, seen = [], 0
    for path in (path for top in ("tests", "benchmarks", "examples") for path in (ROOT / top).rglob("*.py")):
        for text in (
            n.value for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Constant)
        ):
            for module, names in _SCRIPTED.findall(text) if isinstance(text, str) else ():
                seen += 1
                found = find_spec(module) if _is_there(module.rpartition(".")[0]) else None
                source = Path(found.origin).read_text(encoding="utf-8") if found and found.origin else ""
                for name in (word.split(" as ")[0].strip() for word in names.split(",")):
                    if not (found and (re.search(rf"\b{name}\b", source) or _is_there(f"{module}.{name}"))):
                        wrong.append(f"{path.relative_to(ROOT)}: from {module} import {name}")
    assert not wrong
    assert seen > 20


def _is_there(module: str) -> bool:
    try:
        return not module or find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_untyped_mappings_are_few() -> None:
    """Data of memprof's own has classes; :mod:`memprof.foreign` names what other packages' data is."""
    untyped = re.compile(r"\b(?:dict|Mapping)\[str, Any\]")
    found = [line for path in source_files() for line in path.read_text("utf-8").splitlines() if untyped.search(line)]
    assert len(found) <= 146, len(found)


def test_a_class_name_means_one_thing() -> None:
    """``OtherProcess`` is a name in two published schemas."""
    homes: dict[str, list[Path]] = {}
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(ROOT))
    assert {name for name, paths in homes.items() if len(paths) > 1} == {"OtherProcess"}
