"""Engines in this process by the structure of vLLM's objects, which is not installed here, and servers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memprof import analyze, phase, record
from memprof.instrument.attach import attach
from memprof.recording.system.inference_engine import engine_of, engine_parts, runner_of, server_note
from memprof.vocabulary import Category


class Buffer:
    """As vLLM's CpuGpuBuffer: objects of its packages are looked into."""

    __module__ = "vllm.v1.utils"

    def __init__(self) -> None:
        self.cpu = torch.zeros(7)
        self.vllm_config = SimpleNamespace(tensor=torch.zeros(5))


class Runner:
    """As vLLM's model runner."""

    __module__ = "vllm.v1.worker.cpu_model_runner"

    def __init__(self) -> None:
        self.model = torch.nn.Linear(64, 64)
        self.kv_caches = [torch.zeros(1 << 16, dtype=torch.int8), [torch.zeros(1 << 8), torch.zeros(1 << 9)]]
        self.input_batch = {"rows": [Buffer()]}
        self.input_batch["again"] = self.input_batch  # type: ignore[assignment]


def llm() -> Any:
    worker = SimpleNamespace(model_runner=Runner())
    executor = SimpleNamespace(driver_worker=worker)
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))


def test_what_an_engine_has_is_found_from_each_of_its_objects() -> None:
    whole = llm()
    runner = whole.llm_engine.model_executor.driver_worker.model_runner
    assert runner_of(whole) is runner_of(whole.llm_engine) is runner_of(runner) is runner
    assert runner_of(whole.llm_engine.model_executor.driver_worker) is runner
    assert runner_of(None) is runner_of(torch.nn.Linear(2, 2)) is runner_of(SimpleNamespace()) is None
    found: dict[Category, int] = {}
    for tensor, category in {t.data_ptr(): (t, c) for _, t, c in engine_parts(runner)}.values():
        found[category] = found.get(category, 0) + tensor.nbytes
    assert found[Category.KV_CACHE] == (1 << 16) + 4 * (1 << 8) + 4 * (1 << 9)
    assert found[Category.INFERENCE_ENGINE] == 4 * (64 * 64 + 64 + 7)
    trainer = SimpleNamespace(vllm_generation=SimpleNamespace(llm=whole))
    assert engine_of(trainer) is engine_of(SimpleNamespace(llm=whole)) is whole
    assert engine_of(SimpleNamespace(engine=SimpleNamespace(engine=whole))) is whole


def test_an_attached_engine_is_not_unattributed(tmp_path: Path) -> None:
    """Older than the recording: only who has a tensor tells what it is."""
    whole = llm()
    watch = attach(whole, role="rollout", output_dir=tmp_path)
    with watch.phase("generate"):
        torch.zeros(4)
    peak = analyze(watch.detach()).own_peaks
    assert peak[Category.KV_CACHE.value] == (1 << 16) + 4 * (1 << 8) + 4 * (1 << 9)
    assert peak[Category.INFERENCE_ENGINE.value] == 4 * (64 * 64 + 64 + 7)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"vllm_server_host": "node7", "vllm_server_port": 8765}, "the vLLM server at http://node7:8765: its memory"),
        ({"vllm_server_base_url": "https://me:secret@node8/x"}, "the vLLM server at https://node8: its memory"),
    ],
)
def test_an_engine_in_another_process_is_named(given: dict[str, Any], says: str) -> None:
    args = SimpleNamespace(use_vllm=True, vllm_mode="server", device=torch.device("cuda"), **given)
    note = server_note(SimpleNamespace(args=args), redact=False)
    assert note is not None
    assert says in note
    assert "secret" not in note
    assert "Other processes" in note
    redacted = server_note(SimpleNamespace(args=args), redact=True)
    assert redacted is not None
    assert "node" not in redacted
    args.vllm_mode = "colocate"
    assert server_note(SimpleNamespace(args=args), redact=False) is None


def test_a_tensor_of_a_parameters_size_is_no_adapter_beside_a_large_kv_cache(tmp_path: Path) -> None:
    """Weights that are small beside everything else were taken for adapters, though the rest was the engine's."""
    whole, policy = llm(), torch.nn.Linear(64, 64)
    whole.llm_engine.model_executor.driver_worker.model_runner.kv_caches.append(torch.zeros(1 << 20))
    optimizer, unknown = torch.optim.SGD(policy.parameters(), lr=0.1), torch.zeros(64, 64)
    with record(tmp_path / "run.pickle", model=policy, optimizer=optimizer) as session:
        session.owners.add_inference_engine(whole)
        with phase("forward"):
            loss = policy(torch.ones(4, 64)).square().mean()
        with phase("backward"):
            loss.backward()
        with phase("optimizer_step"):
            optimizer.step()
    peak = analyze(tmp_path / "run.pickle").own_peaks
    assert peak.get(Category.ADAPTERS.value, 0) == 0
    assert peak[Category.WEIGHTS.value] == 4 * (64 * 64 + 64)
    assert unknown.nbytes == 4 * 64 * 64  # alive to the end
