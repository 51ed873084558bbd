"""``memprof emulate -- command``: an unchanged script, recorded, cut short, reported as what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[3]


def emulate(*arguments: str | Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as from a shell: with nothing of this process's emulated device in its environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MEMPROF_EMULATE_")}
    command = [sys.executable, "-m", "memprof", "emulate", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env={**clean, **env}, capture_output=True, text=True, timeout=300)


def test_a_loop_is_recorded_and_ended_after_its_steps(tmp_path: Path) -> None:
    done = emulate("--gpu", "4090", "--", "python", PROGRAMS / "loop.py", "an argument", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["step 1 ['an argument'] True"]
    assert "memprof emulate: ended after 2 steps (--steps); the rest of the script was not run." in done.stderr
    assert "on an emulated device: memory is real, kernels and times are not" in " ".join(done.stderr.split())
    subprocess.run(
        [sys.executable, "-m", "memprof", "report", "step-000001.rank-0.pickle", "--json", "r.json"],
        cwd=tmp_path / "_memprof_emulated", check=True, capture_output=True,
    )  # fmt: skip
    report = json.loads((tmp_path / "_memprof_emulated" / "r.json").read_text())
    assert report["source"]["device_name"] == "RTX 4090 (emulated)"
    assert any("no kernel ran" in note for note in report["notes"])
    page = (tmp_path / "_memprof_emulated" / "report.html").read_text()
    assert "on an emulated device" in page


def test_a_script_runs_to_its_end_when_asked(tmp_path: Path) -> None:
    done = emulate("--steps", "0", "--out", "there", "--", "python", PROGRAMS / "loop.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the end"
    assert (tmp_path / "there" / "report.html").exists()


def test_the_exit_code_and_streams_are_the_command_s(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys, torch\nprint(torch.cuda.get_device_name()); sys.exit(7)\n")
    done = emulate("--", "python", script, folder=tmp_path)
    assert (done.returncode, done.stdout) == (7, "H100 (emulated)\n")
    assert not (tmp_path / "_memprof_emulated").exists()


def test_a_sitecustomize_of_one_s_own_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    (tmp_path / "x.py").write_text("import sitecustomize\nprint(sitecustomize.__file__)\n")
    done = emulate("--", "python", "x.py", folder=tmp_path, PYTHONPATH=str(tmp_path))
    # memprof's own Python says it first, then the script's.
    assert done.stdout.splitlines() == ["mine", "mine", str(tmp_path / "sitecustomize.py")]


def test_a_trainer_under_torchrun_is_recorded_on_both_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.integrations import runs\n"
        "here = Path(__file__).parent\n"
        "trainer = runs.grpo(runs.checkpoint(here), here / 'out', use_cpu=False, max_steps=50, save_strategy='steps',"
        " save_steps=1)\ntrainer.train()\nprint('saved')\n"
    )
    arguments = ["--gpu", "24GB", "--devices", "2", "--steps", "1", "--"]
    launcher = ["torchrun", "--nproc_per_node", "2"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = emulate(*arguments, *launcher, script, folder=tmp_path, **env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the script's lines after train() were not run" in done.stderr
    assert "saved" not in done.stdout
    assert not list((tmp_path / "out").glob("checkpoint*"))
    (path,) = (tmp_path / "_memprof_emulated").glob("*.ranks.json")
    report = json.loads(path.read_text())
    assert [row["device_name"] for row in report["ranks"]] == ["24GB (emulated)"] * 2
    assert report["peak"]["phase"] == "backward"
