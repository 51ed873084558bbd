"""Train three compiled steps in a process of its own and print what they computed.

python -m tests.recording.trace.compiled_run config|forward FOLDER [watched]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from memprof import MemProfCallback
from tests.integrations.runs import checkpoint, outcome, plain


def main(way: str, folder: Path, watched: bool) -> None:
    torch.set_num_threads(1)
    callbacks = [MemProfCallback(folder / "r", report=False, steps=[1, 2, 3])] if watched else []
    trainer = plain(checkpoint(folder), folder / "out", callbacks, torch_compile=way == "config")
    if way == "forward":
        trainer.model.forward = torch.compile(trainer.model.forward)
    trainer.train()
    recorded = len(list((folder / "r").glob("*.pickle")))
    print(json.dumps({**outcome(trainer), "recorded": recorded}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "watched" in sys.argv[3:])
