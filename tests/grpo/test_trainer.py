"""The lean trainer's loss, gradients and metrics against TRL's own, from equal weights on equal micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.errors import UsageError
from tests.grpo.trainers import (
    TOLERANCE,
    VOCABULARY,
    assert_same_step,
    batch,
    build,
    groups,
    loss_and_gradients,
    tiny_llama,
    with_policies,
    worst,
)

pytestmark = pytest.mark.trl

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


@pytest.fixture(scope="module", params=[False, True], ids=["full", "lora"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """TRL's trainer and the lean one, two or three rows to a piece."""
    model, folder = tiny_llama(), tmp_path_factory.mktemp("pair")
    return tuple(  # type: ignore[return-value]
        build(kind, model, folder, lora=request.param, **extra)
        for kind, extra in (("trl", {}), ("lean", {"max_tokens_per_piece": 40}))
    )


@pytest.fixture(autouse=True)
def _as_it_was(request: pytest.FixtureRequest) -> Any:
    """Settings that a test changes on the shared pair are put back."""
    pair = request.getfixturevalue("pair") if "pair" in request.fixturenames else ()
    kept = [(dict(vars(trainer)), dict(vars(trainer.args))) for trainer in pair]
    yield
    for trainer, (own, args) in zip(pair, kept, strict=True):
        vars(trainer).update(own)
        vars(trainer.args).update(args)


def set_both(pair: tuple[Any, Any], **values: Any) -> None:
    """Settings that TRL copies to the trainer, and those it reads from ``args``."""
    for trainer in pair:
        for name, value in values.items():
            setattr(trainer.args if name not in vars(trainer) else trainer, name, value)


def assert_same(pair: tuple[Any, Any], inputs: Any, *, beta: float = 0.0) -> None:
    theirs, ours = pair
    assert_same_step(theirs, ours, with_policies(theirs, inputs, beta=beta))


@pytest.mark.parametrize("off_policy", [True, False], ids=["off_policy", "on_policy"])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss(pair: tuple[Any, Any], loss_type: str, level: str, beta: float, off_policy: bool) -> None:
    set_both(pair, loss_type=loss_type, importance_sampling_level=level, beta=beta)
    assert_same(pair, batch(off_policy=off_policy), beta=beta)


@pytest.mark.parametrize("two_pass", ["auto", "always"])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_entropy_quantile": 0.4},
        {"_entropy_bonus_enabled": True, "entropy_coef": 0.1},
        {"_entropy_bonus_enabled": True, "entropy_coef": 0.1, "top_entropy_quantile": 0.4},
        {"off_policy_mask_threshold": 0.1},
        {"delta": 1.1},
        {"use_bias_correction_kl": False},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_terms_and_masks(pair: tuple[Any, Any], settings: dict[str, Any], two_pass: str) -> None:
    set_both(pair, **settings, exact_two_pass=two_pass, beta=0.04)
    assert_same(pair, batch(), beta=0.04)


def test_adaptive_entropy_keeps_one_window(pair: tuple[Any, Any]) -> None:
    """The controller adds up the entropies of a window: pieces must not count twice."""
    set_both(pair, _entropy_bonus_enabled=True, use_adaptive_entropy=True, entropy_coef=0.1, _last_world_entropy=0.0)
    for trainer in pair:
        trainer.accelerator.gradient_state._set_sync_gradients(False)
    try:
        assert_same(pair, batch())
        windows = [trainer._entropy_window_stats for trainer in pair]
    finally:
        for trainer in pair:
            trainer.accelerator.gradient_state._set_sync_gradients(True)
    assert torch.allclose(windows[0], windows[1], rtol=1e-5)


def test_tool_tokens_are_read_but_not_learnt(pair: tuple[Any, Any]) -> None:
    inputs = batch()
    inputs["tool_mask"] = (torch.arange(13) % 5 != 2).long().expand(4, -1) * inputs["completion_mask"]
    set_both(pair, loss_type="bnpo")
    assert_same(pair, inputs)


