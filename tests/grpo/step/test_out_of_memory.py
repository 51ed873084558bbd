"""Memory that runs out at any operator of a piece, or of a generation, changes nothing of what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memprof.errors import UsageError
from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer, LeanRLOOConfig
from memprof.grpo.paged.rolling import RollingBatch
from memprof.grpo.paged.sampling import Sampling
from memprof.grpo.paged.schedule import GenerationCounts, PoolSize
from memprof.grpo.step import micro_batch, out_of_memory, scoring
from memprof.grpo.techniques import apply
from tests.grpo.trainers import (
    batch,
    build,
    groups,
    loss_and_gradients,
    run_step,
    tiny_llama,
    tiny_mixture,
    with_policies,
    worst,
)

pytestmark = pytest.mark.trl


class RunsOut(TorchDispatchMode):
    """Raise torch's error in place of the operators whose numbers are in ``at``."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.seen, self.raised = set(at), 0, 0

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if self.seen in self.at:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return function(*args, **(kwargs or {}))


@contextmanager
def running_out(monkeypatch: pytest.MonkeyPatch, mode: RunsOut) -> Iterator[None]:
    """Let memory run out inside pieces, and nowhere else."""
    inner = out_of_memory.retry_on_oom

    def retry_on_oom(piece: Any, run: Callable[..., None], *rest: Any, **named: Any) -> None:
        def short(*given: Any) -> None:
            with mode:
                run(*given)

        inner(piece, short, *rest, **named)

    with monkeypatch.context() as patched:
        for module in (micro_batch, scoring):
            patched.setattr(module, "retry_on_oom", retry_on_oom)
        yield


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": True},
    "sums in fp32": {"dtype": torch.bfloat16, "gradient_sums": "fp32", "max_tokens_per_piece": 30},
    "two passes": {"exact_two_pass": "always"},
    "checkpointed": {"checkpointing": "full"},
    "offloaded, tiled": {"checkpointing": "offloaded", "tiled_mlp": 8},
    "accumulated": {"accumulated": True},
    "shared": {"prefix_sharing": True},
    "shared, sums in fp32": {"prefix_sharing": True, "dtype": torch.bfloat16, "gradient_sums": "fp32"},
    "shared, checkpointed, LoRA": {"prefix_sharing": True, "checkpointing": "full", "lora": True},
}


def trained(case: str, folder: Path, **more: Any) -> tuple[Any, Any, int]:
    settings = dict(CASES[case])
    model = tiny_llama(settings.pop("dtype", torch.float32), tie_word_embeddings=case == "accumulated")
    accumulated = settings.pop("accumulated", False)
    settings = {"max_tokens_per_piece": 70, "on_oom": "adapt", **settings, **more}
    ours = build("lean", model, folder, **settings)
    shape = groups(6) if "shared" in case else batch(6)
    return ours, with_policies(ours, shape, beta=0.0), 2 if accumulated else 1


def gradients_of(trainer: Any, inputs: Any, times: int) -> Any:
    """The gradient of one micro-batch on top of ``times - 1`` others."""
    loss, found, _ = loss_and_gradients(trainer, inputs)
    for _ in range(times - 1):
        run_step(trainer, inputs)
        found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    return loss, found


