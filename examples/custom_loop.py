"""Record a GRPO loop written by hand with ``record`` and ``phase``: no trainer, no callback.

    python examples/custom_loop.py [run.pickle]
    memprof report run.pickle -o run.html

The policy is a small transformer over 211 tokens; it is paid for every even token it writes.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memprof import phase, record

VOCABULARY, WIDTH, LAYERS, PROMPT, COMPLETION = 211, 96, 3, 9, 24
GROUP, STEPS, BETA = 8, 3, 0.04


class Policy(nn.Module):
    """A causal language model; ``forward`` maps ids ``[B, T]`` to logits ``[B, T, V]``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(PROMPT + COMPLETION, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        hidden = self.embed(ids) + self.position(torch.arange(length, device=ids.device))
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.head(self.blocks(hidden, mask=causal, is_causal=True))


@torch.no_grad()
def generate(policy: Policy, prompt: Tensor) -> Tensor:
    """Sample ``COMPLETION`` tokens after each prompt."""
    ids = prompt
    for _ in range(COMPLETION):
        following = torch.multinomial(policy(ids)[:, -1].softmax(-1), 1)
        ids = torch.cat([ids, following], dim=1)
    return ids


def log_probs(policy: Policy, ids: Tensor) -> Tensor:
    """Return the log-probability of each completion token, ``[B, COMPLETION]``."""
    logits = policy(ids)[:, PROMPT - 1 : -1]
    return F.log_softmax(logits, dim=-1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


def grpo_loss(now: Tensor, old: Tensor, reference: Tensor, advantage: Tensor) -> Tensor:
    """Return the policy-gradient term with the ratio to the sampling policy, and the k3 estimate of the KL."""
    gain = torch.exp(now - old) * advantage[:, None]
    off = reference - now
    return (BETA * (torch.exp(off) - off - 1) - gain).mean()


def step(policy: Policy, reference: Policy, optimizer: torch.optim.Optimizer, number: int, device: str) -> float:
    """Train one step on one prompt; return the group's mean reward."""
    prompt = torch.randint(VOCABULARY, (1, PROMPT), device=device).expand(GROUP, -1)
    with phase("generate", step=number):
        ids = generate(policy, prompt)
    with phase("reward", step=number):
        reward = (ids[:, PROMPT:] % 2 == 0).float().mean(dim=1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
    with torch.no_grad():
        with phase("old_logprobs", step=number):
            old = log_probs(policy, ids)
        with phase("reference_logprobs", step=number):
            held = log_probs(reference, ids)
    with phase("forward", step=number):
        loss = grpo_loss(log_probs(policy, ids), old, held, advantage)
    with phase("backward", step=number):
        loss.backward()
    with phase("optimizer_step", step=number):
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(reward.mean())


def main(path: str = "run.pickle") -> None:
    """Train a few steps and leave the recording in ``path``."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy().to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4)
    with record(path, model=policy, optimizer=optimizer, reference_model=reference):
        for number in range(1, STEPS + 1):
            print(f"step {number}: mean reward {step(policy, reference, optimizer, number, device):.3f}")
    print(f"Recorded to {path}; now: memprof report {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
