"""Stochastic rounding: what is drawn follows from seed, step and parameter, and the update needs little beside it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memprof import load_snapshot, record  # noqa: E402
from memprof.grpo.techniques import rounding  # noqa: E402
from memprof.grpo.techniques.rounding import StochasticAdamW, drawing_alike, round_to_bf16  # noqa: E402
from memprof.timeline.timeline import build_timeline  # noqa: E402
from tests.forked import found_by_two_ranks  # noqa: E402

MIB = 2**20


def trained(steps: int, *, seed: int = 0, noise: int = 0, optimizer: Any = None, count: int = 2) -> list[Any]:
    """Equal bf16 weights after steps with equal gradients; ``noise`` moves torch's own generator."""
    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 6000).to(torch.bfloat16)) for _ in range(count)]
    made = StochasticAdamW(weights, lr=1e-3, seed=seed) if optimizer is None else optimizer(weights)
    torch.manual_seed(noise)
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.sin(torch.arange(6000.0) + step).to(torch.bfloat16)
        made.step()
    return [weight.detach() for weight in weights]


def test_it_draws_the_same_whatever_torchs_generator_did() -> None:
    assert all(torch.equal(a, b) for a, b in zip(trained(5, noise=1), trained(5, noise=2), strict=True))


def test_torchs_generator_is_left_alone() -> None:
    trained(3, noise=7)
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), after)


def test_seeds_and_parameters_and_steps_draw_differently() -> None:
    one, other = trained(1)
    assert not torch.equal(one, other), "two parameters that are alike"
    assert not torch.equal(one, trained(1, seed=1)[0])
    assert rounding._mixed(0, 1, 2) != rounding._mixed(0, 2, 1)
    assert len({rounding._mixed(3, step, 0) for step in range(1000)}) == 1000


def test_a_resumed_run_draws_on() -> None:
    gradient = torch.cos(torch.arange(300.0)).to(torch.bfloat16)
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 300).to(torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=1e-3, seed=9)

    def steps(count: int, weight: Any, optimizer: Any) -> None:
        for _ in range(count):
            weight.grad = gradient.clone()
            optimizer.step()

    steps(2, weight, optimizer)
    again = torch.nn.Parameter(weight.detach().clone())
    resumed = StochasticAdamW([again], lr=1e-3, seed=9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, made in ((weight, optimizer), (again, resumed)):
        steps(3, one, made)
    assert torch.equal(weight, again)
    assert copy.deepcopy(resumed)._seed == 9


@pytest.mark.parametrize("chunk", [7, 64, 10_000])
@pytest.mark.parametrize("laid_out", ["alike", "transposed", "gradient transposed", "scalar"])
def test_chunks_are_torchs_adamw(chunk: int, laid_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_CHUNK", chunk)
    start = torch.linspace(-1, 1, 60).view(12, 5)
    start = {"transposed": start.t(), "scalar": start[0, 0]}.get(laid_out, start)
    weights = [torch.nn.Parameter(start.clone(memory_format=torch.preserve_format)) for _ in range(2)]
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizers = [torch.optim.AdamW([weights[0]], **settings), StochasticAdamW([weights[1]], **settings)]
    for step in range(5):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.sin(torch.arange(float(weight.numel())) + step).view(weight.shape)
            if laid_out == "gradient transposed":
                weight.grad = weight.grad.t().contiguous().t()
            optimizer.step()
    assert torch.allclose(*weights, atol=1e-6)


def test_an_update_needs_at_most_64_mib_beside_a_large_parameter(tmp_path: Path) -> None:
    """6 chunks of bf16; it was 31 bytes an element of the largest parameter, 16 GB for an 8B model's embedding."""
    weight = torch.nn.Parameter(torch.zeros(6 * rounding._CHUNK - 5, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([weight], lr=1e-3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with record(tmp_path / "step.pickle", kind="trace"):
        optimizer.step()
    line = build_timeline(load_snapshot(tmp_path / "step.pickle"))
    beside = int(line.active.max() - line.active[0])
    assert 16 * MIB < beside <= 64 * MIB


def test_an_optimizer_that_draws_by_itself_can_be_told_what() -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for weight in self.param_groups[0]["params"]:
                    weight.add_(torch.randn(weight.shape))

    def of(seed: int) -> Any:
        return lambda weights: drawing_alike(Noisy, seed)(weights, lr=1.0)

    first, second = (trained(2, noise=n, optimizer=of(5), count=1)[0] for n in (1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, trained(2, optimizer=of(6), count=1)[0])
    after = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), after)
    assert drawing_alike(Noisy, 0).__name__ == "Noisy"


def test_ranks_stay_equal_to_the_bit(tmp_path: Path) -> None:
    """Two gloo processes under DDP: 50 steps. An optimizer that draws from each rank's generator drifts at once."""
    first, second = found_by_two_ranks("tests.grpo.techniques.rounding_ranks", tmp_path)
    for kind in ("ours", "alike"):
        assert first[kind] == second[kind]
        assert first[kind]["1"] != first[kind]["50"]
    assert first["apart"]["1"] != second["apart"]["1"], "else this test shows nothing"


def test_rounding_is_right_on_average_and_takes_a_neighbour() -> None:
    value = 1 + 2**-9  # a quarter of the way to bf16's next number
    rounded = round_to_bf16(torch.full((1 << 16,), value), torch.Generator().manual_seed(0)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2**-7}
    deviation = 2**-7 * (0.25 * 0.75) ** 0.5 / (1 << 8)
    assert abs(float(rounded.double().mean()) - value) < 5 * deviation


def test_what_is_no_number_stays_none() -> None:
    largest_nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([float("inf"), float("-inf")]), largest_nan])
    rounded = round_to_bf16(values, torch.Generator().manual_seed(0))
    assert rounded[:2].tolist() == [float("inf"), float("-inf")]
    assert bool(rounded[2].isnan())
