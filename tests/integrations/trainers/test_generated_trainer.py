"""The callback on a trainer that is generated from TRL's source, as Unsloth's is; Unsloth itself needs a GPU."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.runs import checkpoint, grpo, outcome

pytestmark = pytest.mark.trl


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> type:
    """TRL's class under another name, in a module of no package, with a subclass in the place of TRL's own."""
    module: Any = pytest.importorskip("trl.trainer.grpo_trainer")
    import trl
    import trl.trainer

    source = inspect.getsource(module.GRPOTrainer).replace("class GRPOTrainer", "class _UnslothGRPOTrainer", 1)
    names = {**vars(module), "__name__": "UnslothGRPOTrainer"}
    exec(compile(source, "/root/unsloth_compiled_cache/UnslothGRPOTrainer.py", "exec"), names)

    class UnslothGRPOTrainer(names["_UnslothGRPOTrainer"]):  # type: ignore[misc]
        def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, **kwargs: Any) -> None:
            super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)

    for place in (module, trl.trainer, trl):
        monkeypatch.setattr(place, "GRPOTrainer", UnslothGRPOTrainer)
    return UnslothGRPOTrainer


def test_a_generated_trainer_is_recorded_as_trls(generated: type, tmp_path: Path) -> None:
    from memprof import MemProfCallback

    model = checkpoint(tmp_path)
    plain = grpo(model, tmp_path / "plain")
    plain.train()
    watched = grpo(model, tmp_path / "out", [MemProfCallback(table=False)])
    assert type(watched) is generated
    watched.train()
    assert outcome(watched) == outcome(plain)
    report = json.loads((tmp_path / "out" / "_memprof" / "step-000002.rank-0.json").read_text())
    phases = {"generate", "reward", "reference_logprobs", "forward", "backward", "optimizer_step"}
    assert {p["phase"] for p in report["phases"]} >= phases
    assert report["source"]["config"]["trainer"] == "UnslothGRPOTrainer"
    assert not [note for note in report["notes"] if "cannot" in note]
    categories = report["own_peaks"]
    assert categories["reference_model"] == categories["weights"] > 0
    assert categories["gradients"] > 0
