"""bitsandbytes on the emulated device: its CUDA path asks for the memory, its CPU kernels give the values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
bnb = pytest.importorskip("bitsandbytes")

from memprof.emulate.notes import uncomputed_notes  # noqa: E402
from memprof.simulate.fake_cuda.nf4 import Linear4bit, Nf4, tell_of_adapters  # noqa: E402
from memprof.simulate.run import simulate  # noqa: E402

F: Any = bnb.functional
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS, COLUMNS = 192, 320


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def parts(state: Any) -> list[Any]:
    """List the tensors of a quantisation state."""
    second = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *second]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_are_quantised_and_unpacked_as_on_the_cpu(dtype: Any, double: bool, kind: str) -> None:
    weight = torch.randn(ROWS, COLUMNS, dtype=dtype)
    packed, state = F.quantize_4bit(weight, quant_type=kind, compress_statistics=double)
    there, its_state = F.quantize_4bit(weight.cuda(), quant_type=kind, compress_statistics=double)
    assert there.is_cuda
    assert torch.equal(there.cpu(), packed)
    for ours, cpu in zip(parts(its_state), parts(state), strict=True):
        assert ours.is_cuda
        assert torch.equal(ours.cpu(), cpu)
    again = F.dequantize_4bit(packed, state)
    assert torch.equal(F.dequantize_4bit(there, its_state).cpu(), again)
    assert (again - weight).abs().max() < 0.2 * weight.abs().max()
    out = torch.empty_like(weight, device="cuda")  # a form that the CPU has no kernel of
    F.dequantize_4bit(there, its_state, out=out)
    assert torch.equal(out.cpu(), again)


def layer(device: str, double: bool) -> Any:
    torch.manual_seed(5)
    made = bnb.nn.Linear4bit(
        COLUMNS, ROWS, bias=True, compute_dtype=torch.bfloat16, compress_statistics=double, quant_type="nf4"
    )
    return made.requires_grad_(False).to(torch.bfloat16).to(device)


def step(device: str, double: bool, tokens: int) -> tuple[Any, Any]:
    """Return a layer's result and the gradient of its input."""
    torch.manual_seed(7)
    x = torch.randn(1, tokens, COLUMNS, dtype=torch.bfloat16).to(device).requires_grad_()
    out = layer(device, double)(x)
    out.square().sum().backward()
    return out.detach().cpu(), x.grad.cpu()


@pytest.mark.parametrize("tokens", [1, 100, 2000])
@pytest.mark.parametrize("double", [False, True])
def test_a_layer_computes_the_cpu_s_numbers(double: bool, tokens: int) -> None:
    for ours, cpu in zip(step("cuda", double, tokens), step("cpu", double, tokens), strict=True):
        assert cpu.abs().max() > 0
        assert torch.equal(ours, cpu)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("count", [1000, 8192, 150_000])
def test_an_8_bit_optimizer_steps_to_the_cpu_s_parameters(count: int, paged: bool) -> None:
    start = torch.randn(count)
    found = {}
    for device in ("cuda", "cpu"):
        parameter = torch.nn.Parameter(start.clone().to(device))
        kind = bnb.optim.PagedAdamW8bit if paged and device == "cuda" else bnb.optim.AdamW8bit
        optimizer = kind([parameter], lr=0.1)
        for factor in (1.0, -0.5, 2.0):
            parameter.grad = factor * torch.linspace(-1, 1, count, device=device)
            optimizer.step()
        found[device] = parameter.detach().cpu()
    assert not torch.equal(found["cpu"], start)
    assert torch.equal(found["cuda"], found["cpu"])


def test_every_operator_with_a_cuda_kernel_computes() -> None:
    """Those without a form for the CPU are made of operators that have one."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("bitsandbytes::") and has(n, "CUDA")]
    assert len(names) > 10
    missing = {n for n in names if not has(n.removesuffix(".out"), "CPU") and not has(n.removesuffix(".out"), _ANY)}
    assert missing <= {"bitsandbytes::int8_double_quant"}
    assert not uncomputed_notes()


_ANY = "CompositeExplicitAutograd"


# -- the modelled layer --------------------------------------------------------------------------------------------


def asked_for(trace: list[dict[str, Any]]) -> list[int]:
    """List what was taken (bytes) and given back (negative), in order."""
    sign = {"alloc": 1, "free_requested": -1}
    return [sign[e["action"]] * e["size"] for e in trace if e["action"] in sign]


def recorded(work: Callable[[], Any]) -> list[int]:
    torch.cuda.memory._record_memory_history(max_entries=10_000, stacks="python")
    try:
        work()
        return asked_for(torch.cuda.memory._snapshot()["device_traces"][0])
    finally:
        torch.cuda.memory._record_memory_history(None)


def passes(linear: Any, x: Any) -> Iterator[None]:
    """Run a layer forward, backward, and once more without a gradient."""
    out = linear(x)
    yield
    out.backward(torch.ones_like(out))
    del out
    yield
    with torch.no_grad():
        linear(x)
    yield


@pytest.mark.parametrize("tokens", [2, 2000])
@pytest.mark.parametrize("double", [False, True])
def test_the_simulated_layer_asks_for_what_the_real_one_does(double: bool, tokens: int) -> None:
    real = layer("cuda", double)
    x = torch.zeros(1, tokens, COLUMNS, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for _ in passes(real, x):  # cuBLAS's workspaces
        x.grad = None
    expected = recorded(lambda: list(passes(real, x)))

    def run(session: Any) -> None:
        original = torch.nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16)
        modelled = Linear4bit(original, Nf4(torch.bfloat16, double))
        y = torch.zeros(1, tokens, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
        for _ in passes(modelled, y):
            y.grad = None
        raw.append(session.fake_recorder.dump()[0])
        list(passes(modelled, y))

    raw: list[Any] = []
    whole = simulate(run)
    before = asked_for(raw[0]["device_traces"][0])
    assert asked_for(whole["device_traces"][0])[len(before) :][: len(expected)] == expected


def adapted(linear: Any, dora: bool) -> Any:
    """Put an adapter of PEFT's around a 4-bit layer, in the dtype that TRL has it in."""
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(linear)
    model.is_loaded_in_4bit = True
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=["0"], use_dora=dora), model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    return model


@pytest.mark.parametrize("tokens", [2, 2000])
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_around_it_asks_for_what_one_around_the_real_layer_does(dora: bool, tokens: int) -> None:
    real = adapted(layer("cuda", False), dora)
    x = torch.zeros(1, tokens, COLUMNS, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for _ in range(2):  # cuBLAS's workspaces, gradients that stay
        list(passes(real, x))
    expected = recorded(lambda: list(passes(real, x)))

    def run(session: Any) -> None:
        original = torch.nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16)
        modelled = adapted(Linear4bit(original, Nf4(torch.bfloat16)), dora)
        tell_of_adapters(modelled)
        y = torch.zeros(1, tokens, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            list(passes(modelled, y))
        raw.append(session.fake_recorder.dump()[0])
        list(passes(modelled, y))

    raw: list[Any] = []
    whole = simulate(run)
    before = asked_for(raw[0]["device_traces"][0])
    found = asked_for(whole["device_traces"][0])[len(before) :][: len(expected)]
    assert sorted(found) == sorted(expected)
    assert highest(found) == highest(expected)


def highest(sizes: list[int]) -> int:
    return max(itertools.accumulate(sizes))
