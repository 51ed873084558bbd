"""What is installed is what is in the tree: every package, rule file, template, asset and schema."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from memprof.compat.versions import EXECUTING, WATCHING

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
MAPPED = {"integrations": "memprof.integrations", "reports": "memprof.reports"}
SOURCES = ("memprof", *MAPPED)
EXTENSIONS = {ROOT / "memprof" / "_native" / name for name in ("replay.c", "scan.c")}


def packages_in_tree() -> set[str]:
    """Import names of all folders that hold an ``__init__.py``."""
    names = set()
    for top in SOURCES:
        for init in (ROOT / top).rglob("__init__.py"):
            relative = init.parent.relative_to(ROOT).as_posix().replace("/", ".")
            names.add(relative.replace(top, MAPPED.get(top, top), 1))
    return names


def is_compiled(name: str) -> bool:
    return name.endswith((".so", ".pyd"))


def files_in_tree() -> set[str]:
    """Every file of the package, what is compiled left out, under the path it has once installed."""
    files = set()
    for top in SOURCES:
        for path in (ROOT / top).rglob("*"):
            built = path in EXTENSIONS or is_compiled(path.name)
            if path.is_file() and "__pycache__" not in path.parts and not built:
                relative = path.relative_to(ROOT).as_posix()
                files.add(relative.replace(top, MAPPED.get(top, top).replace(".", "/"), 1))
    return files


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that no build folder is left in the tree."""
    tree = tmp_path_factory.mktemp("sources")
    for name in (*SOURCES, "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.pyd"))
        else:
            shutil.copy(source, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = (tree / "dist").glob("*.whl")
    return path


def test_package_list_is_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert set(settings["packages"]) == packages_in_tree()
    assert settings["package-dir"] == {name: folder for folder, name in MAPPED.items()}


def test_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = {name for name in inside if is_compiled(name)}
    assert inside - compiled == files_in_tree()
    assert len(compiled) == len(EXTENSIONS) * (shutil.which("cc") is not None)


def test_wheel_holds_what_code_reads_at_run_time(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    data = (
        "memprof/advice/changes.toml",
        "memprof/analysis/published_tables.toml",
        "memprof/attribution/inferred.toml",
        "memprof/attribution/rules.toml",
        "memprof/reports/theme.toml",
        "memprof/oom/knowledge/host.toml",
        "memprof/packages.toml",
    )
    for needed in ("memprof/py.typed", *data):
        assert needed in names
    assert any(name.startswith("memprof/reports/templates/") for name in names)
    assert any(name.startswith("memprof/reports/scripts/") for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_constraints_pin_every_named_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("dev", "docs", "trl", "record", "torch")
    wanted = [*project["dependencies"], *(d for extra in extras for d in optional(project, extra))]
    current = [d for d in wanted if not d.startswith("grpo-memprof") and "python_version <" not in d]
    names = {d.split(">")[0].strip() for d in current}
    assert names <= pinned


def test_extras_ask_for_the_versions_that_are_checked_when_a_feature_is_entered() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, versions in (("record", WATCHING), ("trl", EXECUTING)):
        wanted = {d.split(";")[0] for d in optional(project, extra)}
        assert wanted == {f"{name}>={tested.minimum}" for name, tested in versions.items()}


def optional(project: dict[str, dict[str, list[str]]], extra: str) -> list[str]:
    return project["optional-dependencies"][extra]


@pytest.mark.slow
def test_wheel_works_without_torch(wheel: Path, tmp_path: Path) -> None:
    """In an environment that holds only the core dependencies, ``memprof report`` reads a snapshot."""
    python = core_environment(tmp_path / "venv", wheel)
    absent = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, cwd=tmp_path)
    assert "No module named 'torch'" in absent.stderr
    subprocess.run([python, "-c", WRITE_SNAPSHOT], check=True, cwd=tmp_path)
    command = [python, "-m", "memprof", "report", "tiny.pickle", "--format", "json", "-o", "tiny.html"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"active_bytes": 1024' in done.stdout
    assert "<html" in (tmp_path / "tiny.html").read_text(encoding="utf-8")


def core_environment(folder: Path, wheel: Path) -> str:
    """A new environment with the wheel and, linked from this one, nothing but its core dependencies."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip())
    zipfile.ZipFile(wheel).extractall(site)
    here = Path(subprocess.run([sys.executable, "-c", find], capture_output=True, text=True, check=True).stdout.strip())
    for name in CORE_MODULES:
        for found in here.glob(name):
            (site / found.name).symlink_to(found)
    return python


# Import names of the core dependencies and of what they need in turn.
CORE_MODULES = (
    *("click", "detect_secrets", "markdown_it", "mdurl", "msgspec", "numpy", "numpy.libs", "pygments", "rich"),
    *("_plotly_utils", "narwhals", "packaging", "plotly"),
    *("certifi", "charset_normalizer", "idna", "requests", "tomli", "urllib3", "yaml"),
    *(f"{name}-*.dist-info" for name in ("click", "detect_secrets", "msgspec", "numpy", "plotly", "rich")),
)

WRITE_SNAPSHOT = """
import pickle
frames = [{"filename": "train.py", "line": 3, "name": "step"}]
event = {"addr": 4096, "size": 1024, "stream": 0, "frames": frames}
block = {"address": 4096, "size": 1024, "requested_size": 1024, "state": "active_allocated", "frames": frames}
free = {"address": 5120, "size": 2096128, "requested_size": 0, "state": "inactive", "frames": []}
segment = {"device": 0, "address": 4096, "total_size": 2097152, "allocated_size": 1024, "active_size": 1024,
           "requested_size": 1024, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0),
           "is_expandable": False, "frames": frames, "blocks": [block, free]}
segment_event = {"action": "segment_alloc", "addr": 4096, "size": 2097152, "stream": 0, "frames": frames, "time_us": 1}
trace = [segment_event, {**event, "action": "alloc", "time_us": 2}]
with open("tiny.pickle", "wb") as file:
    pickle.dump({"segments": [segment], "device_traces": [trace], "allocator_settings": {}}, file)
"""
