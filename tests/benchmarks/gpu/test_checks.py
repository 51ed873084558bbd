"""The GPU checks' script, as far as it can run without one."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
import torch

pytest.importorskip("trl")

from benchmarks.gpu import checks, real_run
from benchmarks.gpu.bare import without_key
from benchmarks.gpu.cases import SIMULATED, TRUTH, Case, shrunk
from benchmarks.gpu.run import device
from benchmarks.lean import fused_loss
from memprof.cli.commands.simulate import command as simulate
from memprof.cli.simulation_options import settings_of
from memprof.config.settings import Settings, read_settings
from memprof.errors import UnsafePickle
from memprof.simulate.trainer.build import adapter_of
from memprof.snapshot.unpickle import read_plain
from memprof.snapshot.writer import save_snapshot

# Seconds that a write is slowed down to: several times what a step of the shrunk model takes on a busy machine.
WRITING = 8

no_gpu = pytest.mark.skipif(device()["device"] != "cpu", reason="there is a GPU here")


@no_gpu
def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    told = subprocess.run([sys.executable, "-m", "benchmarks.gpu.run"], capture_output=True, text=True)
    assert told.returncode == 1
    assert "No GPU was found" in told.stderr
    assert not told.stdout


def test_the_cases_are_told_apart_by_name() -> None:
    names = [case.name for case in (*TRUTH, *SIMULATED)]
    assert len(set(names)) == len(names)


@no_gpu
@pytest.mark.heavy
def test_a_run_is_held_to_its_closed_forms_and_to_the_unwatched_run() -> None:
    told = checks._truth(shrunk(TRUTH[2]), tiny=True)
    assert "error" not in told
    assert told["losses_equal"]
    assert told["parameters_equal"]
    assert told["categories_add_up"]
    assert told["unattributed_share"] < 0.01
    over = told["own_over_closed_form"]
    assert over["weights"] == pytest.approx(1, abs=1e-6)
    assert over["adapters"] == pytest.approx(1, abs=1e-6)
    assert 1 <= over["optimizer_state"] < 1.01
    assert 1 <= over["kv_cache"] < 1.5  # two layers: the copy made while it grows is a quarter


@no_gpu
@pytest.mark.heavy
def test_a_steps_seconds_leave_out_what_is_written_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing is slowed down: training waits for it at the next step's beginning, and no step is the longer for it."""
    from memprof.recording.session import Session

    write = Session.write

    def slow(self: Session, path: Any) -> Path:
        time.sleep(WRITING)
        return write(self, path)

    monkeypatch.setattr(Session, "write", slow)
    case = shrunk(TRUTH[2])
    told = real_run.execute(case.settings.to_dict(), True, steps=real_run.RECORDED + 1, watch="one")
    assert told["error"] is None
    assert len(told["step_seconds"]) == len(told["held_seconds"]) == 4
    assert max(told["step_seconds"]) < WRITING
    assert max(told["held_seconds"][:3]) < WRITING < told["held_seconds"][3]
    assert WRITING < told["dump_seconds"]["written"] <= told["dump_seconds"]["reported"]


def test_a_bare_copy_lacks_only_memprofs_key_and_no_global_is_read(tmp_path: Path) -> None:
    data = {"segments": [], "device_traces": [[{"action": "alloc", "addr": 4096, "size": 512, "stream": 0}]]}
    whole = save_snapshot({**data, "memprof": {"version": 1}}, tmp_path / "run.pickle")
    bare = without_key(whole)
    assert bare.parent == tmp_path
    assert read_plain(bare) == data
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps({"memprof": Path}))
    with pytest.raises(UnsafePickle):
        without_key(tmp_path / "bad.pickle")


