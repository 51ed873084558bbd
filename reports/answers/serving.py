"""The plan of a serving engine: its settings, what its share of the GPU is used for, notes."""

from __future__ import annotations

from memprof.reports.document.blocks import Column, Notes, ReportLayout, TableRow, TextCell, table
from memprof.reports.document.text import thousands

from memprof.report.plan import Serving
from memprof.units import format_bytes


def serving(plan: Serving) -> ReportLayout:
    """Show each figure: its name, its value, what it means."""
    share = plan.gpu_memory_utilization
    pool = f"{thousands(plan.kv_tokens)} tokens of {thousands(plan.kv_bytes_per_token)} B"
    rows = [
        ("gpu_memory_utilization", "none" if share is None else f"{share:.2f}", "the engine's share of the GPU"),
        ("max_model_len", thousands(plan.max_model_len), "tokens of the longest sequence"),
        ("max_num_seqs", thousands(plan.max_num_seqs), "sequences at full length at once"),
        ("weights", format_bytes(plan.weights_bytes), "of the engine's own copy"),
        ("activations", format_bytes(plan.activation_bytes), "of the forward that vLLM profiles"),
        ("outside", format_bytes(plan.outside_bytes), "CUDA context, kernels, workspaces"),
        ("KV pool", format_bytes(plan.kv_bytes), pool),
        ("trainer", format_bytes(plan.trainer_bytes), "what it uses when the engine starts"),
        ("card", format_bytes(plan.total_bytes), plan.gpu),
    ]
    lines = [TableRow((TextCell(name, "code"), value, meaning)) for name, value, meaning in rows]
    columns = Column("Setting or part", whole=True), Column("Value", right=True, whole=True), Column("What", wraps=True)
    title = f"{plan.model}: vLLM next to the trainer (modelled)"
    return ReportLayout(((), (table(columns, lines),), (Notes(plan.notes),)), title)
