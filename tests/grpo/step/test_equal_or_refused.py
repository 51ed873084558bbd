"""What pieces assume of a model, an adapter, a subclass and its hooks: kept to TRL's step, or equal."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from benchmarks.lean.equality.families import compared
from memprof.errors import UsageError
from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer
from memprof.grpo.step.probe import ask
from tests.grpo.trainers import (
    TOLERANCE,
    batch,
    build,
    length_reward,
    loss_and_gradients,
    prompts,
    saved_llama,
    tiny_llama,
    tokenizer,
    with_policies,
    worst,
)

pytestmark = pytest.mark.trl


@pytest.mark.parametrize(
    ("family", "verdict"),
    [
        ("llama", "equal"),
        ("opt", "equal"),  # counts positions by the mask
        ("bart", "TRL's step"),  # counts them from the left edge, and cannot be told where a row begins
        ("camembert", "TRL's step"),  # counts tokens that are not padding
        ("cpmant", "TRL's step"),  # reads the token ids under the padding
        ("rwkv", "TRL's step"),
    ],
)
def test_a_family_is_equal_or_takes_trls_step(family: str, verdict: str, tmp_path: Path) -> None:
    found = compared(family, tmp_path)
    assert (found.verdict, bool(found.said)) == (verdict, verdict != "equal"), found


def test_asking_leaves_everything_as_it_was(tmp_path: Path) -> None:
    trainer = build("lean", tiny_llama(), tmp_path)
    trainer.model.train()
    trainer.model.model.layers[0].eval()
    modes = [module.training for module in trainer.model.modules()]
    kept, state = copy.deepcopy(dict(trainer.model.named_buffers())), torch.get_rng_state()
    assert ask(trainer._step_context(), torch.arange(4, 40)).why is None
    assert modes == [module.training for module in trainer.model.modules()]
    assert all(torch.equal(buffer, kept[name]) for name, buffer in trainer.model.named_buffers())
    assert torch.equal(state, torch.get_rng_state())


_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 16, "factor": 8.0,
}  # fmt: skip


@pytest.mark.parametrize("rope", [_LONGROPE, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}])
@pytest.mark.parametrize("sharing", [False, True])
def test_frequencies_that_follow_the_longest_row_are_the_batchs(
    rope: dict[str, Any], sharing: bool, tmp_path: Path
) -> None:
    model = tiny_llama(max_position_embeddings=16, rope_parameters=rope)
    theirs = build("trl", model, tmp_path)
    ours = build("lean", model, tmp_path, max_tokens_per_piece=1, prefix_sharing=sharing)
    inputs = with_policies(theirs, batch(prompt=9, completion=21), beta=0.0)
    found = [loss_and_gradients(trainer, inputs)[1] for trainer in (theirs, ours)]
    assert ours._whole_batch_reason is None
    assert worst(found[1], found[0]) <= 3 * TOLERANCE
    assert "follow the longest" in _why_not_paged(ours)


def _why_not_paged(trainer: Any) -> str:
    from memprof.grpo.paged.support import why_not

    return str(why_not(trainer.model, trainer.args, 30, together=False))


def _hook_on_a_parameter(trainer: Any) -> None:
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _hook_after_accumulation(trainer: Any) -> None:
    def clip(parameter: Any) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    next(trainer.model.parameters()).register_post_accumulate_grad_hook(clip)


def _hook_on_a_module(trainer: Any) -> None:
    trainer.model.model.layers[0].register_full_backward_hook(lambda _m, given, _o: tuple(g.tanh() for g in given))


@pytest.mark.parametrize("hook", [_hook_on_a_parameter, _hook_after_accumulation, _hook_on_a_module])
def test_a_hook_in_the_backward_runs_as_often_as_under_trl(
    hook: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = (build(kind, tiny_llama(), tmp_path) for kind in ("trl", "lean"))
    inputs = with_policies(theirs, batch(), beta=0.0)
    for trainer in (theirs, ours):
        hook(trainer)
    found = [loss_and_gradients(trainer, inputs)[1] for trainer in (theirs, ours)]
    assert worst(found[1], found[0]) <= TOLERANCE
    assert "would run once for each chunk" in caplog.text


def _by_position(_module: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
    return out * torch.linspace(0.5, 1.5, out.shape[1])[None, :, None]


def _by_rows(_module: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
    return out + out.mean(dim=(0, 1), keepdim=True)


def _by_token(_module: Any, _given: Any, out: torch.Tensor) -> torch.Tensor:
    return out.tanh()


@pytest.mark.parametrize(("hook", "whole"), [(_by_position, True), (_by_rows, True), (_by_token, False)])
@pytest.mark.parametrize("late", [False, True])
def test_a_forward_hook_is_asked_with_the_model(
    hook: Any, whole: bool, late: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steering by position, or by a batch's mean, is another function of a piece; also where a later step adds it."""
    theirs, ours = build("trl", tiny_llama(), tmp_path), build("lean", tiny_llama(), tmp_path, max_tokens_per_piece=30)
    inputs = with_policies(theirs, batch(), beta=0.0)
    if late:
        loss_and_gradients(ours, inputs)
        assert ours._whole_batch_reason is None
    for trainer in (theirs, ours):
        trainer.model.model.layers[0].register_forward_hook(hook)
    found = [loss_and_gradients(trainer, inputs)[1] for trainer in (theirs, ours)]
    assert worst(found[1], found[0]) <= TOLERANCE
    assert ("(with a forward hook on model.layers.0)" in caplog.text) is whole


