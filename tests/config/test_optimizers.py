"""The table of optimizers holds what transformers knows, what the simulator makes, and what torch's own keep."""

from __future__ import annotations

import pytest

from memprof.config.optimizers import OPTIMIZERS, TABLE, nearest, optimizer, why_not_simulated
from memprof.config.settings import Settings
from memprof.errors import UsageError


def test_a_name_that_has_a_row_is_one_of_transformers() -> None:
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    known = {name.value for name in names}
    assert set(TABLE) - {"none"} <= known | {"paged_adamw", "galore_adamw_8bit", "apollo_adamw_layerwise"}
    assert {name for name in known if name.endswith("_layerwise") or "lomo" in name} == {
        name for name, row in TABLE.items() if row.steps_in_backward and name in known
    }


def test_only_names_in_the_table_can_be_simulated() -> None:
    for name in OPTIMIZERS:
        assert Settings(model="m", optim=name).optim == name
        assert nearest(name) == name


def test_every_optimizer_of_transformers_is_simulated_or_says_why_not() -> None:
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    for name in [*(name.value for name in names), "muon"]:
        assert (name in OPTIMIZERS) != bool(why_not_simulated(name)), name
    with pytest.raises(UsageError, match="'galore_adamw' is not simulated: it stores its moments in a low-rank"):
        Settings(model="m", optim="galore_adamw")
    with pytest.raises(UsageError, match=r"'AdamW' \(did you mean adamw_torch"):
        Settings(model="m", optim="AdamW")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("galore_adamw_8bit", "adamw_8bit"),
        ("paged_ademamix_8bit", "paged_adamw_8bit"),
        ("lomo", "adamw_torch"),
        ("an_optimizer_of_tomorrow", "adamw_torch"),
    ],
)
def test_others_are_simulated_as_the_nearest(name: str, near: str) -> None:
    assert nearest(name) == near
    assert optimizer(name).bits == optimizer(near).bits


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_as_large_as_torchs_own(name: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=getattr(torch, dtype)))
    made = kind.get(name, torch.optim.AdamW)([parameter])
    parameter.grad = torch.ones_like(parameter)
    made.step()
    state = [part for part in made.state[parameter].values() if torch.is_tensor(part) and part.numel() > 1]
    held = sum(part.numel() * part.element_size() for part in state)
    assert optimizer(name).state_bytes(1000, parameter.element_size()) == held


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if row.bits and not row.like])
def test_state_is_as_large_as_what_the_simulator_makes(name: str) -> None:
    torch = pytest.importorskip("torch")
    from memprof.simulate.trainer.optimizers import modelled_optimizer

    model = torch.nn.Sequential(torch.nn.Embedding(64, 256), torch.nn.Linear(256, 512, bias=False))
    sizes = [p.numel() for p in model.parameters()]
    away: list[int] = []
    made = modelled_optimizer(name, model, away.append)
    assert made is not None
    kind, arguments = made
    running = kind(model.parameters(), **arguments)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    running.step()
    kept = [part for state in running.state.values() for key, part in state.items() if key[:5] in ("state", "absma")]
    held = sum(part.numel() * part.element_size() for part in kept) + sum(away)
    row = optimizer(name)
    assert row.state_bytes(sum(sizes), 4, sizes[0] if row.exact_embeddings else 0) == held
    assert bool(away) == row.paged
