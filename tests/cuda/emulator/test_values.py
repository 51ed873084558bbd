"""Values on the emulated device are those of the CPU's kernels, and its random numbers follow the device's seed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def test_a_training_step_gives_the_cpu_s_gradients() -> None:
    layers = [torch.nn.Linear(24, 48), torch.nn.GELU(), torch.nn.LayerNorm(48), torch.nn.Linear(48, 5)]
    model = torch.nn.Sequential(*layers)
    x, y = torch.randn(7, 24), torch.randint(0, 5, (7,))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.cuda()
    torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert p.grad.is_cuda
        torch.testing.assert_close(p.grad.cpu(), grad)


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_gives_the_formula_s_values(causal: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(2, 4, 9, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    out.float().square().sum().backward()
    ours = [t.grad.cpu().float() for t in (q, k, v)]
    cpu = [t.detach().cpu().float().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = torch.nn.functional.scaled_dot_product_attention(*cpu, is_causal=causal)
    expected.square().sum().backward()
    torch.testing.assert_close(out.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    for grad, tensor in zip(ours, cpu, strict=True):
        torch.testing.assert_close(grad, tensor.grad, atol=6e-2, rtol=6e-2)


def test_results_are_as_large_as_their_values_say() -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 2.0], device="cuda")
    assert x.nonzero().flatten().tolist() == [1, 3]
    assert x[x > 0].tolist() == [1.0, 2.0]


def test_random_numbers_follow_the_device_s_seed_and_leave_the_cpu_s_alone() -> None:
    before = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    first, second = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_convolutions_run_without_cudnn() -> None:
    for layer, x in (
        (torch.nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 16, 16)),
        (torch.nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), torch.randn(2, 3, 2, 8, 8)),
    ):
        expected = layer(x)
        expected.sum().backward()
        gradient = layer.weight.grad.clone()
        layer.zero_grad()
        layer.cuda()
        ours = layer(x.cuda())
        ours.sum().backward()
        torch.testing.assert_close(ours.cpu(), expected)
        torch.testing.assert_close(layer.weight.grad.cpu(), gradient)
