"""Two ranks that count their memory: what ``tests/integrations/test_tracking.py`` starts."""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

import torch

from memprof import MemProfCallback
from tests.forked import write_and_leave
from tests.integrations.runs import plain


def main() -> None:
    faulthandler.dump_traceback_later(60, exit=True)  # where it stands, should it ever wait for ever
    torch.set_num_threads(1)
    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    trainer = plain(model, folder / "out", [MemProfCallback(report=False, steps=[2])])
    ballast = torch.ones(trainer.accelerator.process_index * 16 * 2**20, dtype=torch.float32)  # rank 1: 64 MiB
    trainer.train()
    del ballast
    write_and_leave(folder, trainer.state.log_history)


if __name__ == "__main__":
    main()
