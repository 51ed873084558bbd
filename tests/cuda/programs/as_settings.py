"""Train as settings say on the emulated GPU, and simulate the same; answer what both allocators held at most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.simulator.emulated.device_run import train_here
from memprof import analyze
from memprof.config.gpus import find_gpu
from memprof.config.settings import Settings
from memprof.simulate.run import simulate_settings
from memprof.snapshot import snapshot_from_raw
from tests.cuda.programs.answer import answer

SHAPE: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 4096, "hidden_size": 256,
    "intermediate_size": 640, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def train_and_simulate(told: dict[str, Any]) -> dict[str, Any]:
    model = Path(told["folder"]) / "config.json"
    model.write_text(json.dumps(told.get("shape", SHAPE)))
    given = {"prompt_length": 64, "completion_length": 192, "generation": "none", **told["settings"]}
    settings = Settings(model=str(model), **given)
    real = train_here(settings)
    raw = simulate_settings(settings, gpu=find_gpu(told["card"]), stacks=False)
    requested = analyze(snapshot_from_raw(raw)).max_requested
    return {"real": real, "simulated": {**raw["memprof"]["highest"], "requested_bytes": requested}}


if __name__ == "__main__":
    answer(train_and_simulate)
