"""Workers that are Ray actors, on a local Ray: their methods are called by ``.remote()``."""

from __future__ import annotations

import ast
import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memprof
from memprof import analyze
from memprof.instrument.attach import attach
from tests.documentation import ROOT
from tests.instrument.test_attach import Worker
from tests.report.files import validate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 makes them wait for everything else on a busy machine
        ray.init(
            num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
            object_store_memory=80 << 20, runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        )  # fmt: skip
        try:
            yield ray
        finally:
            ray.shutdown()


def recipes() -> dict[str, dict[str, str]]:
    """Return methods and phases of each recipe in docs/frameworks.md, by its heading."""
    found = {}
    for section in (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8").split("\n### ")[1:]:
        if (start := section.find("self._memprof.methods(self, ")) >= 0:
            call = ast.parse(section[start : section.index(")", start) + 1], mode="eval").body
            assert isinstance(call, ast.Call)
            found[section.partition("\n")[0]] = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    return found


class Actor:
    """A worker whose methods have the names that a recipe gives; it watches itself as the recipe does."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def begin(self, folder: str, phases: dict[str, str]) -> list[str]:
        self.watch = attach(self.model, self.optimizer, output_dir=folder, device="cpu")
        return self.watch.methods(self, **phases)

    def end(self) -> list[str]:
        report = self.watch.report(self.watch.detach())
        assert report is not None
        return [p["phase"] for p in report["phases"] if p["phase"] != "other"]

    def _work(self) -> None:
        self.model(torch.ones(4, 8)).square().mean().backward()
        self.optimizer.step()


def actor_of(phases: dict[str, str], *, awaited: bool) -> type[Actor]:
    def plain(self: Actor) -> None:
        self._work()

    async def waiting(self: Actor) -> None:
        await asyncio.sleep(0)
        self._work()

    class Made(Actor):
        pass

    for name in phases:
        setattr(Made, name, waiting if awaited else plain)
    return Made


@pytest.mark.parametrize("awaited", [False, True])
def test_methods_called_by_remote_are_phases(ray: Any, tmp_path: Path, awaited: bool) -> None:
    """Each recipe of the documentation, one after the other in one actor; once with coroutine functions."""
    known = recipes()
    assert {"verl", "OpenRLHF", "NeMo-RL", "slime", "AReaL"} <= {*known}
    methods = {f"{name.partition(' ')[0]}_{m}": p for name, phases in known.items() for m, p in phases.items()}
    actor = ray.remote(num_cpus=1)(actor_of(methods, awaited=awaited)).remote()
    for name in known:
        phases = {m: p for m, p in methods.items() if m.startswith(f"{name.partition(' ')[0]}_")}
        assert ray.get(actor.begin.remote(str(tmp_path / name), phases)) == [*phases]
        for method in phases:
            ray.get(getattr(actor, method).remote())
        train = ["forward", "backward", "optimizer_step"]
        expected = [one for p in phases.values() for one in (train if p == "train" else [p])]
        assert ray.get(actor.end.remote()) == expected
        ray.get([getattr(actor, method).remote() for method in phases])  # nothing is watched any more
    ray.kill(actor)


def test_two_ray_actors(ray: Any, tmp_path: Path) -> None:
    actor = ray.remote(num_cpus=1)(Worker)
    workers = [actor.remote(str(tmp_path), rank, 3, 4096 if rank else 8) for rank in (0, 1)]
    ray.get([w.cycle.remote(4) for w in workers])
    report = memprof.collect(workers, tmp_path / "together")
    validate(report)
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert report["across_ranks"]["missing"] == [{"rank": 2, "last_step": None, "peak_allocated_bytes": None}]
    assert report["source"]["rank"] == 1  # whose batch is the larger one
    for rank, summary in enumerate(report["ranks"]):
        own = analyze(tmp_path / "actor" / f"step-000004.rank-{rank}.pickle")
        assert summary["peak"]["active_bytes"] == own.peak.active_bytes
        assert "generate" in {p["phase"] for p in own.to_dict()["phases"]}  # which the actor calls itself
    assert 'id="ranks"' in (tmp_path / "together" / "report.html").read_text()
