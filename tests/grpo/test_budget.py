"""``memory_budget``: chosen by simulation in another process, applied, held against the first step."""

from __future__ import annotations

import json
import re
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("trl")

import torch

from memprof.config.gpus import Gpu
from memprof.errors import UsageError
from memprof.executors.choice import ExecutorChoice
from memprof.grpo import budget
from memprof.grpo.budget import budget_bytes, card_of, settings_of
from memprof.plan.budget_search import Choice
from memprof.plan.simulations import SimulationRequest
from tests.grpo.trainers import build, run_step, saved_llama, tiny_llama
from tests.plan.rows import simulated_row

MIB = 2**20


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF_CACHE", str(tmp_path / "cache" / "plan"))


def test_a_trainer_is_described(tmp_path: Path) -> None:
    trainer = build("lean", tiny_llama(), tmp_path, lora=True, beta=0.1, tiled_mlp=16, checkpointing="selective")
    settings, notes = settings_of(trainer)
    assert (settings.recipe, settings.device) == ("lean", "cpu")
    assert (settings.dtype, settings.mixed_precision) == ("float32", "no")
    assert (settings.lora_r, settings.num_generations, settings.per_device_train_batch_size) == (4, 4, 4)
    assert "down_proj" in settings.lora_target_modules
    assert (settings.prompt_length, settings.completion_length) == (6, 12)  # "t.. " six words at most
    assert (settings.beta, settings.tiled_mlp, settings.checkpointing) == (0.1, 16, "selective")
    config = json.loads((Path(settings.model) / "config.json").read_text())
    assert config["hidden_size"] == 32
    assert any("longest of the dataset" in note for note in notes)


def test_an_adapter_in_float32_is_not_the_models_dtype(tmp_path: Path) -> None:
    """Its tensors are more than the model's (two a layer's linear), and PEFT makes them float32; the base is bf16."""
    model = tiny_llama(torch.bfloat16)
    trainer = build("lean", model, tmp_path, lora=True)
    kinds = [p.dtype for p in trainer.model.parameters()]
    assert kinds.count(torch.float32) > kinds.count(torch.bfloat16)
    assert settings_of(trainer)[0].dtype == "bfloat16"


def test_the_card_is_the_one_the_run_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ada = SimpleNamespace(name="NVIDIA GeForce RTX 4090", major=8, minor=9, multi_processor_count=128)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: ada)
    card = card_of(torch.device("cuda"), 20 * 10**9)
    assert card == Gpu("NVIDIA GeForce RTX 4090", 20 * 10**9, (8, 9), multiprocessors=128)
    asked = SimulationRequest(settings={}, gpu=card)
    assert msgspec.json.decode(msgspec.json.encode(asked), type=SimulationRequest).gpu == card, (
        "as another process gets it"
    )
    assert card_of(torch.device("cpu"), 20 * 10**9) is None


def test_a_reference_in_host_memory_is_simulated_too(tmp_path: Path) -> None:
    trainer = build("lean", saved_llama(tmp_path / "model"), tmp_path, beta=0.1)
    settings, _ = settings_of(trainer)
    assert (settings.beta, settings.lora_r) == (0.1, None)


def test_sizes() -> None:
    assert budget_bytes("24GB", torch.device("cpu")) == 24 * 10**9
    with pytest.raises(UsageError, match="this run has none"):
        budget_bytes("auto", torch.device("cpu"))


