"""Programs that run vLLM in their process; each prints one line of JSON at its end."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def example() -> Any:
    spec = importlib.util.spec_from_file_location("vllm_colocate", ROOT / "examples" / "vllm_colocate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.patch_vllm_for_cpu()
    return module


def checkpoint(folder: Path) -> Path:
    """A Qwen2 whose heads have 32 dimensions."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from memprof.demo.model import _tiny_tokenizer

    words, path = _tiny_tokenizer(), folder / "qwen2"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words), hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    words.save_pretrained(path)
    return path


def truth(llm: Any) -> dict[str, int]:
    """Bytes of storages that the engine's model and KV cache have."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner

    def storages(tensors: Any) -> int:
        return sum({t.data_ptr(): t.nbytes() for t in (one.untyped_storage() for one in tensors)}.values())

    return {
        "kv_cache": storages(runner.kv_caches),
        "model": storages([*runner.model.parameters(), *runner.model.buffers()]),
    }


def colocate(folder: Path, watched: str) -> dict[str, Any]:
    """TRL's trainer, with a callback or without."""
    module, callbacks = example(), []
    if watched == "watched":
        from memprof import MemProfCallback

        callbacks = [MemProfCallback()]
    trainer = module.build(str(checkpoint(folder)), str(folder / "out"), callbacks)
    trainer.train()
    digest = hashlib.sha256()
    for _, parameter in sorted(trainer.model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    engine = truth(trainer.vllm_generation.llm)
    model = trainer.model
    policy = sum({t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
    return {"parameters": digest.hexdigest(), "losses": losses, "truth": {**engine, "weights": policy}}


def replayed(folder: Path, kind: str, recorded: str) -> dict[str, Any]:
    """TRL's trainer, whose completions are saved, or the lean one, which trains on them; vLLM generates in both.

    ``kind`` is ``trl``, ``lean`` or ``parked``: lean, with weights and optimizer state moved away for the engine.
    """
    import trl

    from memprof.grpo import LeanGRPOConfig, LeanGRPOTrainer

    module = example()
    if kind != "trl":
        trl.GRPOConfig, trl.GRPOTrainer = partial(LeanGRPOConfig, park_weights=kind == "parked"), LeanGRPOTrainer
    trainer = module.build(str(checkpoint(folder)), str(folder / "out"), [])
    engine, path = trainer.vllm_generation, Path(recorded)
    saved = [] if kind == "trl" else json.loads(path.read_text())
    generate, own = engine.generate, []

    def generated(*given: Any, **named: Any) -> Any:
        own.append(generate(*given, **named))
        return own[-1] if kind == "trl" else tuple(saved[len(own) - 1])

    engine.generate = generated
    trainer.train()
    if kind == "trl":
        path.write_text(json.dumps(own))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    parked = trainer._offload.parked_bytes if kind == "parked" else 0
    return {"losses": [r["loss"] for r in rows], "norms": [r["grad_norm"] for r in rows],
            "rewards": [r["reward"] for r in rows], "parked": parked}  # fmt: skip


def inside(folder: Path) -> dict[str, Any]:
    """An engine that is built, runs and is asked for a dump inside a recording."""
    example()
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    from memprof import phase, record

    model = str(checkpoint(folder))
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with record(folder / "run.pickle", model=policy):
        llm = LLM(
            model=model, dtype="float32", max_model_len=256, enforce_eager=True, gpu_memory_utilization=0.1,
            max_num_seqs=8, disable_log_stats=True, worker_extension_cls="tests.engines.programs.Watched",
        )  # fmt: skip
        with phase("generate"):
            llm.generate(["hello there", "one two"], SamplingParams(max_tokens=8), use_tqdm=False)
    llm.collective_rpc("begin_memprof", args=(str(folder / "engine"),))
    llm.generate(["hello there"], SamplingParams(max_tokens=4), use_tqdm=False)
    llm.collective_rpc("end_memprof")
    return {"truth": {**truth(llm), "weights": sum(p.nbytes for p in policy.parameters())}}


class Watched:
    """The worker extension of docs/frameworks.md."""

    def begin_memprof(self, folder: str) -> None:
        import memprof

        self._memprof = memprof.attach(model=self, role="rollout", output_dir=folder)
        self._memprof.methods(
            self, execute_model="generate", sample_tokens="generate", sleep="sleep", wake_up="wake",
            update_weights="weight_sync",
        )  # fmt: skip

    def end_memprof(self) -> None:
        self._memprof.detach()


if __name__ == "__main__":
    name, folder, *rest = sys.argv[1:]
    print(json.dumps({"colocate": colocate, "inside": inside, "replayed": replayed}[name](Path(folder), *rest)))
