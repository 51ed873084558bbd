# mypy: ignore-errors
"""Train small models by loops in the styles of public repositories: own optimizers, caches in buffers, no trainer."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class InPlaceAdam:
    """Adam whose moments are made with it and updated in place."""

    def __init__(self, params, lr=1e-3):
        self.params = list(params)
        self.lr = lr
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]

    def tensors(self):
        return [*self.m, *self.v]

    @torch.no_grad()
    def step(self):
        for p, m, v in zip(self.params, self.m, self.v, strict=True):
            m.mul_(0.9).add_(p.grad, alpha=0.1)
            v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
            p.sub_(self.lr * m / (v.sqrt() + 1e-8))

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class OutOfPlaceAdam(InPlaceAdam):
    """Adam that makes its moments anew at every step."""

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.params):
            self.m[i] = 0.9 * self.m[i] + 0.1 * p.grad
            self.v[i] = 0.99 * self.v[i] + 0.01 * p.grad**2
            p.data = p.data - self.lr * self.m[i] / (self.v[i].sqrt() + 1e-8)


class Momentum(torch.optim.Optimizer):
    """Sign descent, its only buffer made in the constructor, below torch's own class."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["average"] = torch.zeros_like(p)

    def tensors(self):
        return [s["average"] for s in self.state.values()]

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p]["average"]
                p.add_(torch.sign(average.lerp(p.grad, 0.1)), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


def torch_optimizer(kind, **options):
    def made(params):
        return kind(params, lr=1e-3, **options)

    return made


OPTIMIZERS = {
    "in_place": InPlaceAdam,
    "out_of_place": OutOfPlaceAdam,
    "momentum": Momentum,
    "adagrad": torch_optimizer(torch.optim.Adagrad),
    "adamw": torch_optimizer(torch.optim.AdamW, foreach=False),
    "foreach": torch_optimizer(torch.optim.AdamW, foreach=True),
    "fused": torch_optimizer(torch.optim.AdamW, fused=True),
}


class Layer(nn.Module):
    def __init__(self, dim, heads, head_dim, hidden):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def make_cache(self, batch, length):
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, self.heads, length, self.head_dim), persistent=False)

    def attend(self, x, start):
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, self.heads, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        if start is not None:
            self.keys[:, :, start:start + T] = k
            self.values[:, :, start:start + T] = v
            k, v = self.keys[:, :, :start + T], self.values[:, :, :start + T]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.o(y.transpose(1, 2).reshape(B, T, -1))

    def forward(self, x, start=None):
        x = x + self.attend(self.norm1(x), start)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab, dim, layers, heads, head_dim, hidden, head):
        super().__init__()
        self.table = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, head_dim, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False) if head == "linear" else None

    def forward(self, ids, start=None):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, start)
        x = self.norm(x)
        return x if self.head is None else self.head(x)


def answer(model, ids, start, cfg):
    """The model's logits: through a module, by a matmul with the embedding, and with or without __call__."""
    out = model.forward(ids, start) if cfg["direct"] else model(ids, start)
    if model.head is None:
        out = out @ model.table.weight.T if cfg["head"] == "matmul" else F.linear(out, model.table.weight)
    return out


@torch.no_grad()
def roll(model, ids, cfg):
    for layer in model.layers:
        layer.make_cache(ids.size(0), ids.size(1) + cfg["new_tokens"])
    given, start = ids, 0
    for _ in range(cfg["new_tokens"]):
        scores = answer(model, given, start, cfg)[:, -1]
        start += given.size(1)
        given = torch.multinomial(scores.softmax(-1), 1)
        ids = torch.cat((ids, given), dim=1)
    return ids


def chosen(model, ids, cfg):
    scores = answer(model, ids[:, :-1], None, cfg)
    return F.log_softmax(scores, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def judge(model, ids, cfg):
    with torch.no_grad():
        return chosen(model, ids, cfg)


def learn(model, reference, ids, cfg):
    """One update: as many passes as asked for, then one backward through all of them."""
    prior = None if reference is None else judge(reference, ids, cfg)
    total = 0
    for rows in ids.chunk(cfg["passes"]):
        logp = chosen(model, rows, cfg)
        total = total - logp.mean()
        if prior is not None:
            total = total + 0.1 * (logp - prior[: len(rows)]).pow(2).mean()
    return total


def build(cfg):
    torch.manual_seed(0)
    model = Decoder(**cfg["model"], head=cfg["head"])
    reference = None
    if cfg["reference"] == "copy":
        reference = copy.deepcopy(model).eval()
    elif cfg["reference"] == "second":
        reference = Decoder(**cfg["model"], head=cfg["head"])
        reference.load_state_dict(model.state_dict())
        reference.eval()
    return model, reference, OPTIMIZERS[cfg["optimizer"]](model.parameters())


def main(cfg):
    model, reference, optimizer = build(cfg)
    for _ in range(cfg["steps"]):
        ids = torch.randint(3, cfg["model"]["vocab"], (cfg["batch"], cfg["prompt"]))
        if cfg["new_tokens"]:
            ids = roll(model, ids, cfg)
        loss = learn(model, reference, ids, cfg)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not cfg["rebinds"]:
            del loss
