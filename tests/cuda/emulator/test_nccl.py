"""NCCL between two processes, each on its own emulated GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.emulate.launch import environment

pytest.importorskip("torch")
PROGRAMS = Path(__file__).parent / "programs"


def test_collectives_ddp_and_fsdp_on_two_ranks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", PROGRAMS / "collectives.py"]
    done = subprocess.run(command, env=environment("24GiB", devices=2), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):  # both write to one pipe, at times into one line
        assert done.stdout.count(f"rank {rank} has seen all") == 1


def test_nccl_within_one_process_is_refused_by_name() -> None:
    code = (
        "import torch\n"
        "try: torch.cuda.nccl.all_reduce([torch.ones(4, device=f'cuda:{i}') for i in range(2)])\n"
        "except RuntimeError as error: print(error)"
    )
    env = environment("24GiB", devices=2)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "NCCL between the devices of one process is not emulated" in done.stdout


def test_two_ranks_on_one_card_are_refused_as_nccl_does(tmp_path: Path) -> None:
    script = tmp_path / "one_card.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "dist.all_reduce(torch.ones(4, device='cuda:0'))\n"
        "print('summed')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", script]
    env = environment("24GiB", devices=2)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "summed" not in done.stdout
    assert "ncclInvalidUsage" in done.stderr
    # torchrun may end one rank before it has said it.
    assert re.search(r"Duplicate GPU detected : rank (0 and rank 1|1 and rank 0) both on CUDA device 1000", done.stderr)