@pytest.mark.parametrize(
    "case", [pytest.param("lora", marks=pytest.mark.heavy), "offloaded, tiled", "shared, checkpointed, LoRA"]
)
def test_the_gradient_is_that_of_the_step_that_had_room(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _lives_through(case, 6, tmp_path, monkeypatch)
    assert "out of memory in a chunk" in caplog.text


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_at_any_moment(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with 300 moments, of which the quick test has six."""
    _lives_through(case, 300, tmp_path, monkeypatch)


def _lives_through(case: str, rounds: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_random = torch.Generator().manual_seed(len(case))
    ours, inputs, times = trained(case, folder)
    adaptation = ours._adaptation
    adaptation.reduce_memory = lambda *_: None  # the next round would not be this case
    counted = RunsOut()
    with running_out(monkeypatch, counted):
        loss, meant = gradients_of(ours, inputs, times)
    operators, lived = counted.seen, 0
    for number in range(rounds):
        adaptation.most_tokens = None
        ours.state.stateful_callbacks.clear()
        first = int(torch.randint(1, operators, (), generator=at_random))
        later = [first + int(torch.randint(1, operators, (), generator=at_random)) for _ in range(number % 4)]
        mode, said = RunsOut(first, *later), ""
        try:
            with running_out(monkeypatch, mode):
                short_loss, found = gradients_of(ours, inputs, times)
        except torch.OutOfMemoryError as error:
            said = str(error)
        assert all(p.requires_grad for name, p in ours.model.named_parameters() if name in meant)
        if said:  # one row three times
            assert "The lean trainer ran out of memory in" in said
            assert mode.raised >= 2
            continue
        assert mode.raised
        assert short_loss == pytest.approx(loss, rel=1e-6)
        assert worst(found, meant) <= (2e-2 if "sums in fp32" in case else 2e-6)  # several threads sum in another order
        lived += 1
    assert lived >= rounds // 2


def test_what_cannot_be_halved_exactly_ends_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = build("lean", tiny_mixture(), tmp_path, on_oom="adapt", max_tokens_per_piece=1000)
    inputs = with_policies(ours, batch(), beta=0.0)
    ours._techniques.reduce_memory = lambda *_: None
    ours._adaptation.reduce_memory = lambda *_: None
    mode = RunsOut(*range(20, 100000))
    with (
        running_out(monkeypatch, mode),
        pytest.raises(torch.OutOfMemoryError, match="set a smaller max_tokens_per_piece"),
    ):
        loss_and_gradients(ours, inputs)


def test_dropout_in_the_network_is_not_tiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each tile draws its own: on a card a fifth too small, a run with dropout in its adapters trained another loss."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.3))
    ours = build("lean", model, tmp_path, on_oom="adapt", max_tokens_per_piece=1000)
    inputs = with_policies(ours, batch(), beta=0.0)
    with (
        running_out(monkeypatch, RunsOut(*range(20, 100000))),
        pytest.raises(torch.OutOfMemoryError, match="dropout, whose halves would draw others"),
    ):
        loss_and_gradients(ours, inputs)
    assert "checkpointing='offloaded'" in caplog.text
    assert "tiled_mlp" not in caplog.text


def test_one_row_that_has_no_room_is_checkpointed_harder_then_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apply, "_LEAST_TILE", 4)
    ours = build("lean", tiny_llama(), tmp_path, on_oom="adapt", max_tokens_per_piece=1)
    inputs = with_policies(ours, batch(), beta=0.0)
    with (
        running_out(monkeypatch, RunsOut(*range(20, 100000))),
        pytest.raises(torch.OutOfMemoryError, match=r"one sequence of \d+ tokens, the smallest"),
    ):
        loss_and_gradients(ours, inputs)
    for kind in ("checkpointing='full'", "checkpointing='offloaded'", "tiled_mlp=8", "tiled_mlp=4"):
        assert kind in caplog.text
    assert "tiled_mlp=4096" not in caplog.text


def test_what_cannot_be_smaller_gets_the_room_of_the_optimizers_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, inputs, times = trained("full", tmp_path)
    _, meant = gradients_of(ours, inputs, times)
    short = RunsOut(*range(20, 100000))

    def park() -> bool:
        there_was, short.at = bool(short.at), set()
        return there_was

    ours._adaptation.reduce_memory, ours._adaptation.park = lambda *_: None, park
    with running_out(monkeypatch, short):
        _, found = gradients_of(ours, inputs, times)
    assert worst(found, meant) <= 3e-6  # halves add up in another order
    assert any("optimizer's state stays in host memory" in line for line in ours._once_log.said)


def test_a_harder_kind_stays_where_the_tile_shrinks_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card, long completions are offloaded by ``auto``; smaller tiles ended that."""
    monkeypatch.setattr(apply, "checkpointing_of", lambda *_: "offloaded")
    techniques = build("lean", tiny_llama(), tmp_path, on_oom="adapt", gradient_checkpointing=True)._techniques
    monkeypatch.undo()
    assert techniques.checkpointing == "offloaded"
    assert techniques.reduce_memory(10_000, draws=False) == "tiled_mlp=4096"
    assert (techniques.checkpointing, techniques.tile) == ("offloaded", 4096)
    assert techniques.reduce_memory(1500, draws=False) == "tiled_mlp=1024"  # larger ones are no tiles
    assert techniques.reduce_memory(256, draws=False) is None


def test_a_card_adapts_unless_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = build("lean", tiny_llama(), tmp_path, on_oom="auto")
    assert ours._adaptation is None  # a CPU raises no such error
    monkeypatch.setattr(type(ours.accelerator), "device", torch.device("cuda"))
    assert ours._adapting(ours.args) is not None
    ours.args.on_oom = "raise"
    assert ours._adapting(ours.args) is None
    ours.args.on_oom = "auto"
    monkeypatch.setenv("MEMPROF_EMULATE_VALUES", "0")  # a simulation asks whether there is room as it is
    assert ours._adapting(ours.args) is None
    monkeypatch.undo()
    monkeypatch.setattr(type(ours.accelerator), "device", torch.device("cuda"))
    ours.args.gradient_checkpointing_kwargs = {"use_reentrant": True}
    assert ours._adapting(ours.args) is None
    assert any("memory that runs out ends the run: on_oom='adapt' needs" in said for said in ours._once_log.said)
    ours.args.on_oom = "adapt"
    with pytest.raises(UsageError, match="on_oom='adapt' needs checkpointing with use_reentrant=False"):
        ours._adapting(ours.args)


def test_auto_is_the_default() -> None:
    assert LeanGRPOConfig.on_oom == LeanRLOOConfig.on_oom == "auto"


def test_a_subclass_may_still_scale_the_loss_of_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for on_oom in ("raise", "adapt"):
        ours = build("lean", tiny_llama(), tmp_path, on_oom=on_oom, max_tokens_per_piece=1000)
        inputs = with_policies(ours, batch(), beta=0.0)
        own = LeanGRPOTrainer.compute_loss
        twice = {"compute_loss": lambda self, *given, own=own, **named: 2 * own(self, *given, **named)}
        monkeypatch.setattr(ours, "__class__", type("Users", (type(ours),), twice))
        found[on_oom] = loss_and_gradients(ours, inputs)[:2]
    assert found["adapt"][0] == found["raise"][0]
    assert worst(found["adapt"][1], found["raise"][1]) == 0.0


def test_the_step_that_has_room_is_the_same_to_the_bit(tmp_path: Path) -> None:
    """Losses, gradient norms, parameters and the optimizer's state, of a run that accumulates and clips."""
    runs = []
    for on_oom in ("raise", "adapt"):
        ours = build("lean", tiny_llama(), tmp_path, on_oom=on_oom, max_tokens_per_piece=40, max_steps=3,
                     gradient_accumulation_steps=2, max_grad_norm=0.5, num_iterations=2)  # fmt: skip
        torch.manual_seed(0)
        ours.train()
        logs = [{k: v for k, v in row.items() if "time" not in k and "second" not in k} for row in
                ours.state.log_history]  # fmt: skip
        state = [dict(ours.optimizer.state[p]) for p in ours.model.parameters()]
        runs.append((logs, [p.detach() for p in ours.model.parameters()], state))
    (logs, weights, state), (same_logs, same_weights, same_state) = runs
    assert str(logs) == str(same_logs)
    assert all(map(torch.equal, weights, same_weights))
    for one, other in zip(state, same_state, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_memory_that_runs_out_elsewhere_is_told_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = build("lean", tiny_llama(), tmp_path, on_oom="adapt", max_steps=1)

    def step(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(ours, "create_scheduler", step)
    with pytest.raises(torch.OutOfMemoryError, match=r"(?s)20.00 MiB.*outside its chunks .* in \w+, where"):
        ours.train()


def test_the_size_is_kept_and_goes_into_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = build("lean", tiny_llama(), tmp_path, on_oom="adapt", max_tokens_per_piece=1000)
    inputs = with_policies(ours, batch(), beta=0.0)
    with running_out(monkeypatch, RunsOut(30, 60)):
        loss_and_gradients(ours, inputs)
    size = ours._step_context().piece_tokens[0]
    assert size < 1000
    other = build("lean", tiny_llama(), tmp_path, on_oom="adapt", max_tokens_per_piece=1000)
    other.state.stateful_callbacks = ours.state.stateful_callbacks
    assert other._step_context().piece_tokens[0] == size


@pytest.mark.parametrize("number", range(6))
def test_a_rolling_batch_goes_on_with_the_same_tokens(number: int) -> None:
    at_random = torch.Generator().manual_seed(number)
    model, draws = tiny_llama().eval(), torch.rand(6, 9, dtype=torch.float64, generator=at_random)
    prompts = [[5, 6, 7], [5, 6, 7], [9, 4, 8, 11], [12], [9, 4, 8, 11], [13, 14]]

    def decoded(mode: RunsOut) -> tuple[list[list[int]], GenerationCounts]:
        work = GenerationCounts()
        whole = RollingBatch(
            model, prompts, Sampling([], draws, frozenset({2, 7}), 9), PoolSize(40, 60), work, lambda: None
        )
        with mode:
            return whole.run(), work

    counted = RunsOut()
    meant, _ = decoded(counted)
    points = torch.randint(1, counted.seen, (2,), generator=at_random).tolist()
    found, work = decoded(RunsOut(*points))
    assert found == meant
    assert work.shrunk is not None
    assert work.shrunk.slots < 40
