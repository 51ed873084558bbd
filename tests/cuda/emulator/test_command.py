"""``memprof emulate -- command``: an unchanged script, recorded, cut short, reported as what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.emulate.launch import environment

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


_TOO_LARGE = "import torch\nheld = [torch.empty(2**30, dtype=torch.uint8, device='cuda') for _ in range(40)]\n"


@pytest.mark.parametrize("by", ["emulate", "run"])
def test_memory_that_runs_out_before_any_forward_is_recorded(by: str, tmp_path: Path) -> None:
    (tmp_path / "load.py").write_text(_TOO_LARGE)
    if by == "emulate":
        done = emulate("--gpu", "24GiB", "--out", "out", "--", "python", "load.py", folder=tmp_path)
    else:
        command = [sys.executable, "-m", "memprof", "run", "--out", "out", "load.py"]
        env = environment("24GiB")
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "torch.OutOfMemoryError" in done.stderr
    assert "Out of memory in load: 1.00 GiB were asked for" in done.stderr
    report = json.loads((tmp_path / "out" / "step-000000.rank-0.json").read_text())
    held = report["peak"]["allocated_bytes"]
    assert held % 2**30 == 0
    assert held + 2 * 2**30 > report["source"]["device_total_bytes"]
    assert report["oom"]["requested_bytes"] == 2**30
    assert sum(report["peak"]["categories"].values()) == report["peak"]["active_bytes"]
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_script_that_goes_on_finds_the_history_as_it_left_it(tmp_path: Path) -> None:
    """Memory that ran out and was caught while loading leaves no page; a script's own history stays on."""
    (tmp_path / "goes_on.py").write_text(
        "import sys, torch\n"
        "own = sys.argv[1] == 'own'\n"
        "model = torch.nn.Linear(64, 64).cuda()\n"
        "if own: torch.cuda.memory._record_memory_history(max_entries=1000)\n"
        "try: torch.empty(2**37, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError: pass\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(8, 64, device='cuda')).sum().backward()\n"
        "    optimizer.step(), optimizer.zero_grad()\n"
        "print(torch._C._cuda_isHistoryEnabled(), len(torch.cuda.memory._snapshot()['device_traces'][0]) > 20)\n"
    )
    for own, says in (("own", "True True"), ("not", "False False")):
        done = emulate("--steps", "0", "--out", own, "--", "python", "goes_on.py", own, folder=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"{says}\n"), done.stderr[-2000:]
        assert not (tmp_path / own / "step-000000.rank-0.pickle").exists()
        assert (tmp_path / own / "step-000001.rank-0.pickle").is_file()


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
