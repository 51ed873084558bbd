"""``MemProfCallback`` on real TRL and transformers trainers."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import json
import os
import pickle
import shutil
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import TrainerCallback

from memprof import MemProfCallback
from memprof.analysis.counters import read_counters
from memprof.errors import UsageError
from memprof.recording import phase
from memprof.report import Report
from memprof.snapshot import load_snapshot
from memprof.timeline.timeline import Timeline, build_timeline
from tests.integrations.conftest import wrapped
from tests.integrations.runs import grpo, length_reward, outcome, plain, rewards_varied

pytestmark = [
    pytest.mark.trl,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use_reentrant.*"),
]


def quiet(out: Path, **options: Any) -> MemProfCallback:
    return MemProfCallback(output_dir=out, **{"report": False, **options})


def snapshots(out: Path) -> list[str]:
    return sorted(p.name for p in out.glob("*.pickle"))


class Recorded:
    """A written snapshot with what the tests ask of it."""

    def __init__(self, path: Path) -> None:
        self.raw: dict[str, Any] = pickle.loads(path.read_bytes())
        self.extra: dict[str, Any] = self.raw["memprof"]
        self.line: Timeline = build_timeline(load_snapshot(path))

    def phases(self) -> list[str]:
        return [p["phase"] for p in self.extra["phases"] if p["phase"] != "other"]

    def instant_of(self, phase_id: str, step: int | None = None, which: str = "peak") -> int:
        """The instant of a phase's peak, or its last."""
        spans = [p for p in self.extra["phases"] if p["phase"] == phase_id and (step is None or p["step"] == step)]
        best = None
        for span in spans:
            first, last = self.line.instant_at(span["start_us"]), self.line.instant_at(span["end_us"])
            peak = first + int(self.line.allocated[first : last + 1].argmax()) if which == "peak" else last
            if best is None or self.line.allocated[peak] > self.line.allocated[best]:
                best = peak
        assert best is not None, f"no {phase_id} in {self.phases()}"
        return best

    def owned_over(self, first: int, last: int, category: str) -> list[int]:
        """Bytes of one owned category at each instant of a stretch."""
        rows = self.owner_rows()
        mine = [r for r, c in rows.items() if c == category]
        change = [0] * (self.line.n_events + 2)
        for row in mine:
            change[int(self.line.alloc_event[row]) + 1] += int(self.line.size[row])
            change[int(self.line.free_event[row]) + 1] -= int(self.line.size[row])
        return list(itertools.accumulate(change))[first : last + 1]

    def owner_rows(self) -> dict[int, str]:
        """The timeline's rows that an owner row names."""
        rows: dict[int, str] = {}
        for address, time_us, category, *_ in self.extra["owners"]:
            for row in self.line.alive_at(self.line.instant_at(time_us)):
                start, size = int(self.line.address[row]), int(self.line.size[row])
                if start <= address < start + size:
                    rows.setdefault(int(row), category)
        return rows

    def owned(self, instant: int) -> dict[str, int]:
        """Bytes by owned category at an instant, from the owner rows alone."""
        rows = self.owner_rows()
        found: dict[str, int] = defaultdict(int)
        for row in self.line.alive_at(instant):
            if int(row) in rows:
                found[rows[int(row)]] += int(self.line.size[row])
        return dict(found)


def unique_bytes(tensors: Any) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def state_bytes(trainer: Any) -> int:
    optimizer = trainer.optimizer.optimizer
    return unique_bytes(t for slots in optimizer.state.values() for t in slots.values() if isinstance(t, torch.Tensor))


