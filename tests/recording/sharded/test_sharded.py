"""Sharded training, attributed: FSDP2, FSDP1 and DDP on two real ranks; ZeRO by what its objects hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memprof import Analysis, analyze
from memprof.recording.owners import OwnershipRegistry
from memprof.vocabulary import Category, Evidence, Phase
from tests.forked import found_by_two_ranks
from tests.recording.sharded.sharded_run import WIDTHS

SHAPES = [shape for a, b in pairwise(WIDTHS) for shape in ((b, a), (b,))]
NUMBERS = sum(int(np.prod(s)) for s in SHAPES)
WHOLE = 4 * NUMBERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both ranks' files of every engine."""
    out = tmp_path_factory.mktemp("sharded")
    found_by_two_ranks("tests.recording.sharded.sharded_run", out)
    return out


@dataclass
class Rows:
    """Allocations of one rank's recording."""

    analysis: Analysis

    def bytes(self, category: Category, detail: str = "", phase: Phase | None = None, evidence: str = "") -> list[int]:
        """Sizes of the allocations of a kind, in order of birth."""
        t, a = self.analysis.timeline, self.analysis.attribution
        found = [
            i
            for i in range(len(t))
            if a.category[i] == category.code
            and a.details[a.detail[i]] == detail
            and (phase is None or a.phase[i] == phase.code)
            and (not evidence or a.evidence[i] == Evidence(evidence).code)
        ]
        return [int(t.size[i]) for i in sorted(found, key=lambda i: int(t.alloc_event[i]))]


def rows(folder: Path, kind: str, rank: int) -> Rows:
    return Rows(analyze(folder / f"{kind}.rank-{rank}.pickle"))