@pytest.mark.parametrize("failing", ["record", "none"])
def test_a_run_that_fails_proves_nothing(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures have equal losses, namely none."""

    def run(case: Case, tiny: bool, watch: str = "none", **_: Any) -> dict[str, Any]:
        return {"error": "it broke" if watch == failing else None, "losses": []}

    monkeypatch.setattr(checks, "run", run)
    assert checks._truth(TRUTH[0], tiny=True) == {"case": TRUTH[0].name, "error": "it broke"}


def test_a_shrunk_case_is_the_same_kind_of_run() -> None:
    case = Case("x", TRUTH[0].settings)
    assert shrunk(case).settings.device == "cpu"
    assert shrunk(case).settings.beta == case.settings.beta


@pytest.mark.parametrize("case", TRUTH, ids=lambda case: case.name)
def test_the_real_run_trains_what_the_simulator_does(case: Case) -> None:
    adapter = adapter_of(case.settings)
    assert (adapter is None) == (case.settings.lora_r is None)
    if adapter is not None:
        assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (16, 32, "all-linear")


# -- command lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [True, False], ids=["tiny", "full"])
@pytest.mark.parametrize("name", list(checks.CHECKS))
def test_what_a_check_runs_is_understood_by_what_it_calls(
    name: str, tiny: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command line of every check goes through the real parser; nothing is executed."""
    called: list[str] = []

    def parsed(command: list[str], **_: Any) -> Any:
        called.append(module := _understood(command))
        told = _STAND_INS[module]
        return subprocess.CompletedProcess(command, 0, told, "")

    monkeypatch.setattr(checks.subprocess, "run", parsed)
    told = checks.CHECKS[name](tiny)
    assert set(called) == _CALLED[name]
    assert "Error" not in json.dumps(told)


_CALLED = {
    "callback": {"benchmarks.gpu.real_run"},
    "simulator": {"benchmarks.gpu.real_run", "memprof"},
    "cost": {"benchmarks.gpu.real_run"},
    "lean": {"benchmarks.gpu.real_run"},
    "oom": {"benchmarks.gpu.real_run"},
    "kernel": {"benchmarks.lean"},
}
_STAND_INS = {
    "benchmarks.gpu.real_run": "RESULT "
    + json.dumps({"losses": [], "step_seconds": [1.0] * 4, "allocated_bytes": 8, "error": None}),
    "benchmarks.lean": "{}",
    "memprof": '{"peak": {"allocated_bytes": 8, "categories": {}}}',
}


def _understood(command: list[str]) -> str:
    """The module a command line starts; fails where its arguments would be refused."""
    python, flag, module, *arguments = command
    assert (python, flag) == (sys.executable, "-m")
    if module == "benchmarks.gpu.real_run":
        asked = inspect.signature(real_run.execute).bind(**json.loads(*arguments)).arguments
        settings = Settings(**{**asked["settings"], "lora_target_modules": ("all-linear",)})
        real_run.watcher(asked.get("watch", "none"), Path("unused"))
        assert settings.to_dict() == asked["settings"]
    elif module == "benchmarks.lean":
        assert arguments[0] == "fused-loss"
        fused_loss.main.make_context(module, arguments[1:])
    else:
        assert (module, arguments[0]) == ("memprof", "simulate")
        given = simulate.make_context("simulate", arguments[1:]).params
        known = set(json.loads(given["config_file"].read_text()))
        assert set(read_settings(given["config_file"])) == known
        settings_of(given["config_file"], {}, device=given["device"])
    return module


_ASKED = {"settings": TRUTH[0].settings.to_dict(), "shrink": True}


@pytest.mark.parametrize(
    "command",
    [
        ["benchmarks.lean", "fused-loss", "--tiny"],
        ["benchmarks.lean", "fused-loss", "--device", "gpu"],
        ["benchmarks.gpu.real_run", json.dumps({**_ASKED, "step": 3})],
        ["benchmarks.gpu.real_run", json.dumps({**_ASKED, "watch": "recorded"})],
        ["memprof", "simulate", "--devices", "cpu"],
    ],
)
def test_a_wrong_flag_is_noticed(command: list[str]) -> None:
    with pytest.raises((click.UsageError, TypeError, KeyError)):
        _understood([sys.executable, "-m", *command])


def test_the_kernel_is_asked_for_every_size_there_is_to_check() -> None:
    sizes = [(s["tokens"], s["vocabulary"], s["hidden"]) for s in checks.kernel_sizes(tiny=False)]
    assert sizes == [(n, v, h) for n in (8192, 65536) for v in (128256, 151936) for h in (2048, 4096)]


@pytest.mark.heavy
def test_the_kernels_tiny_form_runs_here() -> None:
    told = checks.fused_kernel(tiny=True)
    (row,) = told["runs"]
    for head, products in (("frozen_head", 2), ("trainable_head", 3)):
        measured = dict(row[head])
        if find_spec("liger_kernel") is None:
            assert measured.pop("liger") == {"error": "not run: liger-kernel is not installed"}
            assert told["not_run"].pop(f"liger, {head}: not run: liger-kernel is not installed") == 1
        assert {"trl", "plain", "in_backward", "in_forward"} <= set(measured)
        assert measured["trl"]["products"] == measured["in_backward"]["products"] == products + 1
        assert measured["plain"]["products"] == measured["in_forward"]["products"] == products
        assert all(path["peak_bytes"] > 0 and path["seconds_median"] >= 0 for path in measured.values())
    assert not told["not_run"]
    for path, error in row["bf16_error"].items():
        # Bfloat16 rounds to 1 in 256; the same gradient by every path, so that they do the same work.
        assert 0 < error["hidden_gradient"] < 0.005, path
        assert 0 < error["head_gradient"] < 0.01, path
        assert path == "liger" if error["logps"] is None else 0 < error["logps"] < 0.005


def test_a_path_that_runs_out_of_memory_leaves_its_reason_and_the_others_their_rows() -> None:
    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37.11 GiB.\nMore that nobody needs.")

    tensors = fused_loss.inputs(16, 8, 32, torch.float32, True, "cpu")
    rows = fused_loss.compared({"plain": too_large, "trl": fused_loss.paths()["trl"]}, tensors, 1)
    assert rows["plain"] == {"error": "not run: CUDA out of memory. Tried to allocate 37.11 GiB."}
    assert rows["trl"]["seconds_over_trl"] == 1
    rows = fused_loss.compared({"trl": too_large, "plain": fused_loss.paths()["plain"]}, tensors, 1)
    assert "seconds_over_trl" not in rows["plain"]
    assert rows["plain"]["seconds_median"] > 0


def test_a_size_whose_process_fails_counts_as_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "it broke")
    monkeypatch.setattr(checks.subprocess, "run", lambda *_, **__: failed)
    told = checks.fused_kernel(tiny=False)
    assert {row["error"] for row in told["runs"]} == {"it broke"}
    rows = product(fused_loss.PATHS, fused_loss.HEADS)
    assert told["not_run"] == {f"{path}, {head}: no such row": 8 for path, head in rows}
