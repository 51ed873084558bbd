"""Workers without a Trainer: attached, dumped on request and out of memory, collected through files and through Ray."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from memprof.reports.html.report import render_html

import memprof
from memprof import analyze, load_snapshot
from memprof.analysis.ranks.reading import RanksReader, read_ranks
from memprof.errors import InputError, UsageError
from memprof.instrument.attach import _attached, attach, attached
from memprof.instrument.dump_requests import request_dump
from memprof.recording.system.engine_sleep import Residency
from memprof.vocabulary import Category
from tests.report.files import read_memprof_json, validate
from tests.reports.typed import build_document

WIDTH = 96


@pytest.fixture(autouse=True)
def nothing_attached() -> Iterator[None]:
    yield
    for watch in reversed(list(_attached.values())):  # the last in first: dispatch modes nest
        watch.detach(dump=False)


class Worker:
    """As much of an RL worker as matters: it generates, computes log-probs, trains, sleeps and wakes."""

    def __init__(self, folder: str, rank: int = 0, world: int = 1, batch: int = 8, role: str = "actor") -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.batch = batch
        self.watch = attach(
            self.model, self.optimizer, role=role, output_dir=folder, rank=rank, world_size=world, device="cpu"
        )
        self.wrapped = self.watch.methods(self, generate="generate", sleep="sleep", wake="wake")

    def generate(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.randn(self.batch, WIDTH))

    def update(self, step: int) -> float:
        self.watch.step(step)
        with self.watch.phase("forward"):
            loss = self.model(torch.randn(self.batch, WIDTH)).square().mean()
        with self.watch.phase("backward"):
            loss.backward()
        with self.watch.phase("optimizer_step"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def sleep(self) -> None:
        self.kept = [p.data for p in self.model.parameters()]
        for p in self.model.parameters():
            p.data = torch.empty(0)
        self.kept = []

    def wake(self) -> None:
        for p, like in zip(self.model.parameters(), ((WIDTH, WIDTH), (WIDTH,)) * 2, strict=True):
            p.data = torch.zeros(like)

    def cycle(self, step: int) -> float:
        self.generate()
        return self.update(step)


def test_phases_owners_and_a_dump_on_request(tmp_path: Path) -> None:
    worker = Worker(str(tmp_path), rank=3, world=4)
    assert worker.wrapped == ["generate", "sleep", "wake"]
    worker.cycle(7)
    path = worker.watch.dump("a test")
    assert path == tmp_path / "actor" / "step-000007.rank-3.pickle"
    report = worker.watch.report()
    assert report is not None
    validate(report)
    assert (report["source"]["rank"], report["source"]["world_size"]) == (3, 4)
    assert report["source"]["config"]["role"] == "actor"
    assert {p["phase"] for p in report["phases"]} >= {"generate", "forward", "backward", "optimizer_step"}
    own = analyze(path).own_peaks
    parameters = 4 * 2 * (WIDTH * WIDTH + WIDTH)
    assert own[Category.WEIGHTS.value] == own[Category.GRADIENTS.value] == parameters
    assert own[Category.OPTIMIZER_STATE.value] == 2 * parameters + 4 * 4
    assert any("written because a test" in note for note in report["notes"])


def test_workers_of_a_second_run_write_to_folders_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run ends sooner: its newest step is not the folder's newest."""
    for run, last in ((1, 5), (2, 2)):
        for role in ("actor", "critic"):
            worker = Worker(str(tmp_path), role=role, batch=8 // run)
            worker.cycle(last)
            worker.watch.report(worker.watch.detach())
    said = capsys.readouterr().err
    first = tmp_path / "actor"
    assert f"memprof: {first} contains an earlier run; this run is written to {first}-2." in said
    kept = {p.parent.name: p.name for p in sorted(tmp_path.rglob("*.pickle"))}
    assert kept == {
        "actor": "step-000005.rank-0.pickle", "critic": "step-000005.rank-0.pickle",
        "actor-2": "step-000002.rank-0.pickle", "critic-2": "step-000002.rank-0.pickle",
    }  # fmt: skip
    report = read_ranks([tmp_path], RanksReader(lambda path: analyze(path).report)).report
    assert report.peak.step == 2
    assert report.source.run_id == load_snapshot(tmp_path / "actor-2" / kept["actor-2"]).run.run_id
    assert "actor-2 is the newest of 2 runs in this folder. The others are actor." in report.notes
    assert report.recordings is not None
    assert [row.file for row in report.recordings] == [f"{name}/{kept[name]}" for name in ("actor-2", "critic-2")]


def test_switches_say_what_is_resident(tmp_path: Path) -> None:
    worker = Worker(str(tmp_path))
    worker.cycle(1)
    worker.sleep()
    worker.wake()
    with worker.watch.phase("weight_sync"):
        pass
    report = worker.watch.report(worker.watch.dump())
    assert report is not None
    slept, woken, synced = report["switches"]
    assert [s["phase"] for s in report["switches"]] == ["sleep", "wake", "weight_sync"]
    parameters = 4 * 2 * (WIDTH * WIDTH + WIDTH)
    assert (
        woken["resident_bytes"] - slept["resident_bytes"]
        == parameters
        == synced["resident_bytes"] - slept["resident_bytes"]
    )
    assert all(s["unmapped_bytes"] == 0 for s in report["switches"])
    assert "Between rollout and training" in render_html(build_document(report))


class Trainer(Worker):
    """Forward, backward and step in one method, as RL workers have them."""

    def train(self, checkpoint: bool = False) -> float:
        from torch.utils.checkpoint import checkpoint as again

        batch = torch.randn(self.batch, WIDTH, requires_grad=checkpoint)
        out = again(self.model, batch, use_reentrant=False) if checkpoint else self.model(batch)
        loss = out.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_method_that_does_everything_is_told_apart(tmp_path: Path, checkpoint: bool) -> None:
    worker = Trainer(str(tmp_path))
    assert worker.watch.methods(worker, train="train") == ["train"]
    backward = torch.autograd.backward
    for step in (1, 2):
        worker.watch.step(step)
        worker.train(checkpoint)
    assert torch.autograd.backward is backward
    assert not worker.model._forward_hooks
    assert not worker.model._forward_pre_hooks
    report = worker.watch.report(worker.watch.dump())
    assert report is not None
    named = [(p["phase"], p["step"]) for p in report["phases"] if p["phase"] != "other"]
    assert named == [(p, s) for s in (1, 2) for p in ("forward", "backward", "optimizer_step")]
    assert report["own_peaks"]["gradients"] == 4 * 2 * (WIDTH * WIDTH + WIDTH)


def test_a_training_that_fails_leaves_no_hook_behind(tmp_path: Path) -> None:
    worker = Trainer(str(tmp_path))
    worker.watch.methods(worker, train="train")
    backward = torch.autograd.backward
    worker.batch = -1
    with pytest.raises(RuntimeError):
        worker.train()
    assert torch.autograd.backward is backward
    assert worker.watch._recorder.session.phases.depth == 0


def test_methods_that_are_awaited_are_phases_too(tmp_path: Path) -> None:
    class Server:
        async def wake_up(self) -> int:
            await asyncio.sleep(0.01)
            self.kept = torch.ones(64)
            return 7

    watch, server = attach(output_dir=tmp_path, role="rollout", device="cpu"), Server()
    assert watch.methods(server, wake_up="wake") == ["wake_up"]
    assert asyncio.run(server.wake_up()) == 7
    report = watch.report(watch.dump())
    assert report is not None
    (span,) = [p for p in report["phases"] if p["phase"] == "wake"]
    assert span["end_us"] - span["start_us"] >= 0
    assert [s["phase"] for s in report["switches"]] == ["wake"]
    assert inspect.iscoroutinefunction(Server.wake_up)
    code = Server.wake_up.__code__
    watch.detach(dump=False)
    assert Server.wake_up.__code__ is not code
    assert Server.wake_up.__code__.co_filename == __file__


class Base:
    """Methods as classes have them: inherited, with closures, defaults and decorators, of a kind that is not marked."""

    offset = 1

    def generate(self, n: int, *, scale: int = 2) -> int:
        return int(torch.full((4,), n * scale + self.offset)[0])


class Derived(Base):
    __slots__ = ()

    def generate(self, n: int, *, scale: int = 3) -> int:
        return super().generate(n, scale=scale)

    @staticmethod
    def sync(n: int) -> int:
        return int(torch.full((4,), n)[0])

    def stream(self) -> Iterator[int]:
        yield 1


def test_who_looked_a_method_up_before_calls_the_wrapped_one(tmp_path: Path) -> None:
    """As Ray does, which has the functions of an actor's class before the actor is built."""
    held, worker, other = Derived.generate, Derived(), Derived()
    before, signature = held.__code__, inspect.signature(held)
    watch = attach(output_dir=tmp_path, role="rollout", device="cpu")
    assert watch.methods(worker, generate="generate", sync="weight_sync") == ["generate", "sync"]
    assert inspect.signature(held) == signature
    assert held(other, 2) == 7
    assert {p["phase"] for p in analyze(watch.dump()).to_dict()["phases"]} == {"other"}
    assert [held(worker, 2), held(worker, 2, scale=5), worker.sync(4)] == [7, 11, 4]
    assert {p["phase"] for p in analyze(watch.dump()).to_dict()["phases"]} >= {"generate", "weight_sync"}
    with pytest.raises(TypeError):
        held(worker)
    watch.detach(dump=False)
    assert held.__code__ is before
    assert "__wrapped__" not in vars(held)
    assert held(worker, 2) == 7


def test_a_class_that_is_watched_is_sent_elsewhere_as_it_was(tmp_path: Path) -> None:
    """A worker that starts another of its class: by value, as classes of ``__main__`` are."""
    cloudpickle = pytest.importorskip("cloudpickle")
    worker = Derived()
    watch = attach(output_dir=tmp_path, role="rollout", device="cpu")
    watch.methods(worker, generate="generate")
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        sent = cloudpickle.loads(cloudpickle.dumps(Derived.generate))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert sent(worker, 2) == 7


def test_a_name_that_was_not_wrapped_is_reported(tmp_path: Path) -> None:
    watch = attach(output_dir=tmp_path, role="rollout", device="cpu")
    worker = Derived()
    with pytest.warns(UserWarning, match="no method that can be marked as a phase with the name nothing or stream;"):
        assert watch.methods(worker, nothing="reward", generate="generate", stream="generate") == ["generate"]
    worker.generate(1)
    report = watch.report(watch.dump())
    assert report is not None
    assert any("with the name nothing or stream" in note for note in report["notes"])


def test_pages_an_engine_gave_back_are_not_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's pool, by its structure: it does not run here."""
    data = [SimpleNamespace(handle=(0, 5 << 30, 1, 2), cpu_backup_tensor=None) for _ in range(2)]
    pool = SimpleNamespace(pointer_to_data=dict(enumerate(data)))
    module = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=pool))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    residency, state = Residency(), {"allocated": 1 << 30, "reserved": 12 << 30}
    residency.note(1, "sleep", 1, state, 3 << 30)
    residency.note(2, "weight_sync", 1, state, 3 << 30)
    data[0].cpu_backup_tensor = object()
    residency.note(3, "wake", 1, state, 8 << 30)
    data[0].cpu_backup_tensor = None
    residency.note(4, "wake", 1, state, 13 << 30)
    assert [row[5] >> 30 for row in residency.rows] == [10, 10, 5, 0]
    assert residency.notes == []
    del module.CuMemAllocator.instance.pointer_to_data  # as another release may have it
    assert residency.unmapped_bytes() == 0
    assert "its pool has changed" in residency.notes[0]
    monkeypatch.delitem(sys.modules, "vllm.device_allocator.cumem")
    paused = (
        Residency()
    )  # another allocator's pages: only the driver knows that the process holds less than torch counts
    paused.note(1, "sleep", 1, state, 6 << 30, own=4 << 30)
    assert paused.rows[0][5] >> 30 == 8
    from memprof.analysis.outside_torch import switches_report
    from memprof.snapshot.recorded_run import EngineSwitch

    switches = switches_report(EngineSwitch(*row) for row in residency.rows)
    assert [(switch.resident_bytes or 0) >> 30 for switch in switches] == [2, 2, 7, 12]