def test_importance_ratio_of_an_engine(pair: tuple[Any, Any]) -> None:
    inputs = batch()
    inputs["importance_sampling_ratio"] = torch.rand(4, 13) + 0.5
    set_both(pair, use_vllm=True, vllm_importance_sampling_correction=True)
    assert_same(pair, inputs)


def test_advantages_by_token(pair: tuple[Any, Any]) -> None:
    """Subclasses give one advantage a token."""
    inputs = batch()
    inputs["advantages"] = torch.randn(4, 13)
    assert_same(pair, inputs)


@pytest.mark.parametrize("sharing", [False, True])
def test_zero_advantages_have_no_backward(pair: tuple[Any, Any], sharing: bool) -> None:
    inputs = groups()
    inputs["advantages"][[1, 3]] = 0.0
    set_both(pair, loss_type="grpo", prefix_sharing=sharing)
    with_graph: list[int] = []
    body = pair[1]._step_context().base_model().model
    hook = body.layers[0].register_forward_hook(
        lambda module, args, out: with_graph.append(args[0].shape[1] if torch.is_grad_enabled() else 0)
    )
    try:
        assert_same(pair, inputs)
        skipped = sum(with_graph)
        inputs["advantages"][:] = 0.0  # nothing to learn at all: gradients are zeros, not None
        for trainer in pair:
            _, gradients, _ = loss_and_gradients(trainer, with_policies(pair[0], inputs, beta=0.0))
            assert gradients
            assert not any(gradient.any() for gradient in gradients.values())
        with_graph.clear()
        inputs["advantages"][:] = 1.0
        loss_and_gradients(pair[1], with_policies(pair[0], inputs, beta=0.0))
    finally:
        hook.remove()
    assert 0 < skipped < sum(with_graph)


def test_a_row_without_a_completion(pair: tuple[Any, Any]) -> None:
    """``mask_truncated_completions`` leaves rows with nothing to learn."""
    inputs = batch()
    inputs["completion_mask"][1] = 0
    assert_same(pair, inputs)


def test_no_row_with_a_completion(pair: tuple[Any, Any]) -> None:
    inputs = batch()
    inputs["completion_mask"][:] = 0
    for trainer in pair:
        loss, gradients, _ = loss_and_gradients(trainer, with_policies(pair[0], inputs, beta=0.0))
        assert loss == 0.0
        assert gradients
        assert all(not gradient.any() for gradient in gradients.values())


def test_masks_with_holes_take_trls_path(pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    inputs = batch()
    inputs["completion_mask"][:, 1] = 0
    assert_same(pair, inputs)
    assert "masks have holes" in caplog.text


def test_evaluation(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    inputs = with_policies(theirs, batch(), beta=0.0)
    losses = []
    for trainer in pair:
        trainer.model.eval()
        with torch.no_grad():
            losses.append(trainer.compute_loss(trainer.model, dict(inputs)).item())
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
    assert ours._metrics["eval"].keys() == theirs._metrics["eval"].keys()


def test_an_overridden_loss_is_exact_too(pair: tuple[Any, Any]) -> None:
    """Whatever a subclass computes from the log-probabilities: here a term over the whole batch at once."""
    for trainer in pair:
        plain = trainer._compute_loss

        def other(model: Any, inputs: Any, plain: Any = plain, trainer: Any = trainer) -> torch.Tensor:
            loss: torch.Tensor = plain(model, inputs)
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            given = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 13)[0]
            return loss + 0.1 * given.logsumexp((0, 1))

        trainer._compute_loss = other
    try:
        assert_same(pair, batch())
    finally:
        for trainer in pair:
            del trainer._compute_loss


def _penalty(own: Any, model: Any, inputs: Any) -> torch.Tensor:
    """Weights enter the loss by another way than the log-probabilities."""
    loss: torch.Tensor = super(type(own), own)._compute_loss(model, inputs)
    return loss + 0.01 * sum((p**2).sum() for p in model.parameters() if p.requires_grad)


def _own_forward(own: Any, model: Any, inputs: Any) -> torch.Tensor:
    ids = torch.arange(4, 12)[None]
    loss: torch.Tensor = super(type(own), own)._compute_loss(model, inputs)
    return loss + 0.1 * model(input_ids=ids, labels=ids).loss


def _of_other_tokens(own: Any, model: Any, inputs: Any) -> torch.Tensor:
    """A term over completions that were changed: theirs are not the log-probabilities of the micro-batch."""
    loss: torch.Tensor = super(type(own), own)._compute_loss(model, inputs)
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1).clamp(max=40)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    found = own._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]
    return loss - 0.05 * (found * inputs["completion_mask"]).mean()


