"""A training script that knows nothing of memprof, for ``memprof run``: ``script.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.cuda.programs import tiny

trainer = tiny.trainer(Path(sys.argv[1]), {"name": "out", "lora": True}, [])
trainer.train()
print("\nPEAK", torch.cuda.max_memory_allocated())
