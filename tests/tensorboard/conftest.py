"""A log directory as the demo's runs leave it: two real GRPO runs, full and LoRA, and files that are in the way."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``full`` and ``lora``: the demo's recipes with its tiny model, reported to TensorBoard, three steps each."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("trl")
    import torch
    from transformers.integrations import TensorBoardCallback

    from memprof import MemProfCallback
    from memprof.demo.data import load_questions
    from memprof.demo.model import prepare_checkpoint
    from memprof.demo.training import FULL, LORA, Scale, build_trainer

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("board")
    checkpoint = prepare_checkpoint(tmp_path_factory.mktemp("model"), tiny=True)
    scale = replace(Scale(completion_tokens=16), steps=3)
    for recipe in (FULL, LORA):
        folder = root / recipe.name
        # As ``report_to="tensorboard"`` does: the trainer's own callback, its events beside memprof's folder.
        callbacks = [TensorBoardCallback(), MemProfCallback()]
        trainer = build_trainer(recipe, scale, checkpoint, load_questions(8).items, folder, callbacks)
        trainer.train()
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))
    return root


@pytest.fixture(scope="session")
def troubled(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good recording among files nobody should trip over."""
    root = tmp_path_factory.mktemp("troubled")
    good = root / "good" / "_memprof"
    good.mkdir(parents=True)
    for source in (logdir / "full" / "_memprof").glob("step-*"):
        (good / source.name).write_bytes(source.read_bytes())
    bad = root / "bad" / "_memprof"
    bad.mkdir(parents=True)
    (bad / "step-000001.rank-0.pickle").write_bytes(b"\x80\x04garbage")
    (bad / "step-000001.rank-0.json").write_text('{"peak": [')
    (bad / "step-000002.rank-0.pickle").write_bytes(b"")
    (bad / "step-000003.rank-0.pickle").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    secret = tmp_path_factory.mktemp("outside") / "secret.txt"
    secret.write_text("nobody's business")
    os.symlink(secret, bad / "step-000004.rank-0.pickle")
    os.symlink(secret.parent, root / "elsewhere")
    (bad / "notes.txt").write_text("not ours")
    return root


@pytest.fixture(scope="session")
def reports(logdir: Path) -> dict[str, dict[str, Any]]:
    """The reports' JSON by run."""
    found = {}
    for name in ("full", "lora"):
        (path,) = (logdir / name / "_memprof").glob("step-*.json")
        found[name] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="session", params=["true", "false"], ids=["load_fast", "no_load_fast"])
def board(request: pytest.FixtureRequest, logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """TensorBoard on the log directory under a path prefix, with either of its readers."""
    from tests.tensorboard.server import tensorboard

    log = tmp_path_factory.mktemp("server") / "log.txt"
    with tensorboard(logdir, f"--load_fast={request.param}", "--reload_interval=1", log=log, prefix="/deep/er") as base:
        yield base
