"""A GPT-like model and its training step, of the shape that published captures of a university course ran.

Pre-norm blocks with RMS norms, rotary positions, gated feed-forward, attention and loss written out in plain
operations, so that every temporary is one of ours and none is a fused kernel's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Shape:
    layers: int = 24
    width: int = 1024
    feed: int = 4096
    heads: int = 16
    vocabulary: int = 10_000
    batch: int = 4
    context: int = 256
    wide_mask: bool = False  # a mask for every head of every sequence, as some of the captured programs made it


class Projection(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Any) -> Any:
        return torch.einsum("abc,dc->abd", x, self.weight)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        kind = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(kind)


def rotate(x: Any, table: Any) -> Any:
    batch, heads, tokens, width = x.shape
    even, odd = x.view(batch, heads, tokens, width // 2, 2).permute(4, 0, 1, 2, 3).unbind(0)
    cosine, sine = table[:, :tokens, :].unbind(0)
    first = cosine * even - sine * odd
    second = sine * even + cosine * odd
    result = torch.cat((first, second), dim=-1)
    return result


def softmax(x: Any) -> Any:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = torch.einsum("abqd,abkd->abqk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("abqk,abkd->abqd", weights, value)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.wide_mask = shape.heads, shape.wide_mask
        self.query, self.key, self.value, self.out = (Projection(shape.width, shape.width) for _ in range(4))

    def forward(self, x: Any, table: Any) -> Any:
        batch, tokens, width = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (
            t.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for t in (query, key, value)
        )
        query = rotate(query, table)
        key = rotate(key, table)
        places = torch.arange(tokens, device=x.device)
        mask = (places.view(-1, 1) >= places.view(1, -1))[None, ...]
        if self.wide_mask:
            mask = mask.expand(batch, self.heads, tokens, tokens).clone()
        mixed = attend(query, key, value, mask)
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, width).contiguous()
        return self.out(mixed)


class Feed(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = Projection(shape.width, shape.feed)
        self.down = Projection(shape.feed, shape.width)
        self.up = Projection(shape.width, shape.feed)

    def forward(self, x: Any) -> Any:
        return self.down(swish(self.gate(x)) * self.up(x))


def swish(x: Any) -> Any:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed = Attention(shape), Feed(shape)
        self.before, self.between = Norm(shape.width), Norm(shape.width)

    def forward(self, x: Any, table: Any) -> Any:
        mixed = self.attention(self.before(x), table)
        middle = x + mixed
        fed = self.feed(self.between(middle))
        return middle + fed


class Gpt(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.register_buffer("table", torch.empty(2, shape.context, shape.width // shape.heads // 2))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last = Norm(shape.width)
        self.head = Projection(shape.width, shape.vocabulary)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding[tokens, :]
        for block in self.blocks:
            x = block(x, self.table)
        x = self.last(x)
        return self.head(x)


def cross_entropy(logits: Any, targets: Any) -> Any:
    top = torch.max(logits, dim=-1, keepdim=True)[0]
    shifted = logits - top
    logp = shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))
    return torch.mean(torch.gather(-logp, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """Written out, with two moments and plain temporaries."""

    def __init__(self, parameters: Any, rate: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["m"], state["v"]
                p -= 0.01 * p
                m.mul_(0.9).add_(0.1 * p.grad)
                v.mul_(0.99).add_(p.grad * p.grad)
                size = (m / 0.1) / ((v / 0.01).sqrt_())
                p -= size


def train(shape: Shape, *, autocast: bool, warm_up: int = 2, before: Any = None) -> None:
    """Steps of training; ``before`` is called when the measured one begins."""
    model = Gpt(shape)
    optimizer = AdamW(model.parameters())
    batches = [torch.zeros(warm_up, shape.batch, shape.context, dtype=torch.long) for _ in range(2)]
    measured = [torch.zeros(1, shape.batch, shape.context, dtype=torch.long) for _ in range(2)]
    logits = loss = None
    for i in range(warm_up):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(batches[0][i])
            loss = cross_entropy(logits, batches[1][i])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del logits, loss
    if before is not None:
        before()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(measured[0][0])
        loss = cross_entropy(logits, measured[1][0])
    loss.backward()
    optimizer.step()
