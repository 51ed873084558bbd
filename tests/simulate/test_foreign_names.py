"""A name of TRL, transformers ... that the simulator needs and that is gone ends in one sentence, never in a figure."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memprof.compat import torch as torch_names
from memprof.compat.check import TARGETS
from memprof.compat.features import FEATURES, targets_for
from memprof.compat.targets import Target
from memprof.compat.versions import is_installed
from memprof.errors import UsageError
from tests.compat.removal import remove

for package in ("torch", "transformers", "trl", "peft"):
    pytest.importorskip(package)

SETTINGS: dict[str, dict[str, Any]] = {
    "simulate": {},
    "simulate.lean": {"recipe": "lean"},
    "simulate.fsdp2": {"gpus": 2, "sharding": "fsdp2"},
    "simulate.tp": {"gpus": 2, "sharding": "tp"},
    "simulate.zero": {"gpus": 2, "sharding": "zero3"},
    "simulate.selective": {"gradient_checkpointing": "selective"},
    "simulate.offloaded": {"gradient_checkpointing": "offloaded"},
}
FEATURES_HERE = ("simulate.world", *SETTINGS, "script")


def _cases() -> Iterator[Any]:
    """Each feature with the targets it needs and those of features that it includes and that are no feature here."""
    for feature in FEATURES_HERE:
        names = targets_for(feature) - (set(FEATURES_HERE) - {feature})
        for target in TARGETS:
            if names.intersection(target.needed_by) and is_installed(target.package):
                yield pytest.param(feature, target, id=f"{feature}-{target.module}:{target.path}")


def _enter(feature: str, settings_for: Callable[..., Any], folder: Path) -> None:
    from memprof.simulate.run import simulate, simulate_settings
    from memprof.simulate.script.script import simulate_script

    if feature == "simulate.world":
        simulate(lambda session: pytest.fail("the simulation began"))
    elif feature == "script":
        script = folder / "train.py"
        script.write_text("raise SystemExit('the script began')\n")
        simulate_script(script, [], {})
    else:
        simulate_settings(settings_for(model="no such model: the simulation began", **SETTINGS[feature]))


@pytest.mark.parametrize(("feature", "target"), list(_cases()))
def test_a_simulation_is_refused_before_it_begins(
    feature: str, target: Target, settings_for: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(target, monkeypatch)
    with pytest.raises(UsageError) as refused:
        _enter(feature, settings_for, tmp_path)
    words = str(refused.value)
    assert words.startswith((FEATURES[feature].title, "The simulator was tested with "))  # the general is asked first
    assert target.path in words or "more of its kind)" in words  # another is named first, and this one counted
    assert " that is installed, " in words
    assert words.endswith(".")
    assert "\n" not in words
    assert refused.value.exit_code == 2


def test_settings_enter_what_they_use(settings_for: Callable[..., Any]) -> None:
    from memprof.simulate.run import features_of

    for feature, values in SETTINGS.items():
        assert features_of(settings_for(**values)) == list(dict.fromkeys(["simulate", feature]))
    assert features_of(settings_for(recipe="lean", gpus=2, sharding="fsdp2")) == [*SETTINGS][:3]
    # The lean trainer has techniques of its own for what is kept.
    offloaded = settings_for(recipe="lean", gradient_checkpointing="offloaded")
    assert features_of(offloaded) == ["simulate", "simulate.lean"]


def test_what_only_saves_time_is_noted(settings_for: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from memprof.simulate.run import simulate_settings

    settings = settings_for(generation="none", dtype="bfloat16", mixed_precision="no")
    before = simulate_settings(settings, stacks=False)
    monkeypatch.setitem(vars(torch_names.KEYS_OF), "path", "_keys_that_no_torch_has")
    after = simulate_settings(settings, stacks=False)
    (note,) = set(after["memprof"]["notes"]) - set(before["memprof"]["notes"])
    assert note.startswith("The simulator is about 1.5 times slower: _keys_that_no_torch_has is not in ")
    assert _sizes(after) == _sizes(before)


def _sizes(raw: dict[str, Any]) -> list[tuple[str, int]]:
    return [(event["action"], event["size"]) for event in raw["device_traces"][0]]


def test_what_stands_in_takes_what_the_package_passes(settings_for: Callable[..., Any]) -> None:
    """Inside a simulation every feature can be entered again: a script may build the lean trainer, which checks too."""
    from memprof.compat import require
    from memprof.simulate.run import simulate
    from memprof.simulate.script.run import ScriptRun
    from memprof.simulate.script.world import script_world
    from memprof.simulate.trainer.checkpointing import offloading_to_host
    from memprof.simulate.trainer.kv_caches import modelled_quanto
    from memprof.simulate.trainer.models import load_config
    from memprof.simulate.trainer.trl_on_fakes import trl_on_fakes

    settings = settings_for(recipe="lean")
    entered: list[str] = []

    def check(session: Any) -> None:
        trainer = ScriptRun(Path("train.py"), [], {}, "cuda").trainer
        with (
            trl_on_fakes(settings, load_config(settings.model), session),
            modelled_quanto(),
            offloading_to_host(session),
            script_world(print, {}, lambda _: None),
            trainer.intercepted(session, "", []),
        ):
            for feature in ("lean", *FEATURES_HERE):
                require(feature)
                entered.append(feature)

    simulate(check)
    assert entered == ["lean", *FEATURES_HERE]


# -- in a package of its own -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name", "title"),
    [
        # Each name is taken away in this process above.
        pytest.param("trl/kernels/chunked_logprob.py", "_addmm_fp32", "The simulator", marks=pytest.mark.heavy),
        ("trl/trainer/grpo_trainer.py", "_generate_single_turn", "The simulator"),
        pytest.param(
            "transformers/generation/utils.py", "_has_unfinished_sequences", "The simulator", marks=pytest.mark.heavy
        ),
        pytest.param("accelerate/state.py", "_shared_state", "The simulator", marks=pytest.mark.heavy),
    ],
)
def test_the_command_ends_in_one_sentence(file: str, name: str, title: str, tiny: str, tmp_path: Path) -> None:
    """The installed package with one name changed throughout one file, as its next release might have it."""
    _copy_renamed(file, name, tmp_path)
    command = [sys.executable, "-m", "memprof", "simulate", "--model", tiny, "--num-generations", "2"]
    done = subprocess.run(
        [*command, "--per-device-train-batch-size", "2", "--prompt-length", "8", "--completion-length", "8"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = (line for line in done.stderr.splitlines() if name in line)
    assert f"{title} was tested with " in line
    assert "Traceback" not in done.stderr


def _copy_renamed(file: str, name: str, folder: Path) -> None:
    """Links to every file of an installed package, but for one, which is written anew with the name changed."""
    spec = find_spec(file.partition("/")[0])
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent.parent
    place = Path()
    for part in Path(file).parts:
        for entry in (installed / place).iterdir() if place.parts else ():
            if entry.name not in (part, "__pycache__"):
                (folder / place / entry.name).symlink_to(entry)
        place /= part
        if place != Path(file):
            (folder / place).mkdir()
    text = (installed / file).read_text(encoding="utf-8")
    assert name in text
    (folder / file).write_text(text.replace(name, name + "_renamed"), encoding="utf-8")


# -- the simulator's own sources -------------------------------------------------------------------------------------

_ROOT = Path(__file__).resolve().parents[2] / "memprof"
_SIMULATOR = sorted((_ROOT / "simulate").rglob("*.py"))
_FOREIGN = ("torch", "trl", "transformers", "accelerate", "peft", "datasets", "huggingface_hub", "liger_kernel")


@functools.cache
def _own_names() -> set[str]:
    """Private names that memprof defines or assigns itself."""
    found: set[str] = set()
    for file in _ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


@pytest.mark.parametrize("file", _SIMULATOR, ids=lambda file: str(file.relative_to(_ROOT)))
def test_other_packages_private_names_stand_in_compat_alone(file: Path) -> None:
    declared = {target.name for target in TARGETS if target.name.startswith("_")}
    own = _own_names() - declared
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            found += [] if node.attr in own or ast.unparse(node) == "sys._getframe" else [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and node.value in declared:
            found.append(repr(node.value))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found += [name for name in _imported(node) if "._" in name]
    assert not found


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    names = [module + alias.name for alias in node.names]
    return [name for name in names if name.partition(".")[0] in _FOREIGN]
