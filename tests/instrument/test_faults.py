"""Every way a run can end badly: what is left on disk, what is said, how it ends. docs/oom.md has the table."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof import analyze
from memprof.frame_paths import own_folders
from memprof.snapshot import load_snapshot
from memprof.vocabulary import Category, phase_words
from tests.instrument.programs import LOOP, left_in, loop_that, python, signalled, wait_for

RUN = ("-m", "memprof", "run", "--no-table")
FIRST = "step-000001.rank-0"
WAIT = "print('ready', flush=True)\ntime.sleep(30)"
# One call into C: Python runs no signal handler before it returns.
IN_C = "print('ready', flush=True)\nsum(range(100_000_000))\ntime.sleep(30)"
HOLDS = {"weights", "optimizer_state"}


def script(folder: Path, does: str) -> str:
    (folder / "train.py").write_text(loop_that(does))
    return "train.py"


def names_our_files(text: str) -> bool:
    return any(f'"{folder}' in text for folder, _ in own_folders())


def readable(folder: Path, rank: int = 0) -> dict[str, Any]:
    """The recording is whole, and nothing unfinished lies beside it."""
    assert not [name for name in left_in(folder) if name.endswith((".tmp", ".part"))], left_in(folder)
    snapshot = load_snapshot(folder / f"step-000001.rank-{rank}.pickle")
    assert {mark.step for mark in snapshot.run.phases} >= {1}
    report = folder / f"step-000001.rank-{rank}.json"
    return json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.parametrize(
    "in_c", [pytest.param(False, id="waiting", marks=pytest.mark.heavy), pytest.param(True, id="in C")]
)
def test_sigterm(tmp_path: Path, in_c: bool) -> None:
    name = script(tmp_path, IN_C if in_c else WAIT)
    report = ["--no-report"] if in_c else []
    code, _, err = signalled([*RUN, *report, name], tmp_path, lambda p: p.terminate(), "ready")
    assert code == -signal.SIGTERM, err
    found = readable(tmp_path / "_memprof")
    if not in_c:
        assert set(found["own_peaks"]) >= HOLDS
        assert "report.html" in err


def test_a_scripts_own_handler_is_left_alone(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n" + WAIT
    # Set before anything is recorded, as scripts do.
    (tmp_path / "train.py").write_text(
        f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n{loop_that(body)}"
    )
    code, _, _ = signalled([*RUN, "--no-report", "train.py"], tmp_path, lambda p: p.terminate(), "ready")
    assert code == 5
    readable(tmp_path / "_memprof")


def test_ctrl_c_once_and_twice(tmp_path: Path) -> None:
    name = script(tmp_path, WAIT)
    code, _, err = signalled([*RUN, name], tmp_path, lambda p: p.send_signal(signal.SIGINT), "ready")
    assert code == -signal.SIGINT
    assert readable(tmp_path / "_memprof")
    assert err.count("KeyboardInterrupt") == 1
    shutil.rmtree(tmp_path / "_memprof")

    def twice(process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGINT)
        wait_for(tmp_path / "_memprof" / f"{FIRST}.pickle")
        process.send_signal(signal.SIGINT)

    code, _, err = signalled([*RUN, name], tmp_path, twice, "ready")
    assert code == -signal.SIGINT
    readable(tmp_path / "_memprof")
    assert err.count("Traceback") == 1  # the script's own


def test_host_memory_error(tmp_path: Path) -> None:
    name = script(tmp_path, "import numpy\nnumpy.empty(2**57)")
    done = python(*RUN, "--no-report", name, cwd=tmp_path)
    assert done.returncode == 1
    assert "MemoryError: Unable to allocate 1.00 EiB" in done.stderr
    assert not names_our_files(done.stderr)
    readable(tmp_path / "_memprof")


def test_out_of_memory_ends_with_ten_lines_below_the_scripts_traceback(tmp_path: Path) -> None:
    name = script(tmp_path, "model.register_forward_pre_hook(lambda *_: torch.empty(2**30, dtype=torch.uint8))")
    done = python(*RUN, "--capacity", "1GiB", name, cwd=tmp_path)
    assert done.returncode == 1
    above, _, below = done.stderr.partition("memprof: Out by ")
    assert " in forward, step 2. " in below.splitlines()[0]
    assert "torch.OutOfMemoryError: CPU out of memory. Tried to allocate 1.00 GiB" in above
    assert not names_our_files(above)
    lines = below.strip().splitlines()
    assert 5 <= len(lines) <= 9
    assert "train.py" in below
    assert lines[-1].endswith("report.html")
    assert readable(tmp_path / "_memprof")["oom"]["phase"] == "forward"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting needs root")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=False)


def test_a_full_disk_costs_a_warning_and_leaves_what_fitted(tmp_path: Path, small_disk: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    done = python(*RUN, "--out", str(small_disk), "--steps", "1,3", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["1", "2", "3", "4"]
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    readable(small_disk)
    for path in small_disk.glob("*.pickle"):
        load_snapshot(path)
    for path in small_disk.glob("*.json"):
        json.loads(path.read_text())


RANKS = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 4):
    if step == 3 and dist.get_rank() == 1 and "kill" in sys.argv:
        # torchrun ends rank 0 as soon as rank 1 is gone: not before rank 0 has written its first step, which it does
        # as its second begins. In that second step both ranks meet, so a kill in it would wait for gloo's timeout.
        until = time.monotonic() + 60
        while not os.path.exists("_memprof/step-000001.rank-0.pickle") and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "ranks.py").write_text(RANKS)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    return python(*torchrun, *RUN, "--no-report", "ranks.py", *arguments, cwd=folder)


@pytest.mark.heavy  # the killed rank's companion below is such a run; tests/integrations/test_ranks.py has two
def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    done = launched(tmp_path)
    if "terminate called without an active exception" in done.stderr:
        # Now and then a rank of torch's gloo aborts as its interpreter ends, all work done.
        (tmp_path := tmp_path / "again").mkdir()
        done = launched(tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        holds_a_rank(tmp_path / "_memprof", rank)


def holds_a_rank(folder: Path, rank: int) -> None:
    readable(folder, rank)
    found = analyze(folder / f"step-000001.rank-{rank}.pickle")
    assert (found.snapshot.run.rank, found.snapshot.run.world_size) == (rank, 2)
    assert found.own_peaks["weights"] == (64 * 64 + 64) * 4


def test_a_killed_rank_leaves_the_others_readable(tmp_path: Path) -> None:
    done = launched(tmp_path, "kill")
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr or "exitcode  : -9" in done.stderr
    holds_a_rank(tmp_path / "_memprof", 0)
    assert not [name for name in left_in(tmp_path / "_memprof") if "rank-1" in name]


# -- out of memory in each phase of a real trainer -------------------------------------------------------------


@pytest.mark.trl
@pytest.mark.parametrize("where", ["generate", "forward", "backward", "optimizer_step"])
def test_out_of_memory_in_every_phase_of_grpo(
    tmp_path: Path, where: str, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    from memprof import MemProfCallback
    from tests.integrations.runs import checkpoint, grpo

    callback = MemProfCallback(tmp_path / "r", capacity="2GiB", table=False)
    trainer = grpo(checkpoint(tmp_path_factory.getbasetemp()), tmp_path / "a", [callback], max_completion_length=4)
    reached = []

    def grow(*_: Any) -> None:
        if trainer.state.global_step == 1:
            reached.append(where)
            torch.empty(2**31, dtype=torch.uint8)

    parameter = next(trainer.model.parameters())
    handles = []
    if where == "backward":
        handles.append(parameter.register_hook(grow))
    elif where == "optimizer_step":
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        handles.append(register_optimizer_step_pre_hook(grow))
    else:
        handles.append(
            trainer.model.register_forward_pre_hook(
                lambda *_: grow() if torch.is_grad_enabled() == (where == "forward") else None
            )
        )
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB") as caught:
            trainer.train()
    finally:
        for handle in handles:
            handle.remove()
    assert reached == [where]
    assert type(caught.value) is torch.OutOfMemoryError
    (path,) = callback.result.snapshots
    assert path.name == "step-000002.rank-0.pickle"
    oom = callback.result.reports[path].oom
    assert oom is not None
    assert (oom.phase, oom.step, oom.requested_bytes) == (where, 2, 2**31)
    assert oom.categories is not None
    assert oom.categories[Category.WEIGHTS] == sum(
        t.nbytes for t in [*trainer.model.parameters(), *trainer.model.buffers()]
    )
    assert callback.result.page is not None
    lines = capfd.readouterr().err.strip().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("memprof: Out by "))
    assert f" in {phase_words(where)}, step 2. " in lines[at]
    assert "2.00 GiB" in lines[at + 1]
    assert lines[at + 2].strip().startswith("by ")
    assert len(lines) - at <= 10
