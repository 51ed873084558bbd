"""Tiny models and trainers on the card: random weights, words for tokens, completions of full length."""

from __future__ import annotations

import gc
import hashlib
import random
from pathlib import Path
from typing import Any

import torch

WORDS = 120
SHAPE = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT, COMPLETION = 24, 8


def tokenizer() -> Any:
    """Make a tokenizer whose words are tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    # Every id has a word, so that rewards can read what was generated.
    words += [f"v{i}" for i in range(len(words), SHAPE["vocab_size"])]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def checkpoint(folder: Path, **changes: Any) -> Path:
    """Save a Llama with random weights; TRL loads policy and reference from it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPE, **changes}
    path = folder / ("llama-" + "-".join(str(shape[k]) for k in sorted(changes)))
    if not (path / "config.json").is_file():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape))
        model.generation_config.eos_token_id = None
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
    return path


def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards that vary within a group."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def trainer(folder: Path, case: dict[str, Any], callbacks: list[Any]) -> Any:
    """Build TRL's trainer, or the lean one, as a case asks: ``settings`` are its arguments'."""
    from datasets import Dataset
    from transformers import PrinterCallback

    if case.get("lean"):
        from memprof.grpo import LeanGRPOConfig as Config
        from memprof.grpo import LeanGRPOTrainer as Trainer
    else:
        from trl import GRPOConfig as Config
        from trl import GRPOTrainer as Trainer
    length = case.get("completion", COMPLETION)
    chosen = {
        "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": length,
        "generation_kwargs": {"min_new_tokens": length}, "beta": 0.0, "learning_rate": 1e-3,
        "gradient_checkpointing": False, "bf16": True, "seed": 7, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    if dtype := case.get("dtype", "bfloat16"):
        chosen["model_init_kwargs"] = {"dtype": dtype}
    if bits := case.get("four_bits"):
        chosen["model_init_kwargs"]["quantization_config"] = four_bits(**bits)
    if case.get("by_trainer"):  # loaded on the CPU: transformers' loader wants 1.2 GiB of the card to be free
        chosen["model_init_kwargs"]["device_map"] = None
    rng = random.Random(0)
    prompts = [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(case.get("prompt", PROMPT))) for _ in range(16)]
    built = Trainer(
        model=str(checkpoint(folder, **case.get("shape", {}))),
        reward_funcs=reward,
        args=Config(output_dir=str(folder / case["name"]), **{**chosen, **case.get("settings", {})}),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        callbacks=callbacks,
        peft_config=adapter() if case.get("lora") else None,
    )
    built.remove_callback(PrinterCallback)
    return built


def adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def four_bits(**changes: Any) -> Any:
    """Ask transformers for bitsandbytes' 4-bit weights."""
    from transformers import BitsAndBytesConfig

    asked = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16", **changes}
    return BitsAndBytesConfig(load_in_4bit=True, **asked)


def fresh() -> None:
    """Give back what an earlier run of this process left, cuBLAS's workspaces included."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def facts(built: Any, case: dict[str, Any]) -> dict[str, Any]:
    """What the run's bytes must be, from the tensors themselves: see ``tests.closed_forms.Facts``."""
    config = built.model.config
    parameters = list(built.model.named_parameters())
    adapters = [p for name, p in parameters if "lora_" in name]
    trainable = [p for _, p in parameters if p.requires_grad]
    known = {id(p) for p in adapters}
    policy = [p for _, p in parameters if id(p) not in known]
    policy += [scale for p in policy for scale in _scales(p)]
    return {
        "policy_bytes": _bytes([*policy, *built.model.buffers()]),
        "adapter_bytes": _bytes(adapters),
        "trainable_bytes": _bytes(trainable),
        "trainable_tensors": len(trainable),
        "layers": config.num_hidden_layers,
        "vocabulary": config.vocab_size,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "element_size": getattr(built.model, "dtype", torch.float32).itemsize,
        "sequences": case.get("sequences", 4),
        "prompt_tokens": case.get("prompt", PROMPT),
        "completion_tokens": case.get("completion", COMPLETION),
    }


def _scales(parameter: Any) -> list[Any]:
    """List what bitsandbytes keeps beside a 4-bit weight: scales and tables, and those of quantised scales."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    second = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *second]


def _bytes(tensors: list[Any]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def outcome(built: Any) -> dict[str, Any]:
    """Everything a run computed that does not depend on the clock."""
    clocked = ("step_time", "runtime", "per_second", "memory")
    logs = [{k: v for k, v in row.items() if not any(c in k for c in clocked)} for row in built.state.log_history]
    digest = hashlib.sha256()
    for name, parameter in sorted(built.model.named_parameters()):
        digest.update(name.encode() + parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return {"logs": logs, "parameters": digest.hexdigest()}