def test_a_result_that_is_changed_on_its_way_out_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The hook halves what TRL reads, and knows nothing of what pieces return."""

    def halve(_module: Any, _given: Any, out: Any) -> None:
        if getattr(out, "log_probs", None) is not None:
            out.log_probs = out.log_probs * 0.5

    theirs, ours = build("trl", tiny_llama(), tmp_path), build("lean", tiny_llama(), tmp_path)
    inputs = with_policies(theirs, batch(), beta=0.0)
    for trainer in (theirs, ours):
        trainer.model.register_forward_hook(halve)
    found = [loss_and_gradients(trainer, inputs)[1] for trainer in (theirs, ours)]
    assert worst(found[1], found[0]) <= TOLERANCE
    assert "(with a forward hook on the model)" in caplog.text


class _Normed(torch.nn.Module):
    """Normalise over a batch, as training does."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.over = inner, torch.nn.BatchNorm1d(32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.over(self.inner(hidden).flatten(0, 1)).view_as(hidden)


def test_what_couples_rows_in_training_only_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = build("trl", tiny_llama(), tmp_path), build("lean", tiny_llama(), tmp_path, max_tokens_per_piece=30)
    for trainer in (theirs, ours):
        trainer.model.model.norm = _Normed(trainer.model.model.norm)
    inputs = with_policies(theirs, batch(), beta=0.0)
    kept = {name: buffer.clone() for name, buffer in ours.model.named_buffers()}
    assert ask(ours._step_context(), torch.arange(4, 40)).why is not None
    assert all(torch.equal(buffer, kept[name]) for name, buffer in ours.model.named_buffers())
    found = [loss_and_gradients(trainer, inputs)[1] for trainer in (theirs, ours)]
    assert worst(found[1], found[0]) <= TOLERANCE
    assert "TRL's own step is used: llama reads the padding" in caplog.text


def _scaled(kind: Any) -> Any:
    class Scaled(kind):  # type: ignore[misc, valid-type]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            loss = 0.25 * self.compute_loss(model, self._prepare_inputs(inputs))
            self.accelerator.backward(loss)
            self._step += 1
            return loss.detach()

    return Scaled