# -- what it must show -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora_checkpointing"])
def test_a_watched_run_is_the_same_run_and_every_owner_is_exact(model: Path, tmp_path: Path, lora: bool) -> None:
    settings = {"lora": lora, "gradient_checkpointing": lora}
    unwatched = grpo(model, tmp_path / "a", **settings)
    start = outcome(unwatched)["parameters"]
    unwatched.train()
    trainer = grpo(model, tmp_path / "b", [quiet(tmp_path / "records")], **settings)
    trainer.train()

    assert outcome(trainer) == outcome(unwatched)
    assert rewards_varied(trainer)
    assert outcome(trainer)["parameters"] != start
    assert wrapped(trainer) == set()

    assert snapshots(tmp_path / "records") == ["step-000002.rank-0.pickle"]
    seen = Recorded(tmp_path / "records" / "step-000002.rank-0.pickle")
    expected = ["generate", "reference_logprobs", "reward", "forward", "backward", "optimizer_step"]
    assert seen.phases() == expected
    assert seen.extra["recorded"]["dropped_events"] == 0
    assert [s[0] for s in seen.extra["steps"]] == [2]

    policy = trainer.model
    adapters = unique_bytes(p for n, p in policy.named_parameters() if "lora_" in n)
    everything = unique_bytes([*policy.parameters(), *policy.buffers()])
    trainable = unique_bytes(p for p in policy.parameters() if p.requires_grad)
    end = seen.owned(seen.instant_of("optimizer_step"))
    assert end["weights"] == everything - adapters
    assert end.get("adapters", 0) == adapters
    assert end.get("reference_model", 0) == (0 if lora else everything)
    assert end["gradients"] == trainable
    assert end["optimizer_state"] == state_bytes(trainer)
    assert end["inputs"] > 0


def test_the_cache_at_its_peak_is_the_closed_form_and_the_one_being_copied(model: Path, tmp_path: Path) -> None:
    trainer = grpo(model, tmp_path / "a", [quiet(tmp_path / "r")], beta=0.0)
    trainer.train()
    seen = Recorded(tmp_path / "r" / "step-000002.rank-0.pickle")
    batch, config = trainer._buffered_inputs[0], trainer.model.config
    tokens = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1] - 1
    per_token = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 4 * 4
    held = 2 * config.num_hidden_layers * per_token * tokens
    assert seen.extra["steps"][0][3] == batch["prompt_ids"].numel() + batch["completion_ids"].numel()
    # While the last layer's values are concatenated, those they replace (a token shorter) are still there.
    (span,) = (p for p in seen.extra["phases"] if p["phase"] == "generate")
    first, last = seen.line.instant_at(span["start_us"]), seen.line.instant_at(span["end_us"])
    assert max(seen.owned_over(first, last, "kv_cache")) == held + per_token * (tokens - 1)


def test_phases_steps_and_inputs_with_accumulation_and_several_iterations(model: Path, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 8,
                "per_device_train_batch_size": 2, "questions": 8}  # fmt: skip
    unwatched = grpo(model, tmp_path / "a", **settings)
    unwatched.train()
    trainer = grpo(model, tmp_path / "b", [quiet(tmp_path / "r")], **settings)
    trainer.train()
    assert outcome(trainer) == outcome(unwatched)

    # Generation serves 4 x 2 micro-batches, 2 of which are an optimizer step: steps 5 to 8 are one cycle.
    assert snapshots(tmp_path / "r") == ["step-000005.rank-0.pickle"]
    seen = Recorded(tmp_path / "r" / "step-000005.rank-0.pickle")
    assert [s[0] for s in seen.extra["steps"]] == [5, 6, 7, 8]
    slices = [b["prompt_ids"].numel() + b["completion_ids"].numel() for b in trainer._buffered_inputs]
    assert sum(s[3] for s in seen.extra["steps"]) == 2 * sum(slices)  # each slice twice: two iterations
    step = ["forward", "backward", "forward", "backward", "optimizer_step"]
    assert seen.phases() == ["generate", "old_logprobs", "reference_logprobs", "reward", *step * 4]
    spans = [p for p in seen.extra["phases"] if p["phase"] == "optimizer_step"]
    assert [p["step"] for p in spans] == [5, 6, 7, 8]
    trainable = unique_bytes(trainer.model.parameters())
    # Accumulated gradients stay between the two backwards of a step, and go with it.
    forwards = [p for p in seen.extra["phases"] if p["phase"] == "forward" and p["step"] == 6]
    held = [seen.owned(seen.line.instant_at(p["start_us"])).get("gradients", 0) for p in forwards]
    assert held == [0, trainable]


