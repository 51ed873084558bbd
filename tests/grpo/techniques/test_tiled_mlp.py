"""The MLP in tiles against the MLP at once."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from memprof.errors import UsageError  # noqa: E402
from memprof.grpo.techniques.checkpointing import apply_checkpointing  # noqa: E402
from memprof.grpo.techniques.layers import decoder_layers  # noqa: E402
from memprof.grpo.techniques.tiled_mlp import _tiled, apply_tiled_mlp  # noqa: E402
from tests.grpo.techniques.test_checkpointing import operators, step  # noqa: E402
from tests.grpo.tiny_models import FAMILIES, assert_same, body_of, build, tokens, without_weights  # noqa: E402


@pytest.mark.parametrize("kind", ["none", "full", "selective", "offloaded", "mlp"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_whole(family: str, kind: str) -> None:
    model = build(family)
    meant, true = step(model)
    apply_tiled_mlp(model, 4)
    apply_checkpointing(model, kind)
    found, mine = step(model)
    torch.testing.assert_close(found, meant, rtol=1e-6, atol=1e-6)
    assert_same(mine, true, 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["none", "full"])
def test_adapters_and_autocast(kind: str, autocast: bool) -> None:
    """Backward inside the autocast region, as some loops have it, twice: no cast without a gradient stays."""
    model = build(lora=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        meant, true = step(model)
        apply_tiled_mlp(model, 5)
        apply_checkpointing(model, kind)
        for _ in range(2):
            found, mine = step(model)
            torch.testing.assert_close(found, meant, rtol=2e-2, atol=2e-2)
            assert_same(mine, true, 2e-2 if autocast else 1e-5)


def test_bf16_parameter_gradients_are_summed_in_fp32() -> None:
    """Error against float64 no larger than that of one product."""
    errors = []
    for tile in (64, 2):
        torch.manual_seed(0)
        mlp = decoder_layers(build().to(torch.bfloat16))[0].mlp
        true = decoder_layers(build())[0].mlp.double()
        true.load_state_dict(mlp.state_dict())
        x = torch.randn(64, 32, dtype=torch.bfloat16)
        _tiled(mlp, mlp, x, _tile=tile).sum().backward()
        true(x.double()).sum().backward()
        pairs = zip(mlp.parameters(), true.parameters(), strict=True)
        errors.append(sum(float((a.grad.double() - b.grad).norm() / b.grad.norm()) for a, b in pairs))
    assert errors[1] <= errors[0] * 1.3


@pytest.mark.parametrize("kind", ["none", "full"])
def test_dropout_draws_the_same_numbers_in_backward(kind: str) -> None:
    """The gradient belongs to the forward that ran: checked by a step along it."""
    model = build(lora=True, lora_dropout=0.5)
    apply_tiled_mlp(model, 4)
    apply_checkpointing(model, kind)
    _, first = step(model)
    _, again = step(model)
    assert_same(first, again, 1e-6)
    name, parameter = next((n, p) for n, p in model.named_parameters() if "down_proj.lora_B" in n)
    losses = []
    for shift in (1e-3, -1e-3):
        with torch.no_grad():
            parameter += shift * first[name]
        hidden, _ = step(model)
        losses.append(_loss(hidden))
        with torch.no_grad():
            parameter -= shift * first[name]
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(float(first[name].norm() ** 2), rel=2e-2)


def _loss(hidden: Any) -> float:
    from tests.grpo.tiny_models import weighted

    return float(weighted(hidden))


@pytest.mark.parametrize("tiles_first", [False, True])
@pytest.mark.parametrize("kind", ["full", "mlp"])
def test_checkpointing_does_not_run_the_mlp_an_extra_time(kind: str, tiles_first: bool) -> None:
    """Forward, and once in backward: the recomputed part stops before the tiles, whichever was applied first."""
    model = build()
    for tiles in (tiles_first, not tiles_first):
        apply_tiled_mlp(model, 4) if tiles else apply_checkpointing(model, kind)
    counts = operators(model)
    assert counts["silu"] == 2 * 2 * 6  # two layers, two times, six tiles of 22 tokens


@pytest.mark.parametrize("kind", ["none", "full"])
def test_peak_is_lower(kind: str, tmp_path: Any) -> None:
    """By the tensor trace, with an inner width that makes the MLP the peak."""
    import memprof

    def peak(tile: int | None) -> int:
        gc.collect()  # the model before
        model = build(intermediate_size=1024)
        if tile:
            apply_tiled_mlp(model, tile)
        apply_checkpointing(model, kind)
        path = tmp_path / f"{tile}.pickle"
        with memprof.record(path, model=model):
            body_of(model)(input_ids=tokens(250)[None], use_cache=False).last_hidden_state.sum().backward()
        return int(memprof.analyze(memprof.load_snapshot(path)).to_dict()["peak"]["allocated_bytes"])

    inner = 250 * 1024 * 4
    assert peak(32) < peak(None) - 2 * inner


def test_frozen_network_and_no_gradients() -> None:
    mlp = decoder_layers(build())[0].mlp
    x = torch.randn(2, 9, 32)
    meant = mlp(x)
    mlp.requires_grad_(False)
    assert torch.allclose(_tiled(mlp, mlp, x, _tile=4), meant, atol=1e-6)
    assert not _tiled(mlp, mlp, x, _tile=4).requires_grad
    x.requires_grad_()
    _tiled(mlp, mlp, x, _tile=4).sum().backward()
    mine, x.grad = x.grad, None
    mlp(x).sum().backward()
    torch.testing.assert_close(mine, x.grad)


def test_taken_back() -> None:
    model = build()
    undo = apply_tiled_mlp(model, 4)
    assert "forward" in decoder_layers(model)[0].mlp.__dict__
    undo()
    assert "forward" not in decoder_layers(model)[0].mlp.__dict__


def test_runs_on_fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
        apply_tiled_mlp(model, 4)
        apply_checkpointing(model, "full")
        body_of(model)(
            input_ids=torch.zeros(1, 16, dtype=torch.int64), use_cache=False
        ).last_hidden_state.sum().backward()
        assert all(p.grad is not None for p in body_of(model).parameters())


def test_mistakes_are_named() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        apply_tiled_mlp(build(), 0)
    with pytest.raises(UsageError, match="mixture of experts"):
        apply_tiled_mlp(build("mixtral", num_local_experts=2), 4)
    with pytest.raises(UsageError, match="BloomMLP requires more than hidden states"):
        apply_tiled_mlp(without_weights("bloom"), 4)
