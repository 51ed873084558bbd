"""What to try, by cause and by what the run was doing; the cheapest thing that can be enough comes first."""

from __future__ import annotations

from memprof.units import format_bytes

__all__ = ["remedies"]

Remedy = tuple[str, str]

_EXPANDABLE = {
    "CUDA": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "HIP": "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",
    "NPU": "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
}
_SNAPSHOT = (
    "record the next run: callbacks=[MemProfCallback()], or `memprof run train.py`",
    "a message says how much is missing, a recording says which tensors hold the rest",
)
_MICRO_BATCH = (
    "halve per_device_train_batch_size and double gradient_accumulation_steps",
    "activations and the loss's temporaries shrink by half; the gradient is the same",
)
_CHECKPOINT = (
    "gradient_checkpointing=True",
    "keeps one tensor per layer instead of all of them, for about a third more compute",
)
_BY_PHASE: dict[str | None, list[Remedy]] = {
    "generate": [
        (
            "lower per_device_train_batch_size × steps_per_generation",
            "that many sequences are generated at once, each with its keys and values for every layer",
        ),
        ("lower max_completion_length", "the cache grows with every token of every sequence"),
        (
            "with vLLM: lower vllm_gpu_memory_utilization, or vllm_enable_sleep_mode=True",
            "the engine takes its share for good unless it sleeps while the policy trains",
        ),
    ],
    "reward": [("score fewer completions at a time, or run the reward model elsewhere", "its activations come on top")],
    "old_logprobs": [_MICRO_BATCH, ("lower max_completion_length", "log-probs are taken over the whole sequence")],
    "forward": [_CHECKPOINT, _MICRO_BATCH],
    "backward": [_CHECKPOINT, _MICRO_BATCH],
    "optimizer_step": [
        ("optim='paged_adamw_8bit' or 'adamw_8bit'", "moments take 2 bytes a parameter instead of 8"),
        ("train a LoRA adapter instead of all weights", "gradients and moments exist for the adapter only"),
        ("optim='adamw_torch_fused'", "the unfused update makes one more set of parameter-sized temporaries"),
    ],
    "load": [
        ("model_init_kwargs={'dtype': 'bfloat16'}", "a model given by its name is loaded in fp32: twice the bytes"),
        ("load the model in 4 bits and train LoRA on it", "about half a byte a parameter"),
    ],
}
_LOGITS = (
    "use a loss that never builds all logits (TRL >= 1.0 does, older: use_liger_kernel=True)",
    "a [tokens, vocabulary] tensor and its gradient are often the largest in a GRPO step",
)


def remedies(cause: str, backend: str, phase: str | None, logits: bool, requested: int | None) -> list[Remedy]:
    """Actions with their reasons, in the order in which to try them.

    Args:
        cause: an id of ``explain``.
        backend: ``CUDA``, ``HIP``, ``XPU``, ``MPS``, ...
        phase: what the run was doing, where the traceback tells.
        logits: whether the block is likely as wide as the vocabulary.
        requested: bytes that were asked for.
    """
    found = list(_BY_CAUSE.get(cause, []))
    if cause == "fragmentation":
        found = _against_fragments(backend)
    if cause in ("full", "larger_than_device", "fragmentation", "limit", "unknown", "library", "refused"):
        work = [_LOGITS] if logits and phase in ("forward", "backward", "old_logprobs", None) else []
        work += _BY_PHASE.get(phase, [_MICRO_BATCH, _CHECKPOINT])
        found += work if cause != "fragmentation" else work[:1]
    if cause == "larger_than_device" and requested:
        found.insert(0, (f"find the tensor of {format_bytes(requested)}", "a shape is wrong, or grows with batch × T²"))
    if cause not in ("host", "cpu", "killed"):
        found.append(_SNAPSHOT)
    return list(dict.fromkeys(found))


def _against_fragments(backend: str) -> list[Remedy]:
    found: list[Remedy] = []
    if (setting := _EXPANDABLE.get(backend)) is not None:
        found.append((setting, "segments grow page by page, so what is free in them can be used together"))
    if backend == "XPU":
        found.append(("torch.xpu.empty_cache() between generation and training", "gives whole unused segments back"))
    if backend == "MPS":
        found.append(("torch.mps.empty_cache() between generation and training", "gives unused buffers back"))
    if backend in _EXPANDABLE:
        found.append((
            "torch_empty_cache_steps=1, or empty_cache() between generation and training",
            "the two leave blocks of different sizes to each other",
        ))  # fmt: skip
    found.append(("pad to a multiple (pad_to_multiple_of=64)", "lengths that repeat leave blocks that fit again"))
    return found


_BY_CAUSE: dict[str, list[Remedy]] = {
    "other_processes": [
        ("nvidia-smi, and end what is left over from an earlier run", "a crashed job's children keep their memory"),
        ("CUDA_VISIBLE_DEVICES=<another device>", "the device is shared; another may be free"),
        (
            "if the other is your inference server: lower its gpu_memory_utilization",
            "both have to fit: a server takes its share when it starts and keeps it",
        ),
    ],
    "outside_torch": [
        ("NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS, fewer process groups", "every communicator keeps buffers of its own"),
        (
            "an engine in the process: lower its memory share, or let it sleep while training",
            "its pools are outside torch's figures",
        ),
        ("CUDA_MODULE_LOADING=LAZY", "kernels are loaded when they are used; the default since CUDA 12.2"),
    ],
    "limit": [
        ("raise the limit: torch.cuda.set_per_process_memory_fraction, PYTORCH_MPS_HIGH_WATERMARK_RATIO",
         "the device has more than the process may use"),
    ],
    "refused": [
        ("check the container's and the MIG slice's limits, ulimit -v, and nvidia-smi at that moment",
         "the device itself had room"),
    ],
    "driver": [
        ("leave more of the device free: a smaller share for the engine, a smaller micro-batch",
         "contexts, kernels and NCCL need memory that torch's cache does not give back by itself"),
        ("nvidia-smi: is another process on the device?", "the driver counts them all"),
    ],
    "library": [
        ("leave more of the device free, or create the handle early (one small matmul at the start)",
         "cuBLAS asks the device for its workspace when first used"),
    ],
    "cpu": [
        ("look for a tensor on the CPU that was meant for the device", "a mask or a cast of the whole batch, often"),
        ("lower dataloader workers and prefetching; stream the dataset", "each worker holds batches of its own"),
    ],
    "host": [
        ("stream or memory-map the dataset; fewer dataloader workers", "each worker holds copies of its own"),
        ("load with low_cpu_mem_usage, in bf16", "a second copy of the weights is made on the host while loading"),
    ],
    "killed": [
        ("look at `dmesg` or the container's events: who was killed, at what size", "the kernel says it there only"),
        ("less host memory: fewer dataloader workers, no CPU offload, bf16 loading", "offloaded state is on the host"),
    ],
    "engine": [
        ("raise gpu_memory_utilization, or lower max_model_len", "weights come first, the cache gets what is left"),
        ("build the engine before the policy, or let it sleep", "it measures what is free when it starts"),
    ],
}  # fmt: skip
