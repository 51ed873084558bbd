"""Attribution of real runs recorded on this CPU, then stripped of all that memprof knew of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memprof import record
from memprof.analysis.analysis import analyze
from memprof.snapshot import snapshot_from_raw
from memprof.snapshot.unpickle import read_plain

pytestmark = pytest.mark.usefixtures("only_new_tensors")

WIDTH, VOCABULARY, LAYERS = 256, 2048, 6


class Graphs(nn.Module):
    """Passes messages along the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = x + torch.relu(layer(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])))
        return x.mean(0)


def graph(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(512, (size,)), torch.randint(size, (2, 4 * size))


def graphs_behind_data_parallel() -> None:
    """Two epochs: many graphs of every size without gradients, then some with them."""
    model = nn.DataParallel(Graphs())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.no_grad():
            for size in range(64, 1024, 64):
                model(*graph(size))
        for size in (300, 900, 500):
            model(*graph(size)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


class Packed(nn.Module):
    """A frozen matrix of four bits a value, unpacked in every forward, and an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randint(0, 255, (WIDTH * WIDTH // 2,), dtype=torch.uint8), requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH).to(torch.bfloat16)
        self.adapted = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = torch.stack((self.packed & 15, self.packed >> 4)).view(WIDTH, WIDTH).float() - 8
        y = self.norm(x) @ matrix
        return x + (y + self.b(self.a(x)) if self.adapted else y)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Packed() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return (x @ self.embed.weight.T).log_softmax(-1)


def adapters_on_packed_weights() -> Policy:
    """GRPO's passes with the adapter switched off as the reference; what PEFT does to such a model came before."""
    from peft import prepare_model_for_kbit_training

    model = Policy()
    model.is_loaded_in_4bit = True
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    for layer in model.layers:
        for part in (layer.a, layer.b):
            part.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for _ in range(2):
        ids = torch.randint(VOCABULARY, (2, 32))
        for adapted in (True, False):
            for layer in model.layers:
                layer.adapted = adapted
            with torch.no_grad():
                model(ids)
        for layer in model.layers:
            layer.adapted = True
        model(ids)[..., 0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def stripped(path: Path, run: Any) -> tuple[dict[str, Any], Any]:
    """The report of a run whose file says of it what a stranger's would, and what the run returned."""
    torch.manual_seed(0)
    with record(path, kind="trace"):
        result = run()
    raw = read_plain(path)
    del raw["memprof"]
    for event in raw["device_traces"][0]:
        event.pop("user_metadata", None)
    return analyze(snapshot_from_raw(raw)).to_dict(), result


def test_graphs_behind_data_parallel_are_no_generation(tmp_path: Path) -> None:
    report, _ = stripped(tmp_path / "graphs.pickle", graphs_behind_data_parallel)
    phases = {p["phase"] for p in report["phases"]}
    assert "generate" not in phases
    assert phases >= {"forward", "backward", "optimizer_step"}
    assert not any(report["own_peaks"].get(c) for c in ("kv_cache", "value_model", "reference_model"))
    # A trace rounds each of the three biases of 256 bytes up to 512.
    assert report["own_peaks"]["weights"] == sum(p.nbytes for p in Graphs().parameters()) + 3 * 256


def evaluation_of_short_rows() -> None:
    """Train on a batch; then look at rows one by one, each with the same few tokens, without gradients."""
    model = Graphs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes, edges = graph(600)
    for _ in range(2):
        model(nodes, edges).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for start in range(0, 80, 16):
                model(nodes[start : start + 16], edges[:, :1] % 16)


def test_a_plain_pass_without_gradients_is_no_generation(tmp_path: Path) -> None:
    report, _ = stripped(tmp_path / "evaluation.pickle", evaluation_of_short_rows)
    assert "generate" not in {p["phase"] for p in report["phases"]}


def test_packed_weights_with_adapters_are_all_weights(tmp_path: Path) -> None:
    # No function here is called after a reference model: frames that say so are evidence of one.
    report, model = stripped(tmp_path / "packed.pickle", adapters_on_packed_weights)
    held = report["peak"]["categories"]
    assert not report["own_peaks"].get("reference_model")
    parameters = sum(p.nbytes for p in model.parameters())
    assert held["weights"] + held.get("adapters", 0) == pytest.approx(parameters, rel=0.1)
