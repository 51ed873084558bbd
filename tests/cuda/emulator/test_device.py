"""What torch sees of the emulated device, and that its bytes are counted as on a card."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest

from memprof.config.gpus import find_gpu
from memprof.emulate.launch import environment

torch = pytest.importorskip("torch")
MIB = 2**20


def on_card(card: str, code: str, **options: object) -> dict[str, object]:
    """Run code in a process of its own on a card; it prints one line of JSON."""
    env = environment(card, **options)  # type: ignore[arg-type]
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


DESCRIBE = (
    "import json, torch; p = torch.cuda.get_device_properties(0); free, total = torch.cuda.mem_get_info()\n"
    "print(json.dumps([p.name, p.total_memory, p.major, p.minor, p.multi_processor_count, free, total,"
    " torch.cuda.device_count()]))"
)


@pytest.mark.parametrize("name", ["T4", "RTX 4090", "H200"])
def test_a_card_of_the_table_is_seen_as_it_is_there(name: str) -> None:
    gpu = find_gpu(name)
    seen = on_card(name, DESCRIBE, devices=2)
    free = gpu.total_bytes - gpu.context_bytes
    expected = [f"{name} (emulated)", gpu.total_bytes, *gpu.capability, gpu.multiprocessors, free, gpu.total_bytes, 2]
    assert seen == expected


def test_visible_devices_are_honoured() -> None:
    code = (
        "import json, os; os.environ['CUDA_VISIBLE_DEVICES'] = '3,1'; import torch\n"
        "print(json.dumps([torch.cuda.device_count(),"
        " [torch.cuda.get_device_properties(i).pci_bus_id for i in range(2)]]))"
    )
    assert on_card("24GiB", code, devices=4) == [2, [4, 2]]


def test_memory_is_counted_and_given_back() -> None:
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    tensor = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
    held = before - torch.cuda.mem_get_info()[0]
    del tensor
    torch.cuda.empty_cache()
    assert total == find_gpu("H100").total_bytes
    assert held == 100 * MIB
    assert torch.cuda.mem_get_info()[0] == before


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_full_card_is_out_of_memory(conf: str) -> None:
    code = f"""
import json, os
os.environ['PYTORCH_CUDA_ALLOC_CONF'] = {conf!r}
import torch
held = []
try:
    while True: held.append(torch.empty(2**30, dtype=torch.uint8, device='cuda'))
except torch.OutOfMemoryError as error:
    stats = torch.cuda.memory_stats()
    print(json.dumps([len(held), stats['num_ooms'], 'of which' in str(error), torch.cuda.mem_get_info()[0] < 2**30]))
"""
    assert on_card("8GiB", code, context="900MiB", values=False) == [7, 1, True, True]


def test_graphs_are_refused_by_name() -> None:
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="CUDA graphs are not emulated"), torch.cuda.graph(graph):
        pass


def test_an_event_is_finished_late() -> None:
    code = (
        "import json, time, torch\n"
        "side = torch.cuda.Stream(); x = torch.empty(2**25, dtype=torch.uint8, device='cuda'); x.record_stream(side)\n"
        "del x; late = torch.cuda.memory_stats()['active_bytes.all.current']\n"
        "time.sleep(0.3); y = torch.empty(512, dtype=torch.uint8, device='cuda')\n"
        "print(json.dumps([late, torch.cuda.memory_stats()['active_bytes.all.current']]))"
    )
    assert on_card("24GiB", code, event_delay_us=200_000) == [2**25, 512]


def test_what_bitsandbytes_links_beside_torch_s_own_is_there() -> None:
    core = ctypes.CDLL(os.path.join(os.environ["MEMPROF_EMULATE_HOME"], "libmemprof_emulator.so"))
    assert core.cudaMemPrefetchAsync(None, 0, 0, 0, None) == 0


PLACE = f"""
import json, random, torch
from memprof.allocator.addresses import Addresses
rng, rule, live, place, seen, due = random.Random(5), Addresses(), [], {{}}, [], []
def segments(): return {{s["address"]: s["total_size"] for s in torch.cuda.memory_snapshot()}}
for _ in range(120):
    before = segments()
    if rng.random() < 0.4 and live:
        live.pop(rng.randrange(len(live)))
        torch.cuda.empty_cache()
    else:
        size = rng.choice((1, 14, 20, 26, 40, 80, 100, 128)) * {MIB} - 9
        live.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    after = segments()
    for address in sorted(before.keys() - after.keys()):
        rule.give_back(place.pop(address), before[address])
    for address in after.keys() - before.keys():
        place[address] = rule.take(after[address])
        seen.append(address)
        due.append(place[address])
print(json.dumps([[a - seen[0] for a in seen], [a - due[0] for a in due]]))
"""


def test_segments_lie_as_the_model_puts_them() -> None:
    """Ranges of 32 MiB downwards, what fits behind a segment in its range; given back and taken again."""
    seen, expected = on_card("24GiB", PLACE)
    assert len(set(seen)) > 20  # type: ignore[arg-type]
    assert seen == expected


BLOCKS = """
import json, random, torch
from memprof.allocator.model import CachingAllocator
from memprof.allocator.settings import settings_of
rng, heap, live, seen, due = random.Random(7), CachingAllocator(), [], [], []
heap.settings = settings_of(torch.cuda.memory._snapshot()["allocator_settings"])
for _ in range(3000):
    if rng.random() < 0.47 and live:
        tensor, address = live.pop(rng.randrange(len(live)))
        heap.free(address)
        del tensor
    else:
        size = rng.choice((512, 2**19, 2**20, 2**20, 2**21, 2**22, 2**22, 2**25))
        live.append((torch.empty(size, dtype=torch.uint8, device="cuda"), heap.malloc(size)[0]))
        seen.append(live[-1][0].data_ptr())
        due.append(live[-1][1])
print(json.dumps([[a - seen[0] for a in seen], [a - due[0] for a in due], torch.cuda.memory_reserved(), heap.reserved]))
"""


def test_blocks_are_taken_as_the_model_takes_them() -> None:
    """Of free blocks of one size that of the oldest segment (torch 2.13): each block lies where the model has it."""
    seen, expected, reserved, modelled = on_card("24GiB", BLOCKS)  # type: ignore[misc]
    assert reserved == modelled
    assert seen == expected
