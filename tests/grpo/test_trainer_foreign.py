"""TRL changed under the lean trainer: it refuses in a sentence and never trains nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from trl import GRPOTrainer

from memprof.compat import trl as names
from memprof.compat.check import TARGETS
from memprof.compat.targets import Target
from memprof.compat.versions import installed, is_installed
from memprof.errors import UsageError
from tests.compat.removal import RENAMED, remove, stop_using
from tests.grpo.trainers import batch, build, loss_and_gradients, tiny_llama, with_policies

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.trl

CONSTRUCTED = """
import tempfile
from pathlib import Path

import trl

from memprof.errors import UsageError
from tests.grpo.trainers import build, tiny_llama

print("TRL from", Path(trl.__file__).parent)
try:
    build("trl", tiny_llama(), Path(tempfile.mkdtemp()))
    print("TRL's trainer works")
    build("lean", tiny_llama(), Path(tempfile.mkdtemp()))
except UsageError as refused:
    print("refused:", refused)
"""


@pytest.mark.parametrize(
    ("old", "sentence"),
    [
        (
            "_get_per_token_logps_and_entropies",
            "GRPOTrainer._get_per_token_logps_and_entropies is not in the TRL that is installed, {version}.",
        ),
        pytest.param(
            "profiling_decorator", "profiling_decorator is not in the TRL that is installed, {version}.",
            marks=pytest.mark.heavy,  # each name is taken away in this process below
        ),
    ],
)
def test_a_name_that_a_copy_of_trl_has_renamed_is_refused(old: str, sentence: str, tmp_path: Path) -> None:
    """TRL's own trainer works with the new name, everywhere in its package."""
    import trl

    copy = shutil.copytree(Path(str(trl.__file__)).parent, tmp_path / "trl")
    files = [file for file in copy.rglob("*.py") if old in file.read_text()]
    for file in files:
        file.write_text(file.read_text().replace(old, RENAMED))
    assert files
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CONSTRUCTED], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"TRL from {copy}" in done.stdout
    assert "TRL's trainer works" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("refused:"))
    assert line.startswith("refused: The lean trainer was tested with TRL ")
    assert line.endswith(sentence.format(version=installed("trl")))


LEAN = [t for t in TARGETS if "lean" in t.needed_by and is_installed(t.package)]


@pytest.mark.parametrize("target", LEAN, ids=lambda target: f"{target.module}:{target.path}")
def test_each_thing_it_needs_is_asked_for_when_it_is_constructed(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memprof.grpo import LeanGRPOTrainer

    model = tiny_llama()
    target.find()  # a module is imported once, with what it has
    remove(target, monkeypatch)
    with pytest.raises(UsageError, match=r"^The lean trainer .* that is installed, .*\.$"):
        LeanGRPOTrainer(model)


def test_a_memory_budget_asks_for_what_the_simulator_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(names.TOKENIZE_PROMPTS, monkeypatch)
    build("lean", tiny_llama(), tmp_path)
    with pytest.raises(UsageError, match=r"^memory_budget was tested .*_tokenize_prompts is not in the TRL"):
        build("lean", tiny_llama(), tmp_path, memory_budget="1GB")


# -- log-probabilities that TRL's loss does not use ------------------------------------------------------------------

SCHEMES = {
    "token": {},
    "sequence": {"importance_sampling_level": "sequence"},
    "two_pass": {"top_entropy_quantile": 0.5},
}
OWN_LOGPS = GRPOTrainer._get_per_token_logps_and_entropies
OWN_LOSS = GRPOTrainer._compute_loss


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's loss gets its log-probabilities from a method of another name."""
    monkeypatch.setattr(GRPOTrainer, RENAMED, OWN_LOGPS, raising=False)
    stop_using(names.LOGPS, monkeypatch)


def logps_of(trainer: Any, model: Any, inputs: Any) -> Any:
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    return trainer._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]


def asked_and_forgotten(self: Any, model: Any, inputs: Any) -> torch.Tensor:
    logps_of(self, model, inputs)
    return OWN_LOSS(self, model, inputs)


def asked_as_constants(self: Any, model: Any, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        old = logps_of(self, model, inputs)
    return OWN_LOSS(self, model, {**inputs, "old_per_token_logps": old})


def detached(self: Any, model: Any, inputs: Any) -> torch.Tensor:
    return -logps_of(self, model, inputs).detach().mean()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (None, "did not ask for them"),
        (asked_as_constants, "did not ask for them"),
        (asked_and_forgotten, "gave a loss that does not depend on them"),
        (detached, "gave a loss that does not depend on them"),
    ],
    ids=["renamed", "as_constants", "forgotten", "detached"],
)
def test_a_loss_that_does_not_use_them_is_refused(
    loss: Callable[..., Any] | None, words: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of these give plausible losses."""
    trainer = build("lean", tiny_llama(), tmp_path, **SCHEMES[scheme])
    inputs = with_policies(trainer, batch(), beta=0.0)
    loss_and_gradients(trainer, inputs)
    elsewhere(monkeypatch)
    if loss is not None:
        monkeypatch.setattr(GRPOTrainer, "_compute_loss", loss)
    with pytest.raises(UsageError, match=r"so nothing would be trained: use trl\.GRPOTrainer\.$") as refused:
        loss_and_gradients(trainer, inputs)
    assert f"GRPOTrainer._compute_loss was handed the step's log-probabilities and {words}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_training_ends_there_and_weights_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build("lean", tiny_llama(), tmp_path, max_steps=1)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    elsewhere(monkeypatch)
    with pytest.raises(UsageError, match="did not ask for them"):
        trainer.train()
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


def test_a_subclass_without_a_gradient_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build("lean", tiny_llama(), tmp_path)
    inputs = with_policies(trainer, batch(), beta=0.0)
    monkeypatch.setattr(trainer, "__class__", type("Users", (type(trainer),), {"_compute_loss": detached}))
    with pytest.raises(UsageError, match=r"Users._compute_loss .* gave a loss without a gradient.*micro_splitting"):
        loss_and_gradients(trainer, inputs)
