"""Reach the trackers a trainer reports to (TensorBoard, W&B, MLflow, Trackio, Comet ...), through its own callbacks.

Nothing here opens a writer or a run of its own: TensorBoard would lose points where two writers share a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CHARTS = {
    "Peak": ("peak_allocated", "peak_reserved"),
    "Reserved, not used by tensors": ("cached", "inactive_split", "non_torch"),
    "Peak by phase": ("phase/generate", "phase/forward", "phase/backward", "phase/optimizer_step"),
    "Host": ("host_rss", "host_rss_peak", "host_pinned"),
}


class Reporters:
    """Reach trackers through one trainer's callback handler; made when training begins, before trackers close their
    run."""

    def __init__(self, trainer: Any) -> None:
        self._main = bool(trainer.state.is_world_process_zero)
        self._callbacks = [c for c in trainer.callback_handler.callbacks if _is_reporter(c)] if self._main else []
        self._mlflow_run = _mlflow_run()
        self.attached: list[str] = []

    def log(self, trainer: Any, values: Mapping[str, float]) -> None:
        """Hand ``values`` to the trackers alone, at the trainer's present step.

        ``trainer.log`` is left alone: a trainer that averages metrics between two logs would average over fewer steps.
        """
        for callback in self._callbacks:
            callback.on_log(trainer.args, trainer.state, trainer.control, model=trainer.model, logs=dict(values))

    def lay_out(self, on_device: bool) -> None:
        """Write TensorBoard's custom-scalar charts, at most four, with the trainer's own writer."""
        names = list(_CHARTS) if on_device else ["Peak by phase", "Host"]
        layout = {n: ["Multiline", [f"^train/memory/{tag}$" for tag in _CHARTS[n]]] for n in names}
        for callback in self._callbacks:
            writer = getattr(callback, "tb_writer", None)
            if writer is not None and hasattr(writer, "add_custom_scalars"):
                writer.add_custom_scalars({"memprof (GiB)": layout})

    def attach(self, page: Path) -> None:
        """Store the HTML page with every tracker that is active and keeps files."""
        if not self._main or not self._callbacks:
            return
        names = {type(c).__name__ for c in self._callbacks}
        for tracker, store in (("Wandb", self._to_wandb), ("MLflow", self._to_mlflow), ("Trackio", self._to_trackio)):
            if f"{tracker}Callback" in names and tracker not in self.attached and store(page):
                self.attached.append(tracker)

    def _to_wandb(self, page: Path) -> bool:
        wandb = sys.modules.get("wandb")
        if wandb is None or wandb.run is None:
            return False
        artifact = wandb.Artifact(f"memprof-{wandb.run.id}", type="memprof-report")
        artifact.add_file(str(page), name=page.name)
        wandb.run.log_artifact(artifact)
        if hasattr(wandb, "Html"):  # shown in the run's own page, beside its charts
            with page.open(encoding="utf-8") as file:
                wandb.run.log({"memprof": wandb.Html(file, inject=False)})
        return True

    def _to_mlflow(self, page: Path) -> bool:
        mlflow = sys.modules.get("mlflow")
        if mlflow is None or self._mlflow_run is None:
            return False
        if hasattr(mlflow, "flush_async_logging"):  # a store of files is not read while a thread writes a metric
            mlflow.flush_async_logging()
        mlflow.MlflowClient().log_artifact(self._mlflow_run, str(page), "memprof")
        return True

    def _to_trackio(self, page: Path) -> bool:
        trackio = sys.modules.get("trackio")
        if trackio is None or not hasattr(trackio, "Artifact") or not hasattr(trackio, "log_artifact"):
            return False
        artifact = trackio.Artifact("memprof-report", type="memprof-report")
        artifact.add_file(str(page), name=page.name)
        trackio.log_artifact(artifact)
        return True


def _is_reporter(callback: Any) -> bool:
    return any(
        base.__module__.startswith("transformers.integrations") and "on_log" in vars(base)
        for base in type(callback).__mro__
    )


def _mlflow_run() -> str | None:
    """Return the active MLflow run, which transformers' callback ends before others hear of the end."""
    mlflow = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    return None if active is None else str(active.info.run_id)
