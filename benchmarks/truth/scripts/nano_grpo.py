# mypy: ignore-errors
"""Train by a hand-written GRPO loop with its own model and its own cache: no transformers, no TRL."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import torch
import torch.nn as nn
import torch.nn.functional as F


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x.float(), (x.size(-1),)).type_as(x) * self.weight


class GrowingCache:
    """Keys and values of every layer, longer by torch.cat with each token."""

    def __init__(self, layers, shape, device, dtype):
        self.k = [None] * layers
        self.v = [None] * layers

    def append(self, layer, k, v):
        if self.k[layer] is not None:
            k = torch.cat((self.k[layer], k), dim=2)
            v = torch.cat((self.v[layer], v), dim=2)
        self.k[layer], self.v[layer] = k, v
        return k, v

    def length(self):
        return 0 if self.k[0] is None else self.k[0].size(2)


class StaticCache:
    """Keys and values at full length from the start, one buffer a layer for both."""

    def __init__(self, layers, shape, device, dtype):
        self.kv = [torch.zeros((2, *shape), device=device, dtype=dtype) for _ in range(layers)]
        self.filled = [0] * layers

    def append(self, layer, k, v):
        start, end = self.filled[layer], self.filled[layer] + k.size(2)
        self.kv[layer][0, :, :, start:end] = k
        self.kv[layer][1, :, :, start:end] = v
        self.filled[layer] = end
        return self.kv[layer][0, :, :, :end], self.kv[layer][1, :, :, :end]

    def length(self):
        return self.filled[0]


class Attention(nn.Module):
    def __init__(self, dim, heads, head_dim):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=False)
        self.proj = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x, layer, cache):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).split(self.heads * self.head_dim, dim=-1)
        q, k, v = (t.view(B, T, self.heads, self.head_dim).transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = cache.append(layer, k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc = nn.Linear(dim, hidden)
        self.proj = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, head_dim, hidden):
        super().__init__()
        self.n1, self.n2 = Norm(dim), Norm(dim)
        self.attn, self.mlp = Attention(dim, heads, head_dim), MLP(dim, hidden)

    def forward(self, x, layer, cache):
        x = x + self.attn(self.n1(x), layer, cache)
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, vocab, dim, layers, heads, head_dim, hidden, positions, tied):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(positions, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, head_dim, hidden) for _ in range(layers))
        self.norm = Norm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, ids, cache=None, last_only=False):
        start = cache.length() if cache is not None else 0
        x = self.tok(ids) + self.pos(torch.arange(start, start + ids.size(1), device=ids.device))
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache)
        x = self.norm(x)
        return self.head(x[:, -1:] if last_only else x)


@torch.no_grad()
def generate(model, ids, new_tokens, cache_class, heads, head_dim, dtype):
    shape = (ids.size(0), heads, ids.size(1) + new_tokens, head_dim)
    cache = cache_class(len(model.blocks), shape, ids.device, dtype)
    step = ids
    for _ in range(new_tokens):
        logits = model(step, cache, last_only=True)[:, -1].float()
        step = torch.multinomial(logits.softmax(-1), 1)
        ids = torch.cat((ids, step), dim=1)
    return ids


def compute_rewards(ids, prompt_len, group):
    rewards = (ids[:, prompt_len:] % 2 == 0).float().mean(-1)
    grouped = rewards.view(-1, group)
    return ((grouped - grouped.mean(-1, keepdim=True)) / (grouped.std(-1, keepdim=True) + 1e-4)).flatten()


def get_logps(model, ids, prompt_len):
    logits = model(ids[:, :-1])[:, prompt_len - 1:]
    logps = logits.float().log_softmax(-1)
    return logps.gather(-1, ids[:, prompt_len:, None]).squeeze(-1)


def compute_loss(model, ids, prompt_len, advantages, old, ref, beta):
    logps = get_logps(model, ids, prompt_len)
    ratio = torch.exp(logps - old)
    gain = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    if ref is not None:
        gain = gain - beta * (torch.exp(ref - logps) - (ref - logps) - 1)
    return -gain.mean()


def setup(cfg):
    torch.manual_seed(cfg["seed"])
    model = GPT(**cfg["model"]).to(cfg["dtype"])
    model = to_device(model, cfg["device"])
    ref = copy.deepcopy(model).requires_grad_(False) if cfg["beta"] else None
    if cfg["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=cfg["optimizer"] == "adamw_foreach")
    return model, ref, optimizer


def to_device(model, device):
    return model.to(device)


def train(model, ref, optimizer, cfg):
    group, prompt_len = cfg["group"], cfg["prompt"]
    cache_class = GrowingCache if cfg["cache"] == "cat" else StaticCache
    shape = cfg["model"]["heads"], cfg["model"]["head_dim"]
    device = torch.device(cfg["device"])
    amp = torch.autocast(device.type, torch.bfloat16) if cfg["autocast"] else nullcontext()
    for _ in range(cfg["steps"]):
        prompts = torch.randint(3, cfg["model"]["vocab"], (cfg["batch"] // group, prompt_len), device=device)
        prompts = prompts.repeat_interleave(group, 0)
        with amp:
            ids = generate(model, prompts, cfg["new_tokens"], cache_class, *shape, cfg["cache_dtype"])
        advantages = compute_rewards(ids, prompt_len, group)
        with torch.no_grad(), amp:
            old = get_logps(model, ids, prompt_len)
            ref_logps = get_logps(ref, ids, prompt_len) if ref is not None else None
        for start in range(0, cfg["batch"], cfg["micro"]):
            rows = slice(start, start + cfg["micro"])
            with amp:
                part = None if ref_logps is None else ref_logps[rows]
                loss = compute_loss(model, ids[rows], prompt_len, advantages[rows], old[rows], part, cfg["beta"])
            (loss / math.ceil(cfg["batch"] / cfg["micro"])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def main(cfg):
    model, ref, optimizer = setup(cfg)
    train(model, ref, optimizer, cfg)
