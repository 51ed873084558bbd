"""The callback under the oldest and the newest TRL it is said to work with, each in an environment of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.versions.matrix import ROWS, Row, environment, missing, run
from benchmarks.versions.matrix import NotInstalled as NotInstalledError

# Kept between runs of the tests.
ENVIRONMENTS = Path(__file__).resolve().parents[2] / "build" / "versions-tests"

# The model of `one_version`: embedding, two layers of attention with biases and MLP and norms, the last norm; fp32.
_ATTENTION = (80 * 80 + 80) + 2 * (80 * 16 + 16) + 80 * 80
WEIGHTS = 4 * (504 * 80 + 2 * (_ATTENTION + 3 * 80 * 176 + 2 * 80) + 80)
TENSORS = 1 + 2 * 12 + 1
# Rank 4 on the seven linear layers of each of the two layers.
ADAPTERS = 4 * 2 * 4 * (2 * (80 + 80) + 2 * (80 + 16) + 3 * (80 + 176))
# Adam: two moments, and a count for each tensor.
STATE = {"full": 2 * WEIGHTS + 4 * TENSORS, "lora": 2 * ADAPTERS + 4 * 2 * 2 * 7}
# Logits of four completions as TRL had them in one piece, and what rotary embeddings keep in buffers.
LOGITS = 4 * 4 * 504
BUFFERS = 128


# The newest is left to make test-all: the other tests of the callback run with a recent one.
@pytest.fixture(
    scope="module", params=[ROWS[0], pytest.param(ROWS[-1], marks=pytest.mark.heavy)], ids=lambda row: row.name
)
def row(request: pytest.FixtureRequest) -> Row:
    chosen: Row = request.param
    return chosen


@pytest.fixture(scope="module")
def result(row: Row) -> Any:
    try:
        python = environment(row, ENVIRONMENTS, torch_from=Path(sys.prefix))
    except NotInstalledError as why:
        pytest.skip(f"TRL {row.name} cannot be installed here: {why}")
    return run(python)


@pytest.mark.slow
@pytest.mark.trl
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_every_phase_is_found_and_every_byte_is_explained(row: Row, result: Any, kind: str) -> None:
    pins = dict(pin.split("==") for pin in row.requirements if "==" in pin)
    assert {name: result["versions"][name] for name in pins} == pins
    seen = result["runs"][kind]
    assert "error" not in seen, seen
    assert missing(seen) == []
    assert seen["self_check"] == "passed"
    assert seen["warnings"] == []
    assert seen["unattributed_bytes"] < seen["peak_bytes"] / 10_000
    categories = seen["categories"]
    assert 0 <= categories["weights"] - WEIGHTS <= BUFFERS
    assert categories["optimizer_state"] == STATE[kind]
    assert categories.get("adapters", 0) == (ADAPTERS if kind == "lora" else 0)
    assert abs(categories.get("reference_model", 0) - (WEIGHTS if kind == "full" else 0)) <= BUFFERS
    assert categories["loss_logits"] > LOGITS * max(completion for _, _, completion in seen["batches"])


@pytest.mark.slow
@pytest.mark.trl
def test_lengths_are_those_of_the_batches(result: Any) -> None:
    """Two batches of four were generated in one go: the longest of each fills its batch."""
    for seen in result["runs"].values():
        assert len(seen["lengths"]) == 8
        longest = max(completion for _, completion in seen["lengths"])
        assert longest == max(completion for _, _, completion in seen["batches"])
        assert {prompt for prompt, _ in seen["lengths"]} == {6}


@pytest.mark.slow
@pytest.mark.trl
def test_watching_changes_nothing(result: Any) -> None:
    assert all(seen["unchanged"] for seen in result["runs"].values())


@pytest.mark.slow
@pytest.mark.trl
def test_an_exception_of_the_optimizer_ends_the_recording(result: Any) -> None:
    """Before transformers 5 no method of the trainer that a callback can wrap lies around the optimizer's step."""
    assert result["interrupted_in"] == "optimizer_step"
