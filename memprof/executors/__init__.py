"""Run a function over many inputs: here, in other processes, on a Dask or a Ray cluster."""

from __future__ import annotations

from memprof.executors.choice import ExecutorChoice
from memprof.executors.machine import cores, free_memory
from memprof.executors.parallel_map import answers, as_cluster, open_executor
from memprof.executors.ray_tasks import RayExecutor

__all__ = ["ExecutorChoice", "RayExecutor", "answers", "as_cluster", "cores", "free_memory", "open_executor"]