def test_a_training_step_of_its_own_scales_all_of_the_gradient(tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    norms = []
    for kind, config in ((GRPOTrainer, GRPOConfig), (LeanGRPOTrainer, LeanGRPOConfig)):
        trainer = _built(_scaled(kind), config(**_plain(tmp_path), max_steps=1))
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def _plain(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 4,
        "num_generations": 4, "max_completion_length": 6, "report_to": "none", "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip


def _built(kind: Any, args: Any) -> Any:
    return kind(
        model=tiny_llama(), reward_funcs=length_reward, args=args, train_dataset=prompts(),
        processing_class=tokenizer(),
    )  # fmt: skip


def test_the_callers_arguments_are_the_trainers(tmp_path: Path) -> None:
    from trl import GRPOConfig

    @dataclasses.dataclass
    class Mine(GRPOConfig):
        @property
        def doubled(self) -> float:
            return 2 * self.learning_rate

    args = Mine(**_plain(tmp_path), max_steps=4)
    trainer = _built(LeanGRPOTrainer, args)
    assert trainer.args is args
    assert trainer.args.doubled == 2 * args.learning_rate
    args.max_steps = 1
    trainer.train()
    assert trainer.state.global_step == 1


def _fields(args: Any) -> dict[str, Any]:
    return {field.name: copy.deepcopy(getattr(args, field.name)) for field in dataclasses.fields(args)}


@pytest.mark.parametrize("lean", [False, True])
def test_no_value_of_the_callers_arguments_is_another_afterwards(lean: bool, tmp_path: Path) -> None:
    """A trainer of TRL's that is built from the same arguments inherits nothing: neither checkpointing nor weights."""
    from trl import GRPOConfig

    given = {**_plain(tmp_path), "max_steps": 2, "beta": 0.1, "learning_rate": 1e-3, "gradient_checkpointing": True}
    path = saved_llama(tmp_path / "model")
    args: Any = LeanGRPOConfig(**given, weights="bf16", checkpointing="full") if lean else GRPOConfig(**given)
    args.checkpointing = "full"  # of a plain config, an attribute that TRL does not know
    before = _fields(args)
    trainer = LeanGRPOTrainer(
        model=path, reward_funcs=length_reward, args=args, train_dataset=prompts(), processing_class=tokenizer()
    )
    assert trainer.args is args
    assert _fields(args) == before
    assert trainer._host_reference is not None
    if lean:
        assert next(trainer.model.parameters()).dtype == torch.bfloat16
    args.learning_rate, args.logging_steps = 0.0, 2
    seen: list[Any] = []

    class During(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append((trainer.model.is_gradient_checkpointing, trainer._techniques.reduce_memory(5000, draws=False)))

    trainer.add_callback(During())
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert seen[0] == (False, "checkpointing='offloaded'")  # the layers', not transformers' own as well
    assert len([line for line in trainer.state.log_history if "loss" in line]) == 1
    assert all(torch.equal(p, before) for p, before in zip(trainer.model.parameters(), weights, strict=True))
    assert _fields(args) == {**before, "learning_rate": 0.0, "logging_steps": 2}


@pytest.mark.parametrize("name", ["SFTConfig", "RLOOConfig", "DPOConfig"])
def test_arguments_of_another_trainer_are_refused(name: str, tmp_path: Path) -> None:
    import trl

    args = getattr(trl, name)(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(UsageError, match=rf"^args is of type {name}, which has no \w+: use GRPOConfig or Lean"):
        _built(LeanGRPOTrainer, args)


def test_the_signature_is_trls() -> None:
    from trl import GRPOTrainer

    assert inspect.signature(LeanGRPOTrainer) == inspect.signature(GRPOTrainer)


def test_an_adapter_that_begins_in_the_wrapper_shares_no_prompt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    from memprof.grpo.support import adapter_outside

    kept: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    invoked = get_peft_model(tiny_llama(), LoraConfig(**kept, alora_invocation_tokens=[10]))
    learned = get_peft_model(tiny_llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert "aLoRA" in str(adapter_outside(invoked))
    assert "prompt learning" in str(adapter_outside(learned))
    assert adapter_outside(get_peft_model(tiny_llama(), LoraConfig(**kept))) is None
    ours = build("lean", invoked, tmp_path, prefix_sharing=True)
    _, gradients, _ = loss_and_gradients(ours, with_policies(ours, batch(), beta=0.0))
    assert "prompts are not shared: PEFT tells an aLoRA in its wrapper" in caplog.text
    assert gradients


def test_equal_prompts_whose_answers_end_at_once_are_computed_once() -> None:
    from memprof.grpo.paged.rolling import RollingBatch
    from memprof.grpo.paged.sampling import Sampling
    from memprof.grpo.paged.schedule import GenerationCounts, PoolSize

    work = GenerationCounts()
    sampling = Sampling([], torch.rand(16, 4, dtype=torch.float64), frozenset(range(100)), 4)
    found = RollingBatch(tiny_llama(), [[5, 6, 7]] * 16, sampling, PoolSize(200, 200), work).run()
    assert [len(tokens) for tokens in found] == [1] * 16
    assert work.forwards == 1


def _with_images() -> Any:
    """A random Qwen2-VL, whose token 50 stands for an image."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 1,
        "eos_token_id": 2, "bos_token_id": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {
        "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
        "temporal_patch_size": 2, "spatial_merge_size": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    special = {"image_token_id": 50, "vision_start_token_id": 51, "vision_end_token_id": 52, "video_token_id": 53}
    return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special))


@pytest.mark.parametrize("images", [False, True])
def test_images_take_trls_step_and_text_goes_in_pieces(
    images: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = _with_images()
    theirs, ours = build("trl", model, tmp_path), build("lean", model, tmp_path, max_tokens_per_piece=40)
    inputs = batch(off_policy=False)
    del inputs["off_policy"]
    for ids in (inputs["prompt_ids"], inputs["completion_ids"]):
        ids[ids >= 50] -= 20
    if images:  # of 8 by 8 pixels: four patches, one token
        rows = inputs["prompt_ids"].shape[0]
        inputs["prompt_ids"][:, -2:] = torch.tensor([51, 50])
        inputs["pixel_values"] = torch.randn(4 * rows, 3 * 2 * 4 * 4)
        inputs["image_grid_thw"] = torch.tensor([[1, 2, 2]] * rows)
        inputs["num_images"] = [1] * rows
        whole = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        inputs["mm_token_type_ids"] = (whole == 50).long()
    found = [loss_and_gradients(trainer, inputs)[1] for trainer in (theirs, ours)]
    assert worst(found[1], found[0]) <= TOLERANCE
    assert ours._whole_batch_reason is None
    assert ("TRL's own step is used for batches with images" in caplog.text) is images
