"""Know the memory that CUDA kernels ask for inside one operation and give back before it returns.

No dispatch shows it. Each entry is read from the kernel's own source (named beside it), and is modelled, not
executed. ``tests/simulate/kernels/recorded.json`` holds what torch's CUDA build asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from memprof.compat import torch as torch_names
from memprof.simulate.recorder.blocks import SimulatedBlocks
from memprof.simulate.recorder.decode_log import Kernel
from memprof.simulate.recorder.reductions import Processors, reduction_buffers
from memprof.vocabulary import Category

_ATEN = torch.ops.aten
_graph_task: Any = torch_names.GRAPH_TASK.get()
# Of every operation is asked whether it is one of these: by identity, since hashing an operator costs a call.
_MULTIPLIES = set(
    map(id, (_ATEN.mm.default, _ATEN.mm.out, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default))
)
_FOREACH_NORM: Any = torch_names.FOREACH_NORM.get()
_FLASH_BACKWARD: Any = torch_names.FLASH_BACKWARD.get()
#: How many of their first arguments these copy where they are not contiguous.
_LAYER_NORMS = {_ATEN.native_layer_norm.default: 1, _ATEN.native_layer_norm_backward.default: 2}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Threads of a multiprocessor whose shared memory does not hold the larger tiles, so that a kernel splits them.
_CRAMPED = 1536
_FEW_IDS = 3072  # up to which nothing is sorted by cub's large kernels
_CHUNK = 65536  # elements of a tensor that one block of a multi-tensor kernel works on


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_Arguments = tuple[Any, ...]
#: Sizes that are there together, group after group.
_Groups = list[list[int]]


def _flash_forward(call: Kernel, card: Processors) -> _Groups:
    """Follow flash-attention 2's ``mha_fwd``: partial results where keys are divided among idle processors."""
    query, key = call.args[0], call.args[1]
    batch, heads, tokens, width = query.shape
    if tokens == 1 and heads > key.shape[1]:  # a group's queries count as tokens of one head
        tokens, heads = heads // key.shape[1], key.shape[1]
    parts = -(-key.shape[2] // (256 if width <= 64 else 128 if width <= 128 else 64))
    splits = _flash_splits(batch * heads * -(-tokens // 64), parts, 2 * card.number)
    if splits == 1:
        return []
    rows = splits * batch * heads * tokens * 4
    return [[rows, rows * _up(width, 32 if width <= 128 else 64)]]


@lru_cache(maxsize=1024)
def _flash_splits(blocks: int, parts: int, slots: int) -> int:
    """Follow ``num_splits_heuristic``: the fewest splits that use 85% of what the best number of them uses."""
    if blocks >= 0.8 * slots:
        return 1
    used: dict[int, float] = {}
    for splits in range(1, min(128, slots, parts) + 1):
        if splits == 1 or -(-parts // splits) != -(-parts // (splits - 1)):
            waves = blocks * splits / slots
            used[splits] = waves / -(-blocks * splits // slots)
    best = max(used.values())
    return next(splits for splits, share in used.items() if share >= 0.85 * best)


def _flash_backward(call: Kernel, card: Processors) -> _Groups:
    """Follow flash-attention 2's ``mha_bwd``: fp32 dQ accumulator, softmax sums, dK and dV before groups are summed."""
    grad, query, key = call.args[0], call.args[1], call.args[2]
    batch, heads, tokens, width = query.shape
    kv_heads, kv_tokens = key.shape[1], key.shape[2]
    rounded = _up(tokens, 128)
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * _up(width, 32) * 4]
    if heads != kv_heads:
        sizes += [batch * kv_tokens * heads * width * grad.element_size()] * 2
    return [sizes]


def _efficient_backward(call: Kernel, card: Processors) -> _Groups:
    """Follow memory-efficient attention's backward: row sums of grad · output, and an fp32 dQ with its locks."""
    query = call.args[1]
    batch, heads, tokens, width = query.shape
    sums, half = batch * heads * tokens * 4, query.element_size() < 4
    wide = half and 64 < width <= 128
    cramped = wide and card.threads == _CRAMPED
    block = 128 if wide and not cramped else 64
    locks = -(-tokens // block) * (-(-width // block) if cramped else 1) * 16
    # Tiles of dK and dV that do not fit into shared memory, of every part that the keys are divided into.
    parts = max(1, min(-(-call.args[2].shape[2] // 64), 200 // (batch * heads)))
    more = parts * 2 * 64 * 128 * 4 if cramped else 0
    work = batch * heads * (_up(tokens, block) * _up(width, 32) * 4 + locks + more)
    if half:
        return [[sums, work]]
    return [[sums * width, sums, sums], [sums, work]]  # the kernel does not sum float32 itself


def _embedding_backward(call: Kernel, card: Processors) -> _Groups:
    """Follow ``embedding_backward_cuda_kernel``: where each id's rows begin, and fp32 sums of ten rows or fewer."""
    ids, ids_bytes = call.args[1].numel(), call.args[1].numel() * 8
    if ids <= _FEW_IDS:
        return []
    distinct = min(ids, call.args[2])
    parts = ids // 10 + distinct
    segments = [ids_bytes, 8, distinct * 8, distinct * 8, 8]
    return [[ids_bytes, 8, ids_bytes], [*segments, parts * 8, parts * call.args[0].shape[-1] * 4]]


def _safe_softmax(call: Kernel, card: Processors) -> _Groups:
    """Follow ``_safe_softmax``: which inputs are minus infinity, in which rows all are, and the zero put there."""
    source = call.args[0]
    return [[source.numel(), source.numel() // max(1, source.shape[call.args[1]]), 4]]


def _softmax_backward(call: Kernel, card: Processors) -> _Groups:
    """Follow ``softmax_backward_cuda_out``: gradient times output, which ``log_softmax`` does without."""
    return [[call.args[0].numel() * max(call.args[0].element_size(), call.args[1].element_size())]]


def _masked_scatter(call: Kernel, card: Processors) -> _Groups:
    """Follow ``masked_scatter_cuda``: a prefix sum over the mask, the mask in a row, what cub needs for both."""
    count = call.args[0].numel()
    row = [] if call.args[1].is_contiguous() and call.args[1].shape == call.args[0].shape else [count]
    return [[count * 8, *row, _up((-(-count // 896) + 32) * 16, 256) + 511]]


def _index_put(call: Kernel, card: Processors) -> _Groups:
    """Follow ``index_put_with_sort_kernel``: positions of a mask, then linear indices and their sorted copies."""
    accumulate = call.args[3] if len(call.args) > 3 else call.kwargs.get("accumulate", False)
    indices, values = [i for i in call.args[1] if i is not None], call.args[2]
    masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8)]
    count = values.shape[0] if masks and values.dim() else max(i.numel() for i in indices)
    found = [count * 8 * mask.dim() for mask in masks]
    if not accumulate:
        return [found]
    return [[*found, *[count * 8] * 3], [*[count * 8] * 4, _sort_bytes(count)]]


def _sort_bytes(count: int) -> int:
    """Reckon what cub's radix sort of that many pairs of 64-bit numbers needs (as recorded, within some KiB)."""
    return 1 if count <= _FEW_IDS else _up(16 * count + 2 * count // 9 + 4210, 256) + 511


def _reduction(call: Kernel, card: Processors) -> _Groups:
    """Follow ``gpu_reduce_kernel``; integers and booleans are summed in a copy of the result's dtype."""
    source = call.args[0]
    over = call.args[1] if len(call.args) > 1 else None
    if not isinstance(over, (list, tuple, int)):
        over = call.kwargs.get("dim")
    return _reduced(source, _as_list(over), call.made, card)


def _vector_norm(call: Kernel, card: Processors) -> _Groups:
    over = call.args[2] if len(call.args) > 2 else call.kwargs.get("dim")
    return _reduced(call.args[0], _as_list(over), call.made, card)


def _reduced(source: Any, over: list[int], out: Sequence[Any], card: Processors) -> _Groups:
    strides, groups = source.stride(), []
    wanted = out[0].dtype if out else source.dtype
    size = 4 if wanted in _FLOATS else wanted.itemsize
    if source.dtype is not wanted and source.dtype not in _FLOATS and source.dim():
        groups = [source.numel() * wanted.itemsize]
        strides = torch_names.CONTIGUOUS_STRIDES.get()(tuple(source.shape))
    return [groups + reduction_buffers(source.shape, strides, over, size, card)]


def _multinomial(call: Kernel, card: Processors) -> _Groups:
    """Follow ``multinomial`` of one draw: checks of the scores and of each row's sum, then a random number a score."""
    scores, draws = call.args[0], call.args[1]
    if draws != 1:
        return []
    shape, strides, size = scores.shape, scores.stride(), scores.element_size()
    last, rows = [len(shape) - 1], scores.numel() // shape[-1]
    extremes, held = [4, 4], [4, 4, 1]
    return [
        [*extremes, *reduction_buffers(shape, strides, [], 2 * size, card)],
        [*extremes, 1, 1, 1],
        [*held, rows * size, *reduction_buffers(shape, strides, last, size, card)],
        [*held, rows * size, rows, 1],
        [*held, 1, scores.numel() * size, *reduction_buffers(shape, strides, last, 16, card)],
    ]


def _as_list(over: Any) -> list[int]:
    return [] if over is None else [over] if isinstance(over, int) else list(over)


_Hidden = Callable[[Kernel, Processors], _Groups]
_HIDDEN: dict[Any, _Hidden] = {
    torch_names.FLASH.get(): _flash_forward,
    _FLASH_BACKWARD: _flash_backward,
    torch_names.EFFICIENT_BACKWARD.get(): _efficient_backward,
    _ATEN.embedding_dense_backward.default: _embedding_backward,
    torch_names.SAFE_SOFTMAX.get(): _safe_softmax,
    torch_names.SOFTMAX_BACKWARD.get(): _softmax_backward,
    _ATEN.masked_scatter.default: _masked_scatter,
    _ATEN.index_put.default: _index_put,
    _ATEN.index_put_.default: _index_put,
    _ATEN.sum.default: _reduction,
    _ATEN.sum.dim_IntList: _reduction,
    _ATEN.mean.default: _reduction,
    _ATEN.mean.dim: _reduction,
    _ATEN.linalg_vector_norm.default: _vector_norm,
    _ATEN.multinomial.default: _multinomial,
}
_HIDES = set(map(id, _HIDDEN))
_EARLY = set(map(id, (_FLASH_BACKWARD, _FOREACH_NORM, *_LAYER_NORMS, _ATEN.embedding_dense_backward.default)))


def hidden_bytes(call: Kernel, card: Processors) -> list[list[int]]:
    """List the sizes of what an operation's CUDA kernel allocates after its results: groups, one after the other."""
    return _HIDDEN[call.func](call, card)


class KernelMemory:
    """Take what CUDA's kernels take beside the results of operations.

    ``workspace``: bytes that cuBLAS takes for each thread that multiplies, the caller's and the autograd engine's.
    """

    def __init__(self, blocks: SimulatedBlocks) -> None:
        self.processors = Processors(132, 2048)
        self.workspace = 0
        self._blocks = blocks
        self._workspaces: set[bool] = set()

    def before(self, func: Any, args: _Arguments) -> list[int]:
        """Take what a kernel holds from before its results are made until they are there; return the addresses."""
        if id(func) not in _EARLY:
            return []
        return [self._blocks.make_bytes(size, func) for size in _early_bytes(func, args)]

    def after(self, call: Kernel) -> None:
        """Take what a kernel takes once its results are there, and give it back."""
        if id(call.func) in _HIDES:
            if self._blocks.rehearsal is not None:
                self._blocks.rehearsal.kernel(call)
            else:
                self.run(call)

    def run(self, call: Kernel) -> None:
        """Take what the kernel of one of these operations takes, and give it back: groups, one after the other."""
        for sizes in hidden_bytes(call, self.processors):
            self._blocks.scratch(sizes, call.func)

    def multiply(self, func: Any) -> None:
        """Take cuBLAS's workspace for this thread, where ``func`` uses it and it has none."""
        if id(func) in _MULTIPLIES and self.workspace:
            self.claim_workspace()

    def claim_workspace(self) -> None:
        """Take cuBLAS's workspace for this thread, where it has none."""
        if self._blocks.rehearsal is not None:
            self._blocks.rehearsal.workspace()
            return
        in_engine = _graph_task() != -1
        if in_engine not in self._workspaces:
            self._workspaces.add(in_engine)
            self._blocks.hold(self.workspace, Category.WORKSPACE, "cuBLAS workspace")


def _early_bytes(func: Any, args: tuple[Any, ...]) -> list[int]:
    """List the sizes of what ``func``'s CUDA kernel allocates before its results, and holds until they are there."""
    if func is _FLASH_BACKWARD:  # works on [batch, tokens, heads, width] in a row
        copied = [t for t in (args[0], args[4]) if not t.transpose(1, 2).is_contiguous()]
        return [t.numel() * t.element_size() for t in copied]
    if func in _LAYER_NORMS:  # layer_norm_kernel.cu: works on rows in a row
        copied = [t for t in args[:_LAYER_NORMS[func]] if not t.is_contiguous()]
        return [t.numel() * t.element_size() for t in copied]
    if func is _ATEN.embedding_dense_backward.default:
        ids = args[1].numel()
        return [ids * 8] * 2 if ids > _FEW_IDS else []
    if not args[0]:
        return []
    # ForeachReduceOp.cu: a partial norm of every chunk, as many for each tensor as for the largest.
    tensors = args[0]
    chunks = -(-max(tensor.numel() for tensor in tensors) // _CHUNK)
    return [len(tensors) * chunks * max(4, tensors[0].element_size())]
