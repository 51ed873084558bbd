"""Weights and optimizer state wait on the host while an engine generates, and come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from memprof.errors import UsageError  # noqa: E402
from memprof.grpo import LeanGRPOConfig  # noqa: E402
from memprof.grpo.cpu_offload import WeightOffload  # noqa: E402
from memprof.grpo.support import check_offload_of, check_supported  # noqa: E402
from tests.grpo.trainers import build, logged, tiny_llama  # noqa: E402

pytestmark = pytest.mark.trl


class Engine:
    """Obeys what TRL asks of ``vllm_generation``: weights are read in ``sync_weights``; answers are of its own copy."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seen: list[dict[str, Any]] = []
        self.where: list[set[int]] = []

    def sync_weights(self) -> None:
        self.seen.append({name: p.detach().clone() for name, p in self.trainer.model.named_parameters()})
        self.where.append({p.data_ptr() for p in self.trainer.model.parameters()})

    def generate(self, prompts: list[list[int]], **_: Any) -> Any:
        new = [[5 + i % 7, 9 + len(ids) % 5, 2] for i, ids in enumerate(prompts)]
        return prompts, new, [[[-1.0]] * len(ids) for ids in new], None


def with_engine(trainer: Any, parks: bool) -> Engine:
    """Put the engine where TRL has vLLM's; the trainer is built without, since none is installed."""
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_correction = False
    trainer._last_loaded_step = -1
    trainer.vllm_generation = Engine(trainer)
    trainer.args.park_weights = parks
    return trainer.vllm_generation  # type: ignore[no-any-return]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_training_is_the_same(lora: bool, tmp_path: Path) -> None:
    """Losses to the bit, the weights that the engine reads, and where they are then."""
    logs, engines, homes = {}, {}, {}
    for parks in (False, True):
        trainer = build("lean", tiny_llama(), tmp_path / str(parks), lora=lora, max_steps=3)
        engines[parks] = with_engine(trainer, parks)
        trainer.train()
        logs[parks], homes[parks] = logged(trainer), {p.data_ptr() for p in trainer.model.parameters()}
        if parks:
            held = [*trainer.model.parameters(), *(t for s in trainer.optimizer.state.values() for t in s.values())]
            assert trainer._offload.parked_bytes == sum(t.nbytes for t in held)
    assert logs[True] == logs[False]
    for ours, theirs in zip(engines[True].seen, engines[False].seen, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert engines[True].where[-1].isdisjoint(homes[True])
    assert engines[False].where[-1] == homes[False]


def test_what_shares_memory_shares_it_again() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    flat = torch.randn(32)
    model["a"].weight.data, model["b"].weight.data = flat[:16].view(4, 4), flat[16:].view(4, 4).t()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = list(model.parameters())
    with WeightOffload(torch.device("cpu"), lambda: None).parked(model, None):
        model["a"].bias.data.add_(1)
    assert all(one is other for one, other in zip(kept, model.parameters(), strict=True))
    weight, other = model["a"].weight, model["b"].weight
    assert weight.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert other.stride() == (1, 4)
    for name, value in before.items():
        assert torch.equal(dict(model.named_parameters())[name], value + (name == "a.bias"))


def test_it_comes_back_after_an_error() -> None:
    model = torch.nn.Linear(3, 3)
    value, parking = model.weight.detach().clone(), WeightOffload(torch.device("cpu"), lambda: None)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="engine"), parking.parked(model, None):
            raise RuntimeError("engine")
        assert torch.equal(model.weight, value)
    assert parking._host.used_bytes == 0


def test_moments_that_are_made_of_several_tensors_are_parked_too() -> None:
    """As torchao's, of codes and scales; torch's own subclass for tests is made of two."""
    from torch.testing._internal.two_tensor import TwoTensor

    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    codes, scales = torch.randn(3, 3), torch.randn(3, 3)
    before = codes.clone(), scales.clone(), codes.data_ptr()
    optimizer.state[model.weight]["exp_avg"] = TwoTensor(codes, scales)
    parking = WeightOffload(torch.device("cpu"), lambda: None)
    with parking.parked(model, optimizer):
        assert codes.data_ptr() != before[2]
    assert parking.parked_bytes == (9 + 3 + 2 * 9) * 4
    kept = optimizer.state[model.weight]["exp_avg"]
    assert kept.a is codes
    assert torch.equal(codes, before[0])
    assert torch.equal(kept.b, before[1])


@pytest.mark.parametrize("way", ["weights", "arguments", "model_init_kwargs", "loaded"])
def test_quantised_weights_are_not_parked(way: str, tmp_path: Path) -> None:
    """PEFT merges an adapter into new quantised weights; the old ones would come back to nobody."""
    args = LeanGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, park_weights=True)
    model, config = tiny_llama(), {"quant_method": "bitsandbytes", "load_in_4bit": True}
    check_offload_of(args, model)
    if way == "weights":
        args.weights = "nf4"
    elif way == "model_init_kwargs":
        args.model_init_kwargs = {"quantization_config": config}
    elif way == "loaded":
        model.config.quantization_config = config
    with pytest.raises(UsageError, match=r"quantized ones are replaced .* load the base in bf16\.$"):
        check_offload_of(args, model, config if way == "arguments" else None)
    args.park_weights = False
    check_offload_of(args, model, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "set use_vllm=True"), ({"use_vllm": True, "vllm_mode": "server"}, "vllm_mode='colocate'"),
     ({"use_vllm": True, "vllm_mode": "colocate", "deepspeed": "zero.json"}, "DeepSpeed shards them")],
)  # fmt: skip
def test_where_there_is_nothing_to_make_room_for(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    args = LeanGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, park_weights=True)
    for name, value in settings.items():
        setattr(args, name, value)
    with pytest.raises(UsageError, match=message):
        check_supported(args)


@pytest.mark.parametrize("name", ["FSDP", "DeepSpeed"])
def test_sharding_by_accelerate_launch_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = LeanGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, park_weights=True)
    args.use_vllm, args.vllm_mode = True, "colocate"
    check_supported(args)
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "yes")
    with pytest.raises(UsageError, match=f"but {name} shards them"):
        check_supported(args)
