"""What to try where torch's own allocator ran out: by cause, then by what the run was doing."""

from __future__ import annotations

from memprof.oom.arithmetic import Verdict
from memprof.oom.failure import Failure
from memprof.oom.frameworks import Names
from memprof.units import format_bytes

__all__ = ["Remedy", "device_remedies"]

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
_WORK_CAUSES = ("full", "limit", "unknown")


def device_remedies(verdict: Verdict, failure: Failure, phase: str | None, logits: bool, names: Names) -> list[Remedy]:
    """Return actions with their reasons, in the order in which to try them."""
    found = _for_cause(verdict, failure, names)
    if verdict.reason not in ("overflow", "metal_buffer"):
        work = _for_phase(phase, logits, names)
        if verdict.cause == "larger_than_device":  # checkpointing keeps fewer tensors, none of them smaller
            found += [row for row in work if row[0] != names.checkpointing]
        elif verdict.cause in _WORK_CAUSES:
            found += work
        elif verdict.cause == "fragmentation":
            found += work[:1]
        found.append(_SNAPSHOT)
    return list(dict.fromkeys(row for row in found if row[0]))


def _for_cause(verdict: Verdict, failure: Failure, names: Names) -> list[Remedy]:
    if verdict.cause == "fragmentation":
        return _against_gaps(failure.backend, names)
    if verdict.reason == "full_with_gaps":
        return _against_gaps(failure.backend, names)[:1]
    if verdict.cause == "larger_than_device":
        return _too_large(verdict, failure, names)
    if verdict.cause in ("other_processes", "unexplained"):
        return _shared(verdict, names)
    table = {"limit": _limit, "refused": _refused, "outside_torch": _outside}
    make = table.get(verdict.cause)
    return make(verdict, failure, names) if make is not None else []


def _against_gaps(backend: str, names: Names) -> list[Remedy]:
    found: list[Remedy] = []
    if (setting := _EXPANDABLE.get(backend)) is not None:
        why = "segments grow page by page, so what is free in them can be used together"
        if names.sleep:
            why += "; not beside vLLM's sleep mode, which refuses it"
        found.append((setting, why))
    if backend in ("XPU", "MPS"):
        found.append(
            (f"torch.{backend.lower()}.empty_cache() between generation and training", "gives unused memory back")
        )
    else:
        found.append(
            (
                "torch_empty_cache_steps=1, or empty_cache() between generation and training",
                "the two leave blocks of different sizes to each other",
            )
        )
    found.append(("pad to a multiple (pad_to_multiple_of=64)", "lengths that repeat leave blocks that fit again"))
    return found


def _too_large(verdict: Verdict, failure: Failure, names: Names) -> list[Remedy]:
    size = format_bytes(failure.requested or 0)
    if verdict.reason == "overflow":
        return [
            (
                "print the shapes and dtypes that go into the operation the traceback ends in",
                "a dimension is negative, an index is garbage, or two sizes multiplied past 2^63",
            )
        ]
    if verdict.reason == "metal_buffer":
        return [
            (
                "split the tensor (smaller batch or shorter sequences), or use a backend without the limit",
                "Metal caps the size of one buffer, not their sum",
            )
        ]
    return [
        (
            f"find the tensor of {size}: an attention matrix or logits of the whole batch?",
            "the shape has to shrink, no setting of the allocator can place it",
        ),
        (
            "attn_implementation='flash_attention_2' or 'sdpa' (not 'eager', no output_attentions)",
            "attention scores are then never a tensor: heads × tokens² becomes tokens",
        ),
    ]


def _shared(verdict: Verdict, names: Names) -> list[Remedy]:
    found: list[Remedy] = []
    if verdict.reason == "ranks_on_one_device":
        found.append(
            (
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), device_map={'': LOCAL_RANK}",
                "as many processes as ranks on one device: every rank loads onto device 0",
            )
        )
    share = f" ({names.share})" if names.share else ""
    found += [
        ("nvidia-smi, and end what is left over from an earlier run", "a crashed job's children keep their memory"),
        (
            f"if the other is your inference engine: lower its share{share}, or put it on another device",
            "both have to fit: an engine takes its share when it starts and keeps it",
        ),
        ("CUDA_VISIBLE_DEVICES=<another device>", "the device is shared; another may be free"),
    ]
    if verdict.reason != "ranks_on_one_device":
        found.append(
            (
                "if several ranks share it by mistake: device_map={'': LOCAL_RANK}, torch.cuda.set_device(LOCAL_RANK)",
                "every rank of a launch has a device of its own",
            )
        )
    return found


def _limit(verdict: Verdict, failure: Failure, names: Names) -> list[Remedy]:
    if verdict.reason == "mps_watermark":
        found: list[Remedy] = []
        if (failure.other or 0) > (failure.allocated or 0) // 2:
            found.append(
                (
                    "close other programs that draw on the GPU, empty caches of other libraries (mlx, coreml)",
                    f"{format_bytes(failure.other or 0)} are Metal allocations beside torch's tensors",
                )
            )
        return [
            *found,
            ("torch.mps.empty_cache() between generation and training", "gives unused buffers back"),
            (
                "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 only if the machine has memory to spare",
                "it lifts the limit; the whole machine can then run out",
            ),
        ]
    return [
        (
            "raise the limit: torch.cuda.set_per_process_memory_fraction, or per_process_memory_fraction in "
            "PYTORCH_CUDA_ALLOC_CONF",
            "the device has more than the process may use",
        )
    ]


