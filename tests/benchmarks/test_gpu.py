"""The GPU checks' script, as far as it can run without one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from benchmarks.gpu import checks
from benchmarks.gpu.bare import without_key
from benchmarks.gpu.cases import SIMULATED, TRUTH, Case, shrunk
from benchmarks.gpu.run import device
from memprof.errors import UnsafePickle
from memprof.simulate.trl_recipe import adapter_of
from memprof.snapshot import save_snapshot
from memprof.snapshot.unpickle import read_plain

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
def test_a_run_is_held_to_its_closed_forms_and_to_the_unwatched_run() -> None:
    told = checks._truth(shrunk(TRUTH[2]), tiny=True)
    assert told["losses_equal"]
    assert told["parameters_equal"]
    assert told["categories_add_up"]
    assert told["unattributed_share"] < 0.01
    over = told["own_over_closed_form"]
    assert over["weights"] == pytest.approx(1, abs=1e-6)
    assert over["adapters"] == pytest.approx(1, abs=1e-6)
    assert 1 <= over["optimizer_state"] < 1.01
    assert 1 <= over["kv_cache"] < 1.5  # two layers: the copy made while it grows is a quarter


def test_a_bare_copy_lacks_only_memprofs_key_and_no_global_is_read(tmp_path: Path) -> None:
    data = {"segments": [], "device_traces": [[{"action": "alloc", "addr": 4096, "size": 512, "stream": 0}]]}
    whole = save_snapshot({**data, "memprof": {"version": 1}}, tmp_path / "run.pickle")
    bare = without_key(whole)
    assert bare.parent == tmp_path
    assert read_plain(bare) == data
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps({"memprof": Path}))
    with pytest.raises(UnsafePickle):
        without_key(tmp_path / "bad.pickle")


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
