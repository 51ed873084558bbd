"""What to try where an inference engine or its allocator ran out, with the numbers of its message.

The two commonest messages ask for opposite things: less free memory than the engine's share wants (lower the share) and
no room for the cache inside the share (raise it). Nothing here is given for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memprof.oom.failure import Failure
from memprof.oom.frameworks import Names

__all__ = ["ENGINES"]

Remedy = tuple[str, str]
Answer = tuple[str, list[Remedy]]


def _number(failure: Failure, name: str) -> float | None:
    value = failure.facts.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _share(names: Names, engine: str = "gpu_memory_utilization") -> str:
    return names.share or engine


def _free_below_share(failure: Failure, names: Names) -> Answer:
    free, total, share, wanted = (_number(failure, n) for n in ("free_gib", "total_gib", "share", "wanted_gib"))
    setting = _share(names)
    if not (free and total and share and wanted):
        return (
            "less of the device is free than the engine's share asks for: something else is on it already.",
            [
                (f"lower {setting}", "the share is of the whole card, and has to be free when the engine starts"),
                *_cohabitants(),
            ],
        )
    fits = math.floor(100 * free / total) / 100
    because = (
        f"{free:.2f} of {total:.2f} GiB are free and the engine wants {share:g} × {total:.2f} = {wanted:.2f}: "
        f"{total - free:.2f} GiB are taken already."
    )
    return because, [
        (f"lower {setting} to {fits:.2f} or less", f"{free:.2f} / {total:.2f} GiB: the share is of the whole card"),
        *_cohabitants(),
    ]


def _cohabitants() -> list[Remedy]:
    return [
        (
            "nvidia-smi: end what is left over, or start the engine before the trainer takes its memory",
            "an earlier run, another engine or the policy itself holds the rest",
        ),
        (
            "call gc.collect() and torch.cuda.empty_cache() before the engine starts in the same process",
            "torch's idle cache counts as taken",
        ),
    ]


def _no_cache_blocks(failure: Failure, names: Names) -> Answer:
    return "inside its share of the card the engine's weights and activations leave nothing for the KV cache.", [
        (f"raise {_share(names)}", "the share has to hold weights, the profiled activations and the cache"),
        ("lower max_num_batched_tokens, or enforce_eager=True", "less is set aside for activations and graphs"),
        ("a quantised model, or tensor_parallel_size=2", "smaller weights on each card leave room for the cache"),
        (
            "if the card is shared with a trainer: let that hold less first, then raise the share",
            "a larger share has to be free when the engine starts",
        ),
    ]


def _context_too_long(failure: Failure, names: Names) -> Answer:
    wanted, needed = _number(failure, "wanted_tokens"), _number(failure, "needed_gib")
    have, fits = _number(failure, "available_gib"), _number(failure, "fitting_tokens")
    if fits is None and wanted and needed and have:
        fits = math.floor(wanted * have / needed)
    setting = names.model_len or "max_model_len"
    if wanted and needed is not None and have is not None:
        because = f"one sequence of {wanted:,.0f} tokens needs {needed:g} GiB of KV cache and {have:g} GiB are there."
    elif wanted and fits:
        because = f"one sequence may be {wanted:,.0f} tokens long and the KV cache holds {fits:,.0f}."
    else:
        because = "the KV cache cannot hold one sequence of the longest length the engine allows."
    first = f"{setting}={int(fits)} or less" if fits else f"lower {setting}"
    return because, [
        (first, "the cache has to hold one sequence of full length; prompt + completion is what you need"),
        (
            f"raise {_share(names)}, if the card has room",
            "what weights and activations leave of the share is the cache",
        ),
        ("kv_cache_dtype='fp8', or tensor_parallel_size=2", "half the bytes a token, or the cache over two cards"),
    ]


def _profiling(failure: Failure, names: Names) -> Answer:
    first, now = _number(failure, "initial"), _number(failure, "current")
    if first is not None and now is not None and max(first, now) > 1e6:
        first, now = first / 2**30, now / 2**30
    seen = "" if first is None or now is None else f" ({first:.2f} GiB free at first, {now:.2f} GiB after)"
    return (
        f"while the engine measured its own use, another process on the device gave memory back{seen}, so the "
        "measurement means nothing. The card is not too small.",
        [
            (
                "start engines one after the other, and only when a run before has fully ended",
                "a co-tenant's memory changed during the few seconds of profiling",
            ),
            (
                "wait for nvidia-smi to show a steady figure, then start again",
                "nothing in the engine's settings is wrong",
            ),
            ("kv_cache_memory_bytes=<bytes> (recent vLLM)", "gives the cache's size instead of measuring it"),
        ],
    )


def _sampler_warmup(failure: Failure, names: Names) -> Answer:
    requests = _number(failure, "requests")
    many = f"{requests:.0f} requests" if requests else "max_num_seqs requests"
    return (
        f"the engine had started but for a trial of its sampler with {many}: logits of that many rows did not fit.",
        [
            (
                f"lower {names.max_seqs or 'max_num_seqs'}" + (f" (now {requests:.0f})" if requests else ""),
                "the trial is as wide as the most sequences at once, each row as wide as the vocabulary",
            ),
            (
                f"lower {_share(names)}",
                "what the share takes for the cache is missing beside it, where the sampler works",
            ),
        ],
    )


def _load_model(failure: Failure, names: Names) -> Answer:
    return "the engine's weights do not fit on the device.", [
        (
            "tensor_parallel_size=2, or a quantised model",
            "weights come first: the cache's settings do not make them smaller",
        ),
        ("nvidia-smi: is the trainer or an earlier run on the device?", "the weights need what others hold"),
    ]


def _wake(failure: Failure, names: Names) -> Answer:
    return (
        "the engine's sleeping allocator could not map its pages again: while it slept something else took the memory, "
        "mostly torch's cache of the training step. Lines about an invalid argument after it follow from the first.",
        [
            (
                "gc.collect(); torch.cuda.empty_cache() before wake_up()",
                "idle cache of the trainer stands where the engine was",
            ),
            (f"lower {_share(names)}", "all of the engine's share has to be free again at once"),
            (
                "wake in parts: wake_up(tags=['weights']), sync, then wake_up(tags=['kv_cache'])",
                "the cache is then mapped after the weights have been sent and the trainer's copy is gone",
            ),
            (
                "offload the policy or its optimizer before the engine wakes"
                + (f" ({names.optimizer})" if names.framework == "verl" else ""),
                "training state that stays on the device is taken from the engine",
            ),
        ],
    )


def _sleep(failure: Failure, names: Names) -> Answer:
    return (
        "while the engine went to sleep something else on the device took more than it gave back, so vLLM's check of "
        "its "
        "own figures failed.",
        [
            (
                "let nothing else allocate while the engine sleeps: no training step, no other engine on that device",
                "the check compares what is free on the whole device before and after",
            ),
            (
                "nvidia-smi before and after the engine sleeps: whose figure grows",
                "that process is the one to keep still",
            ),
        ],
    )


def _expandable(failure: Failure, names: Names) -> Answer:
    return (
        "the engine's sleep mode uses a memory pool of its own, which torch cannot combine with expandable segments.",
        [
            (
                "unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for the engine's process",
                "also where a launcher or Ray passes the environment on",
            ),
            (
                "or set it only in the trainer: "
                "torch.cuda.memory._set_allocator_settings('expandable_segments:True') after the "
                "engine has started, False before it wakes",
                "verl and others switch it so",
            ),
            ("or run without sleep mode, on devices of its own", "the engine then needs no such pool"),
        ],
    )


def _memory_saver(failure: Failure, names: Names) -> Answer:
    doing = failure.facts.get("function")
    when = (
        "when it resumed a paused pool (SGLang waking: KV cache or weights)"
        if doing in (None, "resume")
        else f"in {doing}"
    )
    return (
        f"torch_memory_saver could not get physical memory {when}: what was released for training has been taken "
        "since.",
        [
            (
                "gc.collect(); torch.cuda.empty_cache() in the trainer before the engine resumes",
                "its idle cache stands where the pool has to go",
            ),
            (f"lower {names.share or '--mem-fraction-static'}", "the whole pool has to be free again at once"),
            (
                "resume in parts: tags=['weights'], sync, then tags=['kv_cache']",
                "the cache is then mapped after the trainer has gone",
            ),
            (
                names.sleep
                if names.framework == "slime"
                else "offload the trainer's weights and optimizer while the engine runs",
                "training state that stays on the device is taken from the engine",
            ),
        ],
    )


def _sglang_no_pool(failure: Failure, names: Names) -> Answer:
    share = _number(failure, "share")
    setting = names.share or "--mem-fraction-static"
    return "weights and what else is on the device leave nothing of SGLang's static share for its KV pool.", [
        (
            f"raise {setting}" + (f" (now {share:g})" if share else ""),
            "weights and the KV pool have to fit into that share",
        ),
        ("--tp 2, or --quantization fp8", "smaller weights on each card leave room for the pool"),
        (
            "nvidia-smi: is something else on the device?",
            "the share is taken of what was free before the model was loaded",
        ),
    ]


def _sglang_pool(failure: Failure, names: Names) -> Answer:
    wanted, have = _number(failure, "wanted_tokens"), _number(failure, "available_tokens")
    count = (
        "" if wanted is None or have is None else f" ({wanted:,.0f} tokens asked for, {have:,.0f} counted as available)"
    )
    because = (
        f"SGLang's own KV pool had no slots for the batch{count}: the pool's bookkeeping ran out, not the device's "
        "memory."
    )
    if wanted is not None and have is not None and have > wanted:
        because += (
            " More are counted as available than were asked for: most of them can only be evicted (cached or in use by "
            "another pool, such as mamba or sliding-window slots), so the scheduler promised what it did not have."
        )
    return because, [
        (
            f"lower {names.max_seqs or '--max-running-requests'}, raise --schedule-conservativeness (1.3)",
            "fewer sequences then grow in the pool at once",
        ),
        (f"raise {names.share or '--mem-fraction-static'}, if the device has room", "the pool itself becomes larger"),
        ("lower --chunked-prefill-size", "a prefill asks for so many slots in one go"),
        (
            "a newer SGLang, or --disable-radix-cache to try",
            "where slots are counted as free and are not, the accounting is at fault",
        ),
    ]


def _sglang_retracted(failure: Failure, names: Names) -> Answer:
    return (
        "SGLang's KV pool was full, so it put running requests back into its queue: a warning, not a failure. The "
        "requests start again later, and what was generated for them is computed twice.",
        [
            (
                f"lower {names.max_seqs or '--max-running-requests'}, raise --schedule-conservativeness (1.3)",
                "fewer sequences then grow in the pool at once",
            ),
            (f"raise {names.share or '--mem-fraction-static'}, if the device has room", "the pool becomes larger"),
        ],
    )


def _tgi_warmup(failure: Failure, names: Names) -> Answer:
    tokens = _number(failure, "prefill_tokens")
    many = f"{tokens:,.0f} tokens" if tokens else "the longest prefill"
    return f"TGI's trial at its start did not fit: a prefill of {many} beside the weights.", [
        (
            "lower --max-batch-prefill-tokens" + (f" (now {tokens:.0f})" if tokens else ""),
            "the trial is as large as the largest prefill; it has to hold --max-input-tokens at least",
        ),
        ("--num-shard 2, or --quantize", "smaller weights on each card leave room for the prefill"),
        ("nvidia-smi: is something else on the device?", "what others hold is missing here"),
    ]


def _sglang_graphs(failure: Failure, names: Names) -> Answer:
    return "SGLang ran out while it captured CUDA graphs: its static share left too little beside it.", [
        (
            f"lower {names.share or '--mem-fraction-static'} (0.8 or 0.7)",
            "graphs and activations live beside the static share",
        ),
        ("lower --cuda-graph-max-bs, or --disable-cuda-graph", "each captured batch size keeps memory"),
    ]


def _sglang_unbalanced(failure: Failure, names: Names) -> Answer:
    return "the GPUs do not have the same memory free: something else is on some of them.", [
        ("nvidia-smi: end what is left over on the fuller GPUs", "every rank needs the same room"),
        ("--base-gpu-id, CUDA_VISIBLE_DEVICES: pick GPUs that are empty", "ranks may share a device by mistake"),
    ]


def _graph_capture(failure: Failure, names: Names) -> Answer:
    return "the engine ran out while it captured CUDA graphs, which live beside its share.", [
        (f"lower {_share(names)}", "graphs are not counted in the share"),
        ("enforce_eager=True, or fewer cudagraph_capture_sizes", "no graphs, or fewer"),
    ]


def _lmdeploy(failure: Failure, names: Names) -> Answer:
    return "LMDeploy found no room for its KV cache beside the weights.", [
        (
            "session_len and max_batch_size lower, cache_max_entry_count lower if the card is shared",
            "cache_max_entry_count is a share of what is free",
        ),
    ]


def _flashinfer(failure: Failure, names: Names) -> Answer:
    wanted = _number(failure, "wanted_bytes")
    size = f" of {wanted / 2**20:.0f} MiB" if wanted else ""
    return f"FlashInfer's own workspace buffer{size} is too small for this batch; the device may have memory left.", [
        (
            "a larger workspace (SGLang: SGLANG_FLASHINFER_WORKSPACE_SIZE; else workspace_buffer's size)",
            "the buffer has a fixed size",
        ),
        (f"lower {names.max_seqs or 'the most sequences at once'}", "the workspace grows with the batch"),
    ]


ENGINES: dict[str, Callable[[Failure, Names], Answer]] = {
    "vllm.free_below_share": _free_below_share,
    "vllm.free_below_share_short": _free_below_share,
    "vllm.no_cache_blocks": _no_cache_blocks,
    "vllm.context_too_long": _context_too_long,
    "vllm.context_over_cache": _context_too_long,
    "vllm.context_too_long_short": _context_too_long,
    "vllm.profiling": _profiling,
    "vllm.sampler_warmup": _sampler_warmup,
    "vllm.load_model": _load_model,
    "vllm.wake": _wake,
    "vllm.sleep": _sleep,
    "vllm.expandable_segments": _expandable,
    "torch_memory_saver.expandable_segments": _expandable,
    "vllm.graph_capture": _graph_capture,
    "torch_memory_saver.resume": _memory_saver,
    "torch_memory_saver.check": _memory_saver,
    "sglang.no_pool": _sglang_no_pool,
    "sglang.prefill": _sglang_pool,
    "sglang.decode": _sglang_pool,
    "sglang.tokens": _sglang_pool,
    "sglang.retracted": _sglang_retracted,
    "tgi.warmup": _tgi_warmup,
    "sglang.request_rows": _sglang_pool,
    "sglang.graph_capture": _sglang_graphs,
    "sglang.unbalanced": _sglang_unbalanced,
    "lmdeploy.no_memory": _lmdeploy,
    "flashinfer.workspace": _flashinfer,
}