def _refused(verdict: Verdict, failure: Failure, names: Names) -> list[Remedy]:
    if verdict.reason == "xpu_single_allocation":
        return [
            (
                "UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1 (in other versions UR_L0_ENABLE_RELAXED_ALLOCATION_LIMITS=1)",
                "lifts Level Zero's 4 GiB limit for a single allocation",
            ),
            (
                "keep single tensors below 4 GiB: smaller batches, attention in slices",
                "the limit concerns one block, not their sum",
            ),
        ]
    if failure.backend == "HIP":
        return [
            (
                "PYTORCH_HIP_ALLOC_CONF=garbage_collection_threshold:0.8,max_split_size_mb:512",
                "the driver could not place the block although bytes were free; smaller segments are easier to place",
            ),
            (
                "check what else uses the card (a desktop, another program), and the driver's version",
                "the free figure is the card's, not what one allocation can get; Windows reserves part of it",
            ),
        ]
    return [
        (
            "check the container's and the MIG slice's limits, ulimit -v, and nvidia-smi at that moment",
            "the device itself had room",
        ),
        (
            "if the text is of a later moment (a retry, a caught exception): read the first failure instead",
            "memory is given back while an exception unwinds",
        ),
    ]


def _outside(verdict: Verdict, failure: Failure, names: Names) -> list[Remedy]:
    share = f" ({names.share}; {names.sleep})" if names.share and names.sleep else ""
    return [
        (
            f"an engine in the process: lower its share, or let it sleep while training{share}",
            "its pools are outside torch's figures",
        ),
        ("NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS, fewer process groups", "every communicator keeps buffers of its own"),
        ("CUDA_MODULE_LOADING=LAZY", "kernels are loaded when they are used; the default since CUDA 12.2"),
    ]


def _for_phase(phase: str | None, logits: bool, names: Names) -> list[Remedy]:
    """Return what makes less of the work that was being done."""
    micro = (names.micro_batch, "activations and the loss's temporaries shrink with it; the gradient is the same")
    checkpoint = (
        names.checkpointing,
        "keeps one tensor per layer instead of all of them, for about a third more compute",
    )
    if names.framework in ("vLLM", "SGLang", "TGI"):
        micro = (names.micro_batch, "fewer tokens at once in one forward")
        checkpoint = (names.checkpointing, "CUDA graphs keep memory of their own")
    wide = (
        names.logits or "compute log-probabilities in chunks, never all logits at once",
        "a [tokens, vocabulary] tensor and its gradient are often the largest in a GRPO step",
    )
    found: list[Remedy] = (
        [wide] if logits and phase in ("forward", "backward", "old_logprobs", "reference_logprobs", None) else []
    )
    table: dict[str | None, list[Remedy]] = {
        "generate": [
            (names.rollout or "generate fewer sequences at once", "each has its keys and values for every layer"),
            (names.length or "generate fewer tokens", "the cache grows with every token of every sequence"),
            *_engine_share(names),
        ],
        "reward": [
            ("score fewer completions at a time, or run the reward model elsewhere", "its activations come on top")
        ],
        "old_logprobs": [
            (names.log_probs or micro[0], "log-probs are taken over whole sequences, many at once"),
            (names.length, "they grow with the longest sequence"),
        ],
        "reference_logprobs": [
            (names.log_probs or micro[0], "log-probs are taken over whole sequences, many at once"),
            ("offload the reference model, or beta=0.0 without one", "it is a second set of weights"),
        ],
        "forward": [micro, checkpoint],
        "backward": [micro, checkpoint],
        "optimizer_step": [
            (
                "optim='adamw_torch_fused' (fused=True)",
                "an unfused (foreach) step makes a set of parameter-sized temporaries",
            ),
            (names.optimizer, "moments take 2 bytes a parameter instead of 8, or leave the device"),
            ("train a LoRA adapter instead of all weights", "gradients and moments exist for the adapter only"),
            (names.shard, "each rank then holds a part of the optimizer's state"),
        ],
        "load": [
            ("load in bf16 (dtype='bfloat16')", "a model given by its name may be loaded in fp32: twice the bytes"),
            ("load the model in 4 bits and train LoRA on it", "about half a byte a parameter"),
            (names.shard, "each rank then holds a part of the weights"),
        ],
        "save": [
            (
                "save sharded (FSDP: SHARDED_STATE_DICT) or gather onto the CPU, rank by rank",
                "a full state dict on the device is one more copy of the weights",
            )
        ],
        "weight_sync": [
            (
                "send the weights bucket by bucket, with the engine asleep or its cache freed",
                "gathered weights stand beside the engine's own copy",
            ),
            *_engine_share(names),
        ],
        "wake": [
            ("empty_cache() before the engine wakes", "torch's idle cache stands where its pool has to go"),
            *_engine_share(names),
        ],
    }
    return found + table.get(phase, [micro, checkpoint])


def _engine_share(names: Names) -> list[Remedy]:
    if not names.share:
        return []
    rows = [(f"lower {names.share}", "an engine takes its share when it starts")]
    if names.sleep:
        rows.append((names.sleep, "the engine gives its share back while the policy trains"))
    return rows