def test_a_budget_that_is_no_size_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a known GPU"):
        build("lean", tiny_llama(), tmp_path, memory_budget="much")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with a generous budget, simulated for real in its own process, trained one recorded step."""
    from memprof.integrations.callback.callback import MemProfCallback

    folder = tmp_path_factory.mktemp("budget")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMPROF_CACHE", str(folder / "cache" / "plan"))
        trainer, said = _built_in(folder)
        trainer.said_of_the_search, trainer.folder = said, folder
        trainer.callback_handler.callbacks.insert(0, MemProfCallback(folder / "memory", steps=1, report=False))
        trainer.train()
    return trainer


def _built_in(folder: Path) -> tuple[Any, list[str]]:
    with redirect_stdout(StringIO()) as said:
        trainer = build(
            "lean", tiny_llama(), folder, lora=True, memory_budget="1GB", max_steps=1, gradient_checkpointing=True,
            generation_batch=4, tiled_mlp=None,
        )  # fmt: skip
    return trainer, said.getvalue().splitlines()


def _first_step(trainer: Any) -> Any:
    return next(c for c in trainer.callback_handler.callbacks if isinstance(c, budget._FirstStep))


def test_the_fastest_is_chosen_where_all_fits(trained: Any) -> None:
    assert trained.args.checkpointing == "none"
    assert trained.args.tiled_mlp is None
    assert trained.args.generation_batch == 4  # as it was given
    assert trained.args.gradient_checkpointing  # the caller's
    assert not trained.model.is_gradient_checkpointing


def test_the_search_is_told_as_it_goes_and_remembered(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF_CACHE", str(trained.folder / "cache" / "plan"))
    first, (_, again) = trained.said_of_the_search, _built_in(trained.folder)
    head = r"lean trainer: choosing settings for 0.93 GiB by simulation, \d side by side\. .*"
    assert re.fullmatch(head, first[0])
    tried = [line for line in first if "of at most" in line]
    assert re.fullmatch(
        r"lean trainer: 1 of at most \d: checkpointing=none, generation_batch=4 needs \d.\d\d GiB, fits "
        r"\(\d+ s; at most about \d+ s more\)\.",
        tried[0],
    )
    assert first[-1] == f"  ({len(tried)} simulated in {first[-1].split()[3]} s, 0 cached from an earlier start)"
    assert again[-1] == f"  (0 simulated in 0 s, {len(tried)} cached from an earlier start)"


def test_the_search_runs_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of one process stands for the cluster; all else is real."""
    from memprof.plan import subprocess_runner

    opened = []

    def pool(name: str, tasks: int) -> Any:
        opened.append(name)
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    monkeypatch.setattr(subprocess_runner, "open_executor", pool)
    monkeypatch.setattr(subprocess_runner.Runner, "_here", None)  # nothing is simulated beside the trainer
    trainer = build(
        "lean", tiny_llama(), tmp_path, lora=True, memory_budget="1GB", memory_budget_executor="ray:auto",
        generation_batch=4, tiled_mlp=None,
    )  # fmt: skip
    assert (opened, trainer.args.checkpointing) == ([ExecutorChoice("ray", "auto", 60.0)], "none")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="is none of local"):
        build("lean", tiny_llama(), tmp_path, memory_budget="1GB", memory_budget_executor="slurm")


def test_the_first_step_is_compared(trained: Any) -> None:
    follower = _first_step(trained)
    assert follower._done
    (said,) = [line for line in trained._once_log.said if "memory budget" in line]
    assert said.startswith("memory budget met: measured peak")


def test_where_nothing_fits_the_smallest_need_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Nothing fits a memory budget of 0.00 GiB: .* need \d"):
        build(
            "lean", tiny_llama(), tmp_path, memory_budget="1kB", checkpointing="full", generation_batch=4,
            tiled_mlp=64, max_tokens_per_piece=64,
        )  # fmt: skip


def _over(trained: Any, phase: str, measured: int, monkeypatch: pytest.MonkeyPatch) -> str:
    settings, _ = settings_of(trained)
    chosen = settings.with_(gradient_checkpointing="none", generation_batch=4)
    leaner = chosen.with_(gradient_checkpointing="full", tiled_mlp=8)
    expected = simulated_row(peak_bytes=100 * MIB, device_peak_bytes=700 * MIB, peak_phase=phase)
    follower = budget._FirstStep(
        trained, Choice(chosen, expected, 720 * MIB, (leaner,), 2), trained._techniques, trained._once_log
    )
    monkeypatch.setattr(budget, "_measured", lambda trainer: measured)
    trained._once_log.said.clear()
    follower.on_step_end(trained.args, trained.state, trained.control)
    follower.on_step_end(trained.args, trained.state, trained.control)  # corrected once
    (line,) = trained._once_log.said - {f"checkpointing: {trained.args.checkpointing}", "MLPs in tiles of 8 tokens"}
    return str(line)


def test_over_the_budget_the_next_rung_is_taken_once(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = trained._prepare_inputs(next(iter(trained.get_train_dataloader())))
    trained.model.train()
    before = run_step(trained, inputs)

    assert _over(trained, "backward", 119 * MIB, monkeypatch).startswith("memory budget met")
    assert trained.args.checkpointing == "none"
    line = _over(trained, "generate", 121 * MIB, monkeypatch)
    assert line.endswith("changed to checkpointing=none, generation_batch=2")
    assert trained.args.generation_batch == 2
    line = _over(trained, "backward", 121 * MIB, monkeypatch)
    assert line.endswith("changed to checkpointing=full, tiled_mlp=8, generation_batch=4")
    assert (trained.args.checkpointing, trained.args.tiled_mlp) == ("full", 8)
    layer = trained._step_context().base_model().model.layers[0]
    assert layer._memprof_wrappers
    assert layer.mlp._memprof_wrappers  # really in place, and the loss is the same
    after = run_step(trained, inputs)
    assert after.item() == pytest.approx(before.item(), rel=1e-5)