def _fewer_tokens(own: Any, model: Any, inputs: Any) -> torch.Tensor:
    """Tokens that are taken out of the mask are not attended to either."""
    left = torch.arange(inputs["completion_mask"].shape[1]) % 3 != 1
    changed = {**inputs, "completion_mask": inputs["completion_mask"] * left}
    loss: torch.Tensor = super(type(own), own)._compute_loss(model, changed)
    return loss


def _sharper(own: Any, *args: Any, **kwargs: Any) -> Any:
    logps, *rest = super(type(own), own)._get_per_token_logps_and_entropies(*args, **kwargs)
    return logps * 0.5, *rest


def _from_logits(own: Any, model: Any, ids: Any, mask: Any, keep: int, *_: Any, **__: Any) -> Any:
    logps = (model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1] * 0.7).log_softmax(-1)
    return logps.gather(-1, ids[:, -keep:, None])[..., 0], -(logps.exp() * logps).sum(-1), None


def _plus(own: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> torch.Tensor:
    loss: torch.Tensor = super(type(own), own).compute_loss(model, inputs, *rest, **more)
    return loss + 0.01 * sum((p**2).sum() for p in model.parameters() if p.requires_grad)


OVERRIDES = [
    ("_compute_loss", _penalty),
    ("_compute_loss", _own_forward),
    ("_compute_loss", _of_other_tokens),
    ("_compute_loss", _fewer_tokens),
    ("_get_per_token_logps_and_entropies", _sharper),
    ("_get_per_token_logps_and_entropies", _from_logits),
    ("compute_loss", _plus),
]


def overridden(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, name: str, method: Any) -> None:
    """Both trainers become of a user's subclass."""
    for trainer in pair:
        monkeypatch.setattr(trainer, "__class__", type("Users", (type(trainer),), {name: method}))


@pytest.mark.parametrize(("name", "method"), OVERRIDES, ids=lambda given: getattr(given, "__name__", given))
def test_what_a_subclass_overrides_keeps_its_gradient(
    pair: tuple[Any, Any], name: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a subclass's loss gets its gradient from, all of it arrives."""
    theirs, ours = pair
    inputs = with_policies(theirs, batch(), beta=0.0)
    overridden(pair, monkeypatch, name, method)
    loss, gradients, _ = loss_and_gradients(theirs, inputs)
    lean_loss, lean_gradients, _ = loss_and_gradients(ours, inputs)
    assert lean_loss == pytest.approx(loss, rel=TOLERANCE)
    assert worst(lean_gradients, gradients) <= TOLERANCE


def test_a_loss_scaled_too_late_is_refused(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = with_policies(pair[0], batch(), beta=0.0)
    overridden(pair, monkeypatch, "compute_loss", lambda own, *a, **k: super(type(own), own).compute_loss(*a, **k) * 2)
    with pytest.raises(UsageError, match="override _compute_loss instead"):
        loss_and_gradients(pair[1], inputs)


def test_positions_that_count_real_tokens_only(tmp_path: Path) -> None:
    """OPT's learned positions are counted from the attention mask, so padding must not move them."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 56, "num_hidden_layers": 2, "dropout": 0.0}
    model = OPTForCausalLM(
        OPTConfig(vocab_size=VOCABULARY, num_attention_heads=4, max_position_embeddings=64, init_std=0.2,
                  pad_token_id=1, eos_token_id=2, bos_token_id=3, **sizes)
    )  # fmt: skip
    theirs, ours = (build(kind, model, tmp_path) for kind in ("trl", "lean"))
    inputs = with_policies(theirs, batch(), beta=0.0)
    loss, gradients, _ = loss_and_gradients(theirs, inputs)
    lean_loss, lean_gradients, _ = loss_and_gradients(ours, inputs)
    assert lean_loss == pytest.approx(loss, rel=TOLERANCE)
    # A key's bias has no gradient: the softmax over keys does not see it.
    names = [name for name in gradients if "k_proj.bias" not in name]
    assert worst(*({name: found[name] for name in names} for found in (lean_gradients, gradients))) <= TOLERANCE


SHARED: list[dict[str, Any]] = [
    {"prefix_sharing": True},
    {"prefix_sharing": True, "max_tokens_per_piece": 1, "checkpointing": "full"},
    {"prefix_sharing": True, "checkpointing": "offloaded", "tiled_mlp": 5},
    {"packing": True},
    {"packing": True, "max_tokens_per_piece": 45, "checkpointing": "selective"},
]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("settings", SHARED, ids=lambda settings: "+".join(map(str, settings)))
def test_sharing_and_packing_keep_the_gradient(settings: dict[str, Any], lora: bool, tmp_path: Path) -> None:
    model = tiny_llama()
    both = build("trl", model, tmp_path, lora=lora), build("lean", model, tmp_path, lora=lora, **settings)
    for loss, level, quantile in (("grpo", "token", 1.0), ("dapo", "sequence", 1.0), ("bnpo", "token", 0.5)):
        set_both(both, loss_type=loss, importance_sampling_level=level, top_entropy_quantile=quantile, beta=0.04)
        assert_same(both, groups(), beta=0.04)


def test_a_shared_prompt_is_computed_once(tmp_path: Path) -> None:
    """Tokens that reach the model: each prompt once and each completion without its last token."""
    ours = build("lean", tiny_llama(), tmp_path, prefix_sharing=True)
    inputs = groups()
    seen: list[int] = []
    ours.model.model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(args[0].numel()))
    loss_and_gradients(ours, with_policies(ours, inputs, beta=0.0))  # asks the model again, because its hooks changed
    seen.clear()
    loss_and_gradients(ours, with_policies(ours, inputs, beta=0.0))
    once = inputs["prompt_mask"][:2].sum() + (inputs["completion_mask"].sum(1) - 1).sum()
    assert sum(seen) == 2 * once  # for the old log-probs, and for the loss


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout is on"),
        ({"attn_implementation": "eager"}, "attention is 'eager'"),
    ],
)
def test_sharing_is_given_up_by_name(
    changes: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = build("lean", tiny_llama(**changes), tmp_path, prefix_sharing=True)
    loss_and_gradients(ours, with_policies(ours, groups(), beta=0.0))
    assert f"prompts are not shared: {why}" in caplog.text


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "settings",
    [{"checkpointing": kind} for kind in ("none", "mlp", "selective", "full", "offloaded")]
    + [{"checkpointing": "offloaded", "tiled_mlp": 5, "loss_chunk_tokens": 3}, {"gradient_checkpointing": True}],
    ids=lambda settings: "+".join(map(str, settings.values())),
)
def test_techniques_keep_the_gradient(settings: dict[str, Any], lora: bool, tmp_path: Path) -> None:
    model = tiny_llama()
    theirs = build("trl", model, tmp_path, lora=lora)
    ours = build("lean", model, tmp_path, lora=lora, **settings)
    assert_same((theirs, ours), batch(), beta=0.0)
    if "checkpointing" in settings:
        assert not ours.args.activation_checkpointing  # transformers adds none of its own when training starts