def shard(shape: tuple[int, ...]) -> int:
    """Bytes FSDP2 holds of a parameter on each rank: the first dimension in halves, the last padded."""
    return 4 * ceil(shape[0] / 2) * int(np.prod(shape[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp", "views"])
def test_watching_changes_nothing_and_leaves_nothing(folder: Path, kind: str) -> None:
    for rank in (0, 1):
        said = json.loads((folder / f"{kind}.rank-{rank}.json").read_text())
        assert said["losses"] == said["expected"]
        assert said["hooks"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_fsdp2_shards_and_what_is_gathered(folder: Path, rank: int) -> None:
    found = rows(folder, "fsdp2", rank)
    padded = sorted(shard(s) for s in SHAPES)
    assert sorted(found.bytes(Category.WEIGHTS, "sharded", evidence="owner")) == padded
    # Two steps, each gathers every layer for the forward and again for the backward.
    gathered = sorted(2 * shard(s) for s in SHAPES for _ in range(2))
    assert sorted(found.bytes(Category.WEIGHTS, "unsharded", Phase.FORWARD)) == gathered
    assert sorted(found.bytes(Category.WEIGHTS, "unsharded", Phase.BACKWARD)) == gathered
    # Whole gradients until they are reduced; then one flat buffer of shards a layer.
    whole = sorted(4 * int(np.prod(s)) for s in SHAPES for _ in range(2))
    assert sorted(found.bytes(Category.GRADIENTS, "unsharded", evidence="owner")) == whole
    layers = [shard((b, a)) + shard((b,)) for a, b in pairwise(WIDTHS)]
    assert sorted(found.bytes(Category.GRADIENTS, evidence="owner")) == sorted(2 * layers)
    staged = found.bytes(Category.COMMUNICATION, phase=Phase.FORWARD)
    assert sum(staged) == 2 * 2 * sum(layers)


@pytest.mark.slow
def test_fsdp2_ranks_add_up_to_the_model(folder: Path) -> None:
    """Moments are not padded: both ranks' together are twice the model's numbers, and a step counter each."""
    state = [rows(folder, "fsdp2", rank).bytes(Category.OPTIMIZER_STATE) for rank in (0, 1)]
    counters = 4 * len(SHAPES)
    assert sum(map(sum, state)) == 2 * WHOLE + 2 * counters
    first = sum(2 * shard(s) for s in SHAPES) + counters
    assert [sum(s) for s in state] == [first, 2 * WHOLE + 2 * counters - first]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_fsdp1_flat_parameter(folder: Path, rank: int) -> None:
    found = rows(folder, "fsdp1", rank)
    # Each parameter but the last begins at a multiple of 16 bytes; the whole is padded to equal shards.
    numbers = [int(np.prod(s)) for s in SHAPES]
    padded = 4 * ceil((sum(4 * ceil(n / 4) for n in numbers[:-1]) + numbers[-1]) / 2) * 2
    assert found.bytes(Category.WEIGHTS, "sharded", evidence="owner") == [padded // 2]
    assert found.bytes(Category.WEIGHTS, "unsharded") == [padded] * 2
    assert found.bytes(Category.GRADIENTS, "unsharded", evidence="owner") == [padded] * 2
    assert found.bytes(Category.GRADIENTS, phase=Phase.BACKWARD, evidence="owner") == [padded // 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_ddp_buckets(folder: Path, rank: int) -> None:
    apart, aliased = rows(folder, "ddp", rank), rows(folder, "views", rank)
    assert apart.bytes(Category.COMMUNICATION, "bucket") == [WHOLE]
    assert sum(apart.bytes(Category.GRADIENTS, evidence="owner")) == 2 * WHOLE
    # `.grad` is a view of the bucket: the bucket is the gradients, and nothing else stages them.
    assert aliased.bytes(Category.GRADIENTS, evidence="owner") == [WHOLE]
    assert aliased.bytes(Category.COMMUNICATION, "bucket") == []
    assert not aliased.bytes(Category.COMMUNICATION, phase=Phase.BACKWARD)


# -- ZeRO: DeepSpeed does not run here; its optimizers' attributes stand in ------------------------------------------


class _Zero12:
    """The attributes of DeepSpeed's optimizer for ZeRO-1 and 2 that hold memory."""

    def __init__(self) -> None:
        self.bit16_groups_flat = [torch.zeros(100, dtype=torch.bfloat16)]
        self.single_partition_of_fp32_groups = [torch.zeros(50)]
        self.averaged_gradients = {0: [torch.zeros(20), torch.zeros(30)]}
        self.ipg_buckets = {torch.bfloat16: SimpleNamespace(buffer=[torch.zeros(64)], grads=[], params=[])}
        self.optimizer = torch.optim.Adam(self.single_partition_of_fp32_groups)


class _Zero3:
    """The same for stage 3; a private name is mangled by its class's name."""

    def __init__(self) -> None:
        self.fp16_partitioned_groups_flat = [torch.zeros(50, dtype=torch.bfloat16), None]
        self.fp32_partitioned_groups_flat = [torch.zeros(50)]
        self.grad_partitions_flat_buffer = torch.zeros(50)
        self._DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer = torch.zeros(64)
        self.optimizer = torch.optim.Adam(self.fp32_partitioned_groups_flat)


def _owned(book: OwnershipRegistry) -> dict[tuple[str, str | None], int]:
    found: dict[tuple[str, str | None], int] = {}
    for _, _, category, detail, _ in book.rows():
        found[category, detail] = found.get((category, detail), 0) + 1
    return found


def test_zero_1_and_2() -> None:
    book, optimizer = OwnershipRegistry(lambda: 1, lambda _: True), _Zero12()
    book.add_optimizer(SimpleNamespace(optimizer=optimizer))  # accelerate's wrapper around DeepSpeed's
    book.claim_shards()
    weights, state, gradients, staging = "weights", "optimizer_state", "gradients", "communication"
    assert _owned(book) == {(weights, None): 1, (state, None): 1, (gradients, None): 2, (staging, None): 1}


def test_zero_3_and_its_partitioned_parameters() -> None:
    book, optimizer = OwnershipRegistry(lambda: 1, lambda _: True), _Zero3()
    book.add_optimizer(optimizer)
    model = torch.nn.Linear(4, 4, bias=False)
    partition: Any = model.weight
    partition.ds_tensor = torch.zeros(8, dtype=torch.bfloat16)
    book.add_model(model, "policy")
    book.claim_shards()
    assert _owned(book) == {
        ("weights", "sharded"): 2,
        ("optimizer_state", None): 1,
        ("gradients", None): 1,
        ("communication", None): 1,
    }


def test_a_model_without_an_engine_has_nothing_of_the_kind() -> None:
    book = OwnershipRegistry(lambda: 1, lambda _: True)
    book.add_model(torch.nn.Linear(3, 3), "policy")
    book.add_wrapper(None)
    book.claim_shards()
    assert book.rows() == []
    assert book.bucket_bytes() == []
    assert book.remarks() == []


def test_what_lies_elsewhere_is_counted_apart() -> None:
    """A model whose parameters are on the host while a device is recorded, as with CPU offload."""
    book = OwnershipRegistry(lambda: 1, lambda kind: kind == "cuda")
    model = torch.nn.Linear(8, 4)
    model(torch.randn(2, 8)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    book.add_model(model, "policy")
    book.add_optimizer(optimizer)
    whole = 4 * (8 * 4 + 4)
    counters = sum(4 for _ in model.parameters())
    assert book.elsewhere() == {"weights": whole, "gradients": whole, "optimizer_state": 2 * whole + counters}
    book.claim_models()
    assert book.rows() == []
    assert OwnershipRegistry(lambda: 1, lambda _: True).elsewhere() == {}