def test_a_request_through_a_file(tmp_path: Path) -> None:
    worker = Worker(str(tmp_path))
    worker.cycle(1)
    assert worker.watch.snapshots == []
    request_dump(tmp_path)
    future = worker.watch._asked + 5
    os.utime(tmp_path / "dump.request", (future, future))
    worker.cycle(2)
    (path,) = worker.watch.snapshots
    assert read_memprof_json(path.with_suffix(".json")) is not None
    worker.cycle(2)
    assert worker.watch.snapshots == [path]  # once
    with pytest.raises(InputError, match="cannot be written to"):
        request_dump(path)


def test_a_dump_on_another_thread_leaves_gradients_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch replaces them without a lock: to read one meanwhile can end the process."""
    worker = Worker(str(tmp_path))
    looked: list[int] = []
    session = worker.watch._recorder.session
    assert session is not None
    look = session.owners.claim_gradients
    monkeypatch.setattr(session.owners, "claim_gradients", lambda: looked.append(threading.get_ident()) or look())
    monkeypatch.setattr(session.owners, "elsewhere", lambda: looked.append(threading.get_ident()) or {})
    worker.cycle(1)
    dumps: list[Path | None] = []
    thread = threading.Thread(target=lambda: dumps.append(worker.watch.dump()))
    thread.start()
    thread.join()
    dumps.append(worker.watch.dump())
    here = threading.get_ident()
    assert set(looked) == {here}
    assert worker.watch.guard.failure is None
    assert dumps[0] == dumps[1]  # of one step: the later one
    notes = analyze(dumps[0]).report.notes
    assert not any("another thread" in note for note in notes)
    looked.clear()
    thread = threading.Thread(target=lambda: dumps.append(worker.watch.dump()))
    thread.start()
    thread.join()
    assert looked == []
    report = analyze(dumps[2]).report
    assert any("written on another thread than the one that trains" in note for note in report.notes)
    assert report.own_peaks[Category.GRADIENTS] > 0  # those of the end of the backward pass
    thread = threading.Thread(target=session.recorder.on_oom)  # as the allocator calls it, on autograd's thread
    thread.start()
    thread.join()
    assert looked == [thread.ident] * len(looked) != []


def test_several_threads_dump_while_the_worker_goes_on_and_detaches(tmp_path: Path) -> None:
    worker = Worker(str(tmp_path))
    over, dumped = threading.Event(), []

    def dump() -> None:
        while not over.is_set():
            dumped.append(worker.watch.dump("a thread asked"))

    threads = [threading.Thread(target=dump) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(1, 6):
        worker.cycle(step)
    last = worker.watch.detach()
    over.set()
    for thread in threads:
        thread.join()
    assert last is not None
    assert dumped
    written = sorted((tmp_path / "actor").iterdir())
    assert last in written
    assert {path.suffix for path in written} == {".pickle"}  # no part of a file stays
    assert all(analyze(path).peak.active_bytes for path in written)
    assert worker.watch.guard.failure is None


def test_out_of_memory_is_written_and_passes_on(tmp_path: Path) -> None:
    worker = Worker(str(tmp_path))
    worker.cycle(1)
    failure = torch.OutOfMemoryError("CUDA out of memory.")
    worker.watch.step(2)
    with pytest.raises(torch.OutOfMemoryError) as caught, worker.watch.phase("forward"):
        raise failure
    assert caught.value is failure
    (path,) = worker.watch.snapshots
    report = read_memprof_json(path.with_suffix(".json"))
    assert report is not None
    assert any("memory ran out" in note for note in report["notes"])
    with pytest.raises(ValueError), worker.watch.phase("forward"):
        raise ValueError
    assert worker.watch.snapshots == [path]


def test_watching_changes_nothing_and_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = Worker(str(tmp_path))
    losses = [with_it.cycle(i) for i in range(3)]
    assert with_it.watch.detach() is not None
    assert "generate" not in vars(with_it)
    assert attached() is None
    monkeypatch.setenv("MEMPROF", "0")
    without = Worker(str(tmp_path / "off"))
    assert without.wrapped == []
    assert [without.cycle(i) for i in range(3)] == losses
    assert without.watch.dump() is None
    assert not (tmp_path / "off").exists()


def test_a_detached_model_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    """Before a worker loads the next model: a reference cycle would keep this one until Python collects."""
    torch.optim.SGD([torch.zeros(1)], lr=1)  # the first one imports torch._dynamo, which keeps its callers' frames
    gc.collect()
    gc.disable()
    try:
        worker = Worker(str(tmp_path))
        worker.generate()
        worker.update(1)
        assert worker.watch.detach() is not None
        model = weakref.ref(worker.model)
        del worker
        assert model() is None
    finally:
        gc.enable()


def test_roles_stand_apart_and_mistakes_are_named(tmp_path: Path) -> None:
    actor, critic = Worker(str(tmp_path)), Worker(str(tmp_path), role="critic")
    assert attached("critic") is critic.watch
    critic.cycle(1)
    path = critic.watch.dump()
    assert path is not None
    assert analyze(path).own_peaks[Category.VALUE_MODEL.value] > 0
    with pytest.raises(UsageError, match="attached already"):
        Worker(str(tmp_path))
    with pytest.raises(UsageError, match="role='boss'"):
        memprof.attach(role="boss")
    with pytest.raises(UsageError, match="'rollout' is not a phase"):
        actor.watch.methods(actor, generate="rollout")