def test_evaluation_and_saving_are_phases_and_what_is_inside_says_so(model: Path, tmp_path: Path) -> None:
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
                "per_device_eval_batch_size": 4}  # fmt: skip
    trainer = grpo(model, tmp_path / "a", [quiet(tmp_path / "r", steps=2)], **settings)
    trainer.train()
    seen = Recorded(tmp_path / "r" / "step-000002.rank-0.pickle")
    inside = {p["phase"] for p in seen.extra["phases"] if p["within"] == "evaluate"}
    assert {"generate", "reward", "reference_logprobs"} <= inside
    assert {"evaluate", "save"} <= set(seen.phases())
    assert {p["step"] for p in seen.extra["phases"]} == {2}


def test_a_reward_model_is_known(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    judge.config.pad_token_id = 0
    trainer = grpo(model, tmp_path / "a", [quiet(tmp_path / "r")], reward=[length_reward, judge], max_steps=1)
    trainer.train()
    seen = Recorded(tmp_path / "r" / "step-000001.rank-0.pickle")
    held = unique_bytes([*judge.parameters(), *judge.buffers()])
    assert seen.owned(seen.instant_of("reward"))["reward_model"] == held
    assert seen.extra["config"]["reward_bytes"] == held


def test_the_config_says_what_ran(model: Path, tmp_path: Path) -> None:
    trainer = grpo(model, tmp_path / "a", [quiet(tmp_path / "r")], lora=True, max_steps=1)
    trainer.train()
    config = Recorded(tmp_path / "r" / "step-000001.rank-0.pickle").extra["config"]
    text = trainer.model.config
    assert config["model_bytes"] == unique_bytes([*trainer.model.parameters(), *trainer.model.buffers()])
    assert config["trainable_bytes"] == unique_bytes(p for p in trainer.model.parameters() if p.requires_grad)
    assert (config["layers"], config["kv_heads"], config["head_dim"]) == (2, 1, 8)
    assert (config["vocab_size"], config["hidden_size"]) == (text.vocab_size, 40)
    assert (config["lora_r"], config["num_generations"], config["beta"]) == (4, 4, 0.04)
    assert config["gradient_checkpointing"] is False
    assert str(model.parent) not in json.dumps(config)


# -- lives -----------------------------------------------------------------------------------------------------


def test_a_plain_trainer(model: Path, tmp_path: Path) -> None:
    unwatched = plain(model, tmp_path / "a")
    unwatched.train()
    trainer = plain(model, tmp_path / "b", [quiet(tmp_path / "r")])
    trainer.train()
    assert outcome(trainer) == outcome(unwatched)
    seen = Recorded(tmp_path / "r" / "step-000002.rank-0.pickle")
    assert seen.phases() == ["forward", "backward", "optimizer_step"]
    owned = seen.owned(seen.instant_of("optimizer_step"))
    trainable = unique_bytes(trainer.model.parameters())
    assert owned["gradients"] == trainable
    assert owned["optimizer_state"] == state_bytes(trainer)
    assert "kv_cache" not in owned  # a forward with gradients fills a cache object with activations


def test_added_after_construction(model: Path, tmp_path: Path) -> None:
    trainer = plain(model, tmp_path / "b")
    trainer.add_callback(quiet(tmp_path / "r"))
    trainer.train()
    assert snapshots(tmp_path / "r") == ["step-000002.rank-0.pickle"]


def test_several_trainings_one_callback(model: Path, tmp_path: Path) -> None:
    callback = MemProfCallback(report=False)
    first, second = plain(model, tmp_path / "a", [callback]), plain(model, tmp_path / "b", [callback])
    first.train()
    one = list(callback.result.snapshots)
    second.train()
    two = list(callback.result.snapshots)
    first.args.max_steps = 5
    first.train()
    assert [p.parent.parent.name for p in (*one, *two, *callback.result.snapshots)] == ["a", "b", "a"]
    assert wrapped(first) == wrapped(second) == set()


def test_a_training_inside_a_training_is_left_alone(model: Path, tmp_path: Path) -> None:
    callback = quiet(tmp_path / "r")
    inner = plain(model, tmp_path / "inner", [callback], max_steps=1)

    def reward(completions: list[str], **_: Any) -> list[float]:
        if inner.state.global_step == 0:
            inner.train()
        return length_reward(completions)

    outer = grpo(model, tmp_path / "outer", [callback], reward=reward)
    with pytest.warns(UserWarning, match="already follows another"):
        outer.train()
    assert snapshots(tmp_path / "r") == ["step-000002.rank-0.pickle"]
    assert Recorded(tmp_path / "r" / "step-000002.rank-0.pickle").extra["config"]["trainer"] == "GRPOTrainer"


def test_a_resumed_run_records_after_its_own_first_step(model: Path, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    grpo(model, tmp_path / "a", **settings).train()
    trainer = grpo(model, tmp_path / "a", [quiet(tmp_path / "r")], **{**settings, "max_steps": 5})
    trainer.train(resume_from_checkpoint=True)
    assert snapshots(tmp_path / "r") == ["step-000004.rank-0.pickle"]
    assert Recorded(tmp_path / "r" / "step-000004.rank-0.pickle").extra["steps"][0][0] == 4


def test_recorded_steps_can_be_chosen_and_disk_bounded(model: Path, tmp_path: Path) -> None:
    trainer = plain(model, tmp_path / "a", [quiet(tmp_path / "r", steps=[1, 3, 4])], max_steps=5)
    trainer.train()
    every = ["step-000001.rank-0.pickle", "step-000003.rank-0.pickle", "step-000004.rank-0.pickle"]
    assert snapshots(tmp_path / "r") == every
    size = (tmp_path / "r" / every[-1]).stat().st_size
    callback = quiet(tmp_path / "s", steps=[1, 3, 4], max_disk=size + size // 2)
    plain(model, tmp_path / "b", [callback], max_steps=5).train()
    assert snapshots(tmp_path / "s") == every[-1:]
    assert [p.name for p in callback.result.snapshots] == every[-1:]


def test_a_long_run_is_bounded_on_disk_and_in_memory(model: Path, tmp_path: Path) -> None:
    """Every step recorded and reported: the folder stays below ``max_disk``, and neither reports nor open files are
    kept."""
    folder = tmp_path / "r"
    sizes, held, files = [], [], []

    class Looks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if folder.exists():
                sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
                held.append(sum(1 for o in gc.get_objects() if type(o) is Report))
                files.append(len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0)

    limit = 3_300_000
    callback = MemProfCallback(folder, every=1, table=False, max_disk=limit)
    plain(model, tmp_path / "a", [callback, Looks()], max_steps=8).train()
    assert max(sizes) <= limit + 200_000  # one recording more, until its report is written
    assert 1 <= min(held[1:]) <= max(held) <= 2  # the newest one, and that of the page
    assert max(files[1:]) <= files[1]
    result = callback.result
    assert sum(path.stat().st_size for path in folder.iterdir()) <= limit
    assert 1 < len(result.snapshots) < 8
    assert sorted(result.reports) == result.snapshots == sorted(folder.glob("*.pickle"))
    assert all(r.peak.step == int(p.name[5:11]) for p, r in result.reports.items())
    assert result.highest in result.snapshots
    for path in result.snapshots:
        path.with_suffix(".json").unlink()
    assert len(result.reports) == len(list(result.reports.values())) == 1  # the newest is in memory


def test_a_deleted_folder_is_begun_anew_and_not_said_to_be_pruned(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "r"

    class Deletes(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2:
                shutil.rmtree(folder)

    callback = MemProfCallback(folder, every=1, table=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plain(model, tmp_path / "a", [callback, Deletes()], max_steps=4).train()
    assert [p.name for p in callback.result.snapshots] == snapshots(folder)
    assert snapshots(folder)[-1] == "step-000004.rank-0.pickle"
    assert [row.step for row in read_counters(folder / "counters.rank-0.jsonl").steps][-1] == 4
    assert not any("Deleted" in note for r in callback.result.reports.values() for note in r.notes)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_a_copy_made_while_training_leaves_the_recording_behind(model: Path, tmp_path: Path, copied: Any) -> None:
    made = []

    class Copies(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            made.append(copied(callback))

    callback = quiet(tmp_path / "r", steps=[2])
    plain(model, tmp_path / "a", [callback, Copies()]).train()
    assert snapshots(tmp_path / "r") == ["step-000002.rank-0.pickle"]
    assert made[-1].result.snapshots == []
    plain(model, tmp_path / "b", [made[-1]]).train()
    assert snapshots(tmp_path / "r-2") == ["step-000002.rank-0.pickle"]


def test_a_ctrl_c_in_the_last_report_ends_the_counters(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memprof.integrations.run_recorder import writing

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "add_report", interrupted)
    callback = MemProfCallback(tmp_path / "r", table=False)
    trainer = plain(model, tmp_path / "a", [callback], max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert snapshots(tmp_path / "r") == ["step-000002.rank-0.pickle"]
    assert read_counters(tmp_path / "r" / "counters.rank-0.jsonl").ended is not None
    assert wrapped(trainer) == set()


def test_switched_off(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPROF", "0")
    callback = quiet(tmp_path / "r")
    trainer = plain(model, tmp_path / "a", [callback])
    trainer.train()
    assert not (tmp_path / "r").exists()
    assert "nothing recorded" in callback._repr_html_()


def test_it_is_a_callback_and_checks_its_options() -> None:
    assert isinstance(MemProfCallback(), transformers.TrainerCallback)
    for options in ({"stacks": "some"}, {"max_entries": 0}, {"max_disk": "a lot"}, {"steps": [0]}, {"every": 0}):
        with pytest.raises(UsageError):
            MemProfCallback(**options)  # type: ignore[arg-type]


# -- trouble ---------------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


@pytest.mark.parametrize("where", ["reward", "optimizer_step", "backward"])
def test_an_exception_passes_through_and_what_was_recorded_is_written(
    model: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def maybe() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OwnError(where)

    def reward(completions: list[str], **_: Any) -> list[float]:
        if where == "reward":
            maybe()
        return length_reward(completions)

    callback = quiet(tmp_path / "r")
    trainer = grpo(model, tmp_path / "a", [callback], reward=reward)
    if where == "optimizer_step":
        hook = torch.optim.AdamW.step

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            maybe()
            return hook(self, *args, **kwargs)

        monkeypatch.setattr(torch.optim.AdamW, "step", step)
    if where == "backward":
        next(trainer.model.parameters()).register_hook(lambda _: maybe())
    with pytest.raises(OwnError, match=where):
        trainer.train()
    assert wrapped(trainer) == set()
    assert [p.name for p in callback.result.snapshots] == ["step-000002.rank-0.pickle"]
    seen = Recorded(callback.result.snapshots[0])
    assert seen.phases()[-1] == where
    assert seen.line.allocated[-1] > 0


def test_an_interrupt_is_an_exception_too(model: Path, tmp_path: Path) -> None:
    callback = quiet(tmp_path / "r")
    trainer = plain(model, tmp_path / "a", [callback])
    count = iter(range(100))
    loss = trainer.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        if next(count) == 1:
            raise KeyboardInterrupt
        return loss(*args, **kwargs)

    trainer.compute_loss = compute_loss
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.compute_loss is compute_loss
    assert snapshots(tmp_path / "r") == ["step-000002.rank-0.pickle"]


@pytest.mark.parametrize("way", ["raises", "goes on"])
def test_a_forked_child_leaves_the_recording_to_the_run(model: Path, tmp_path: Path, way: str) -> None:
    run, left = os.getpid(), []

    def loss(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 1 and os.getpid() == run:
            if (child := os.fork()) != 0:
                os.waitpid(child, 0)
                left.extend(snapshots(tmp_path / "r"))
            elif way == "raises":
                raise SystemExit
        return original(*args, **kwargs)

    trainer = plain(model, tmp_path / "a", [quiet(tmp_path / "r")])
    original, trainer.compute_loss = trainer.compute_loss, loss
    try:
        trainer.train()
    finally:
        if os.getpid() != run:
            os._exit(0)
    assert left == []
    assert snapshots(tmp_path / "r") == ["step-000002.rank-0.pickle"]


def test_running_out_of_memory_is_told(model: Path, tmp_path: Path) -> None:
    def reward(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 1:
            torch.empty(2**52, dtype=torch.uint8)
        return length_reward(completions)

    trainer = grpo(model, tmp_path / "a", [quiet(tmp_path / "r")], reward=reward)
    with pytest.raises(RuntimeError, match="allocate"):
        trainer.train()
    oom = Recorded(tmp_path / "r" / "step-000002.rank-0.pickle").extra["oom"]
    assert (oom["requested_bytes"], oom["phase"], oom["step"]) == (2**52, "reward", 2)
    assert any("test_callback.py" in line and line.endswith(" reward") for line in oom["stack"])


SEAMS = {
    "starting": ("memprof.recording.session.Session.start", None),
    "a phase": ("memprof.recording.phases.PhaseLog.enter", None),
    "gradients": ("memprof.recording.owners.OwnershipRegistry.claim_gradients", None),
    "an operation": ("memprof.recording.trace.training_regions.Region.now", None),
    "a cache": ("memprof.recording.owners.OwnershipRegistry.claim", None),
    "writing": ("memprof.recording.session.Session.write", None),
    "facts": ("memprof.integrations.callback.training_run.collect_facts", None),
    "the step": ("memprof.integrations.callback.training_run.TrainingRun.step_begin", None),
    "the end": ("memprof.integrations.run_recorder.recorder.RunRecorder.end", None),
}


@pytest.mark.parametrize("place", SEAMS)
def test_a_mistake_of_ours_costs_one_warning_and_nothing_else(
    model: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwatched = plain(model, tmp_path / "a")
    unwatched.train()

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    target, word = SEAMS[place]
    monkeypatch.setattr(target, broken)
    trainer = plain(model, tmp_path / "b", [quiet(tmp_path / "r")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    monkeypatch.undo()
    mine = [str(w.message) for w in caught if "memprof" in str(w.message)]
    assert len(mine) == 1, mine
    assert "ZeroDivisionError" in mine[0]
    assert (word or "training goes on") in mine[0]
    assert outcome(trainer) == outcome(unwatched)
    assert wrapped(trainer) == set()


def test_a_mistake_at_the_very_end_is_told_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memprof.recording.session.Session.write", lambda *_: 1 / 0)
    trainer = plain(model, tmp_path / "a", [quiet(tmp_path / "r")], max_steps=2)  # written after the last step
    with pytest.warns(UserWarning, match="training goes on"):
        trainer.train()
    assert wrapped(trainer) == set()


def test_an_unwritable_folder_costs_one_warning(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    trainer = plain(model, tmp_path / "a", [quiet(tmp_path / "file" / "r")])
    with pytest.warns(UserWarning, match="training goes on"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_a_users_phase_and_recording_beside_the_callback(model: Path, tmp_path: Path) -> None:
    from memprof import record

    def reward(completions: list[str], **_: Any) -> list[float]:
        with phase("weight_sync", detail="mine"):
            return length_reward(completions)

    trainer = grpo(model, tmp_path / "a", [quiet(tmp_path / "r")], reward=reward)
    with record(tmp_path / "own.pickle", model=trainer.model):
        trainer.train()
    seen, own = Recorded(tmp_path / "r" / "step-000002.rank-0.pickle"), Recorded(tmp_path / "own.pickle")
    assert "weight_sync" in seen.phases()
    assert own.phases() == ["weight_sync", "weight_sync"]
    assert own.line.n_events > seen.line.n_events


def test_redacted_snapshots_name_no_folder_of_this_machine(model: Path, tmp_path: Path) -> None:
    trainer = plain(model, tmp_path / "a", [quiet(tmp_path / "r", redact=True)])
    trainer.train()
    text = (tmp_path / "r" / "step-000002.rank-0.pickle").read_bytes()
    repository = str(Path(__file__).resolve().parents[2]).encode()
    assert repository not in text
    assert str(tmp_path).encode() not in text
    assert b"transformers/trainer.py" in text


def test_nothing_that_a_redacted_run_leaves_tells_who_ran_it_where(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its snapshot, JSON, page and counters, TensorBoard's tab of them, and what was printed."""
    import platform

    from memprof.integrations.board.pages import Pages
    from memprof.integrations.board.recordings import Recordings

    secrets = {"gpunode1742", "adalovelace", "hf_abcdefghij0123456789", "hunter2hunter2", str(tmp_path)}
    monkeypatch.setattr(platform, "node", lambda: "gpunode1742")
    monkeypatch.setattr("socket.gethostname", lambda: "gpunode1742")
    monkeypatch.setattr("getpass.getuser", lambda: "adalovelace")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghij0123456789")
    named = "of adalovelace on gpunode1742 with hf_abcdefghij0123456789 and API_KEY=hunter2hunter2"
    callback = MemProfCallback(redact=True)
    trainer = grpo(
        model, tmp_path / "a", [callback], run_name=named, hub_model_id="adalovelace/grpo",
        hub_token="hf_abcdefghij0123456789",
    )
    trainer.model.config.name_or_path = "/home/adalovelace/models/Qwen"
    trainer.train()
    folder = tmp_path / "a" / "_memprof"
    told = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(told) == 4
    (recording,) = Recordings([("", folder)]).all()
    page = Pages().of([recording])
    assert page.problem is None
    told["the tab"] = page.text.encode()
    left = [(name, secret) for name, text in told.items() for secret in secrets if secret.encode() in text]
    assert not left
    printed = capsys.readouterr().out.replace(str(tmp_path), "")  # on its own screen it says where the page lies
    assert not [secret for secret in secrets if secret in printed]


# -- what a person sees ----------------------------------------------------------------------------------------


def test_the_table_the_json_and_the_page(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = MemProfCallback()
    trainer = grpo(model, tmp_path / "a", [callback])
    trainer.train()
    folder = tmp_path / "a" / "_memprof"
    assert {p.name for p in folder.iterdir()} == {
        "step-000002.rank-0.pickle", "step-000002.rank-0.json", "report.html", "counters.rank-0.jsonl"
    }  # fmt: skip
    report = json.loads((folder / "step-000002.rank-0.json").read_text())
    assert sum(report["peak"]["categories"].values()) == report["peak"]["active_bytes"]
    assert callback.result.page == folder / "report.html"
    printed = capsys.readouterr().out
    assert "Reference" in printed
    assert str(callback.result.page) in printed
    assert "report.html" in callback._repr_html_()


def test_a_table_has_stand_ins_where_the_terminal_lacks_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    from memprof.integrations.run_recorder.output import say

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    say("2 × 3 GiB … █ 字")
    assert sys.stdout.buffer.getvalue() == b"2 x 3 GiB ... # ?\n"  # type: ignore[attr-defined]


def test_a_mistake_in_what_is_printed_is_not_taken_for_a_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from memprof.integrations.run_recorder.output import say

    def wrong(*_: Any) -> str:
        raise ValueError("a mistake of ours")

    monkeypatch.setattr("memprof.reports.terminal.screen.writable", wrong)
    with pytest.raises(ValueError, match="of ours"):
        say("a table")


def test_a_report_that_fails_costs_one_warning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memprof.integrations.run_recorder.output._summarise", lambda *_: 1 / 0)
    callback = MemProfCallback(tmp_path / "r")
    trainer = plain(model, tmp_path / "a", [callback])
    with pytest.warns(UserWarning, match="memprof report"):
        trainer.train()
    assert [p.name for p in callback.result.snapshots] == ["step-000002.rank-0.pickle"]
