"""Versions, sentences and declarations of the check."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memprof.compat import check, require, versions
from memprof.compat.features import FEATURES, Feature
from memprof.compat.optional_packages import ZERO_TARGETS
from memprof.compat.signatures import declared, fits, parameters_of
from memprof.compat.targets import CALLED, REPLACED, Target
from memprof.compat.versions import Range, installed, release
from memprof.errors import UsageError


@pytest.mark.parametrize(
    ("signature", "how", "function", "answer"),
    [
        ("(a, b)", CALLED, lambda a, b: 0, True),
        ("(a, b)", CALLED, lambda a, b, c=1: 0, True),
        ("(a, b)", CALLED, lambda a, b, c: 0, False),
        ("(a, b)", CALLED, lambda b, a: 0, False),
        ("(a, b)", CALLED, lambda a: 0, False),
        ("(a, b)", CALLED, lambda *all: 0, True),
        ("(a, *, b)", CALLED, lambda a, b: 0, True),
        ("(a, *, b)", CALLED, lambda a, **named: 0, True),
        ("(a, *, b)", CALLED, lambda a, c=1: 0, False),
        ("(_, b)", CALLED, lambda anything, b: 0, True),
        ("(a, b)", REPLACED, lambda a, b, c=1: 0, False),
        ("(a, b, **more)", REPLACED, lambda a, b, c: 0, True),
        ("(a, b, **more)", REPLACED, lambda a, c, b: 0, False),
        ("()", CALLED, lambda: 0, True),
        ("()", CALLED, lambda a: 0, False),
        # Written in C: named "object" by Python 3.13, and given by its place alone.
        ("(self, size)", REPLACED, list.append, True),
        ("(self, size, more)", REPLACED, list.append, False),
    ],
)
def test_a_declaration_fits_or_does_not(signature: str, how: str, function: object, answer: bool) -> None:
    parameters = parameters_of(function)
    assert parameters is not None
    assert fits(signature, parameters, how) is answer


def test_a_declaration_is_a_functions_head() -> None:
    with pytest.raises(ValueError, match="no function's head"):
        declared("(a, b")


def test_an_operators_arguments_stand_in_its_schema() -> None:
    torch = pytest.importorskip("torch")
    parameters = parameters_of(torch.ops.aten.addmm.default)
    assert parameters is not None
    assert fits("(self, mat1, mat2, *, beta, alpha)", parameters, CALLED)
    assert not fits("(self, mat1, mat2, *, gamma)", parameters, CALLED)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("1.16", (1, 16)), ("1.16.0", (1, 16)), ("1.17.0.dev0", (1, 17)), ("2.13.0", (2, 13)), ("0.19.1", (0, 19, 1))],
)
def test_versions_are_compared_by_number(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


def test_an_older_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    real = installed
    monkeypatch.setattr(check, "installed", lambda package: "0.29.0" if package == "trl" else real(package))
    with pytest.raises(UsageError) as refused:
        require("lean")
    assert str(refused.value) == (
        "The lean trainer needs TRL 1.16 or later, and 0.29.0 is installed: pip install -U 'trl>=1.16'."
    )


def test_what_watches_works_with_the_same_older_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    real = installed
    monkeypatch.setattr(check, "installed", lambda package: "0.29.0" if package == "trl" else real(package))
    require("callback")


def test_a_package_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = versions.is_installed
    monkeypatch.setattr(check, "is_installed", lambda package: package != "peft" and real(package))
    with pytest.raises(UsageError, match=r"^The simulator needs PEFT, which is not installed: pip install"):
        require("simulate")


def test_importing_the_room_imports_none_of_the_packages() -> None:
    packages = ("torch", "trl", "transformers", "accelerate", "peft", "datasets")
    script = f"import sys, memprof.compat; print([name for name in {packages!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_there_is_no_such_feature() -> None:
    with pytest.raises(KeyError):
        require("flying")


@pytest.fixture
def zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the name of one that is not installed, on disk: the file in which a class is to be written."""
    if versions.is_installed("deepspeed"):
        pytest.skip("the real one is installed, and test_targets.py looks at it")
    folder = tmp_path / "deepspeed" / "runtime" / "zero"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent, folder.parent.parent):
        (place / "__init__.py").write_text("__version__ = '0.99.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield folder / "stage_1_and_2.py"
    for name in set(sys.modules) - before:
        if name.startswith("deepspeed"):
            del sys.modules[name]


_OPTIMIZER = """class DeepSpeedZeroOptimizer:
    def __init__(self):
        self.averaged_gradients = {}
        def later():
            self.bit16_groups_flat = []
        later()
"""


def test_attributes_of_instances_are_found_in_a_packages_code(zero: Path) -> None:
    zero.write_text(_OPTIMIZER)
    assert check.fault_of(ZERO_TARGETS["averaged_gradients"]) is None
    assert check.fault_of(ZERO_TARGETS["bit16_groups_flat"]) is None


def test_an_attribute_that_is_only_read_is_missed(zero: Path) -> None:
    zero.write_text(_OPTIMIZER.replace("self.averaged_gradients = {}", "print(self.averaged_gradients)"))
    fault = check.fault_of(ZERO_TARGETS["averaged_gradients"])
    expected = "DeepSpeedZeroOptimizer.averaged_gradients is not in the DeepSpeed that is installed, 0.99.0"
    assert fault == expected


def test_what_serves_in_a_targets_stead_is_taken(zero: Path) -> None:
    zero.write_text("def newer(): ...\n\nclass Kind:\n    def older(self): ...\n")
    module = "deepspeed.runtime.zero.stage_1_and_2"
    target = Target(module, "newest", or_else=("newer", f"{module}:Kind.older"), needed_by=("run",))
    assert target.get() is sys.modules[module].newer
    assert target.place() == (sys.modules[module], "newer")
    del sys.modules[module].newer
    assert target.get() is sys.modules[module].Kind.older


def test_watching_imports_nothing(zero: Path) -> None:
    zero.write_text("raise SystemExit('imported')\n")
    check.missing("callback")
    assert "deepspeed" not in sys.modules


def test_a_trainer_of_another_kind_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    from transformers import Trainer

    monkeypatch.delattr(grpo.GRPOTrainer, "_calculate_rewards")
    assert check.missing("callback", of=Trainer.__new__(Trainer)) == []
    (note,) = check.missing("callback", of=grpo.GRPOTrainer.__new__(grpo.GRPOTrainer))
    assert note.startswith("Phase reward cannot be marked: GRPOTrainer._calculate_rewards is not in the TRL that is ")


def test_an_attribute_that_the_trainer_has_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift deletes the constructor of TRL's trainer, and assigns the attributes in its own."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    monkeypatch.delattr(grpo.GRPOTrainer, "__init__")
    trainer = grpo.GRPOTrainer.__new__(grpo.GRPOTrainer)
    assert any("reward models" in note for note in check.missing("callback", of=trainer))
    for name in ("ref_model", "reward_funcs", "_buffered_inputs", "_step", "num_iterations", "llm"):
        setattr(trainer, name, None)
    assert check.missing("callback", of=trainer) == []


def test_the_sentence_says_what_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    monkeypatch.delattr(grpo.GRPOTrainer, "_generate_single_turn")
    monkeypatch.setitem(
        FEATURES, "lean", Feature("The lean trainer", {**FEATURES["lean"].tested, "trl": Range("1.16", "1.99")})
    )
    with pytest.raises(UsageError) as refused:
        require("lean")
    assert str(refused.value) == (
        "The lean trainer was tested with TRL 1.16 to 1.99; GRPOTrainer._generate_single_turn is not in the TRL that "
        f"is installed, {installed('trl')}."
    )


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """The installed TRL was blamed: "GRPOTrainer.__init__ is not in the TRL that is installed"."""
    (tmp_path / "torch").mkdir()
    broken = 'raise OSError("libcudart.so.13: cannot open shared object file: No such file or directory")'
    (tmp_path / "torch" / "__init__.py").write_text(broken)
    command = [sys.executable, "-m", "memprof", "simulate", "--model", "Qwen/Qwen2.5-0.5B-Instruct"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode in (2, 3)
    assert "needs PyTorch, which is installed and cannot be imported" in done.stderr
    assert "libcudart.so.13" in done.stderr
    assert "Traceback" not in done.stderr
    assert "is not in the TRL" not in done.stderr


def test_a_method_that_the_script_replaced_is_not_blamed_on_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")

    def mine(self: Any, prompts: Any) -> Any:
        return self, prompts

    monkeypatch.setattr(grpo.GRPOTrainer, "_generate_single_turn", mine)
    with pytest.raises(UsageError) as refused:
        require("lean")
    said = str(refused.value)
    assert said.endswith(f"_generate_single_turn(self, prompts): {__name__} has replaced that function.")
    assert "installed" not in said
