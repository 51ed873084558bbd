"""The zoo's rows, and that identity in a program follows from what its objects do."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.truth.zoo.rows import read_rows

torch = pytest.importorskip("torch")


def test_rows_name_a_commit_and_a_function_that_prepares_the_program() -> None:
    from benchmarks.truth.zoo import programs

    rows = read_rows()
    assert {row.half for row in rows.values()} == {"first", "second"}
    for row in rows.values():
        assert re.fullmatch(r"[0-9a-f]{40}", row.commit), row.name
        assert callable(getattr(programs, row.name.replace("-", "_")))
    halves = [{r.repository for r in rows.values() if r.half == half} for half in ("first", "second")]
    assert not halves[0] & halves[1]


def program(_: Any) -> None:
    """Train a policy beside a copy of it and a judge of other sizes, all run without names that say so."""
    torch.manual_seed(random.randrange(9))
    one = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    two, three = copy.deepcopy(one), torch.nn.Linear(32, 1)
    sgd = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        x = torch.randn(4, 32)
        with torch.no_grad():
            target = two(x) + three(x)
        (one(x) - target).square().mean().backward()
        sgd.step()
        sgd.zero_grad()
    held.extend((one, two, three, sgd))


held: list[Any] = []


def test_models_are_known_by_what_trains_them_and_by_their_sizes() -> None:
    from benchmarks.truth.zoo.tracing import trace_program

    held.clear()
    tracer = trace_program(program, ())
    models = dict(zip(("weights", "reference_model", "reward_model"), held[:3], strict=True))
    for category, model in models.items():
        for parameter in model.parameters():
            number = tracer.number_of(parameter)
            assert number is not None
            assert tracer.storages[number].mark is not None
            assert tracer.storages[number].mark[0] == category
    momentum = [state["momentum_buffer"] for state in held[3].state.values()]
    marks = [tracer.storages[tracer.number_of(tensor)].mark for tensor in momentum]
    assert [mark[0] for mark in marks] == ["optimizer_state"] * 4
    held.clear()


def test_a_program_that_can_not_be_fetched_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from benchmarks.truth.zoo import run

    monkeypatch.setattr(run, "fetch", lambda *_: False)
    told = CliRunner().invoke(run.main, ["nanogpt", "--out", str(tmp_path)])
    assert told.exit_code == 0, told.exception
    assert "nanogpt: skipped; karpathy/nanoGPT can't be fetched" in told.output
