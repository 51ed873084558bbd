# mypy: ignore-errors
"""Train small models in kinds of programs that no rule of attribution was written for; each is one function.

``main(NAME, tracer)`` runs one. The tracer learns what a model is from what trains and runs it (``zoo/tracing.py``);
a program marks only what no optimizer, module or backward of torch shows.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DIM, HEADS, LAYERS, WORDS = 192, 4, 4, 4519
BATCH, LENGTH = 4, 40


def attend(q, k, v, causal):
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, dim=DIM, causal=True):
        super().__init__()
        self.qkv, self.out, self.causal = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False), causal

    def forward(self, x):
        return self.out(attend(*self.qkv(x).chunk(3, -1), self.causal))


class MLP(nn.Module):
    def __init__(self, dim=DIM, hidden=None):
        super().__init__()
        hidden = hidden or 4 * dim - 40
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim=DIM, causal=True, mlp=None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = Attention(dim, causal), mlp or MLP(dim)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    def __init__(self, dim=DIM, layers=LAYERS, words=WORDS, block=Block):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)

    def hidden(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids):
        return self.head(self.hidden(ids))


def batch(words=WORDS, length=LENGTH, rows=BATCH):
    return torch.randint(3, words, (rows, length))


def next_token_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def logps(model, ids):
    logits = model(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


# -- optimizers --------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz."""

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 0.05)
                update = p.grad.lerp(state["momentum"], 0.95)
                x = update.bfloat16() / (update.norm() + 1e-7)
                for _ in range(3):
                    a = x @ x.mT
                    x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                p.add_(x.type_as(p), alpha=-group["lr"])


def muon(tracer):
    model = LM()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [Muon(matrices), torch.optim.AdamW(others, fused=True)]
    for _ in range(3):
        next_token_loss(model, batch()).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
    return model, optimizers


class Adam8bit(torch.optim.Optimizer):
    """Adam with its moments in 8 bits, a scale for each row of 256."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @staticmethod
    def pack(x):
        rows = F.pad(x.flatten(), (0, -x.numel() % 256)).view(-1, 256)
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        return (rows / scale).round().to(torch.int8), scale

    @staticmethod
    def unpack(packed, scale, like):
        return (packed.float() * scale).flatten()[: like.numel()].view_as(like)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    for name in "mv":
                        state[name], state[name + "_scale"] = self.pack(torch.zeros_like(p))
                m = self.unpack(state["m"], state["m_scale"], p).lerp_(p.grad, 0.1)
                v = self.unpack(state["v"], state["v_scale"], p).lerp_(p.grad.square(), 0.01)
                p.sub_(group["lr"] * m / (v.abs().sqrt() + 1e-8))
                for name, value in (("m", m), ("v", v)):
                    packed, scale = self.pack(value)
                    state[name].copy_(packed)
                    state[name + "_scale"].copy_(scale)


def adam_8bit(tracer):
    model = LM()
    optimizer = Adam8bit(model.parameters())
    for _ in range(3):
        next_token_loss(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def fused_checkpointed(tracer):
    """bf16 autocast, gradient checkpointing, clipping and fused AdamW."""

    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model = LM(block=Checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = next_token_loss(model, batch())
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def averaged(tracer):
    """An exponential moving average of the weights, evaluated at the end; momentum SGD, foreach."""
    model = LM()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for _ in range(3):
        next_token_loss(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.01)
    with torch.no_grad():
        next_token_loss(average, batch())
    for name, p in average.named_parameters():
        tracer.mark(p, "optimizer_state", f"average:{name}", force=True)
    return model, average, optimizer


def functional(tracer):
    """Gradients of ``torch.autograd.grad``, accumulated in a list, applied by hand with momentum."""
    model = LM()
    params = list(model.parameters())
    momentum = [torch.zeros_like(p) for p in params]
    for m in momentum:
        tracer.mark(m, "optimizer_state", "momentum")
    for _ in range(2):
        total = None
        for _ in range(3):
            with tracer.within("backward"):
                grads = torch.autograd.grad(next_token_loss(model, batch()), params)
            for g in grads:
                tracer.mark(g, "gradients", "grad")
            total = list(grads) if total is None else [t.add_(g) for t, g in zip(total, grads, strict=True)]
            del grads
        with torch.no_grad(), tracer.within("optimizer_step"):
            for p, m, g in zip(params, momentum, total, strict=True):
                m.mul_(0.9).add_(g)
                p.sub_(0.01 * m)
        del total, g
    return model, momentum


# -- architectures -----------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self, dim, experts=6, top=2):
        super().__init__()
        self.router, self.top = nn.Linear(dim, experts, bias=False), top
        self.experts = nn.ModuleList(MLP(dim, 2 * dim - 16) for _ in range(experts))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, chosen = self.router(flat).softmax(-1).topk(self.top, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, slot, None])
        return out.view_as(x)


def mixture_of_experts(tracer):
    model = LM(block=lambda dim: Block(dim, mlp=Experts(dim)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(3):
        loss = next_token_loss(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, optimizer


class Cross(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, memory):
        return self.o(attend(self.q(x), self.k(memory), self.v(memory), False))


class Stack(nn.Module):
    def __init__(self, embed, is_decoder):
        super().__init__()
        self.embed = embed
        self.blocks = nn.ModuleList(Block(DIM, causal=is_decoder) for _ in range(LAYERS))
        self.cross = nn.ModuleList(Cross(DIM) for _ in range(LAYERS)) if is_decoder else None
        self.norm = nn.LayerNorm(DIM)

    def forward(self, ids, memory=None):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if memory is not None:
                x = x + self.cross[i](x, memory)
        return self.norm(x)


class Seq2Seq(nn.Module):
    """T5's style: one class is encoder and decoder, both with the shared embedding, the head tied to it."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(WORDS, DIM)
        self.encoder, self.decoder = Stack(self.shared, False), Stack(self.shared, True)

    def forward(self, source, target):
        return F.linear(self.decoder(target, self.encoder(source)), self.shared.weight)


def encoder_decoder(tracer):
    model = Seq2Seq()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(3):
        source, target = batch(), batch(length=24)
        optimizer.zero_grad()
        logits = model(source, target[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()).backward()
        optimizer.step()
    return model, optimizer


class Autoencoder(nn.Module):
    """Two equal stacks, built by one function; every part is trained."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = self.stack(), self.stack()
        self.into, self.out = nn.Linear(96, DIM), nn.Linear(DIM, 96)

    @staticmethod
    def stack():
        return nn.Sequential(*(Block(DIM, causal=False) for _ in range(LAYERS)))

    def forward(self, x):
        return self.out(self.decoder(self.encoder(self.into(x)).tanh()))


def autoencoder(tracer):
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(3):
        x = torch.randn(8, 64, 96)
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Vision(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 8, 8)
        self.blocks = nn.ModuleList(Block(dim, causal=False) for _ in range(3))

    def forward(self, images):
        x = self.patch(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return x


class Captioner(nn.Module):
    """A frozen vision tower, a projector and a language model."""

    def __init__(self):
        super().__init__()
        self.tower = Vision().requires_grad_(False)
        self.projector = nn.Sequential(nn.Linear(256, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.lm = LM()

    def forward(self, images, ids):
        with torch.no_grad():
            seen = self.tower(images)
        x = torch.cat((self.projector(seen), self.lm.embed(ids)), 1)
        for block in self.lm.blocks:
            x = block(x)
        return self.lm.head(self.lm.norm(x[:, seen.size(1):]))


def vision_language(tracer):
    model = Captioner()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=True)
    for _ in range(3):
        ids = batch()
        logits = model(torch.randn(BATCH, 3, 48, 48), ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Cells(nn.Module):
    """A language model of LSTM cells, a loop over the tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.cells = nn.ModuleList(nn.LSTMCell(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, ids):
        states = [None] * len(self.cells)
        out = []
        for x in self.embed(ids).unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, states[i])
                x = states[i][0]
            out.append(x)
        return self.head(torch.stack(out, 1))


def recurrent(tracer):
    model = Cells()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for _ in range(3):
        loss = next_token_loss(model, batch(rows=12))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, optimizer


# -- several models ----------------------------------------------------------------------------------------------------


def distillation(tracer):
    """A wide frozen teacher and a narrow student."""
    teacher, student = LM(dim=320, layers=5).eval(), LM()
    optimizer = torch.optim.AdamW(student.parameters(), foreach=True)
    for _ in range(3):
        ids = batch()
        with torch.no_grad():
            wanted = teacher(ids).softmax(-1)
        loss = F.kl_div(student(ids).log_softmax(-1), wanted, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # Its probabilities are what the student is held to.
    for name, p in teacher.named_parameters():
        tracer.mark(p, "reference_model", name, force=True)
    return teacher, student, optimizer


def make(kind, **options):
    return kind(**options)


def preference(tracer):
    """DPO: the frozen model is made first, by the same function; chosen and rejected in one pass."""
    frozen = make(LM)
    policy = make(LM)
    policy.load_state_dict(frozen.state_dict())
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-5)
    for _ in range(3):
        ids = batch(rows=6)
        with torch.no_grad():
            base = logps(frozen, ids).sum(-1)
        ratio = logps(policy, ids).sum(-1) - base
        good, bad = ratio.chunk(2)
        (-F.logsigmoid(0.1 * (good - bad)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return frozen, policy, optimizer


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.score = LM(layers=3), nn.Linear(DIM, 1, bias=False)
        del self.backbone.head

    def forward(self, ids):
        return self.score(self.backbone.hidden(ids))[:, -1, 0]


def reward_training(tracer):
    """A scalar head on a backbone, pairs of answers, two passes in one backward."""
    model = Scorer()
    optimizer = torch.optim.NAdam(model.parameters(), foreach=True)
    for _ in range(3):
        good, bad = model(batch()), model(batch())
        loss = -F.logsigmoid(good - bad).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class LowRank(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base, self.on = base, True
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        out = self.base(x)
        return out + F.linear(F.linear(x, self.down), self.up) if self.on else out


def own_adapters(tracer):
    """LoRA by hand; the frozen policy of the KL term is the model with its adapters off."""
    model = LM().requires_grad_(False)
    adapters = []
    for block in model.blocks:
        for owner, name in ((block.attention, "qkv"), (block.mlp, "up"), (block.mlp, "down")):
            adapters.append(LowRank(getattr(owner, name)))
            setattr(owner, name, adapters[-1])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(3):
        ids = batch(rows=6)
        for adapter in adapters:
            adapter.on = False
        with torch.no_grad():
            base = logps(model, ids)
        for adapter in adapters:
            adapter.on = True
        new = logps(model, ids)
        (-(new.exp() - 0.1 * (base - new)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for adapter in adapters:
        for name in ("down", "up"):
            tracer.mark(getattr(adapter, name), "adapters", name, force=True)
    return model, optimizer


# -- reinforcement -----------------------------------------------------------------------------------------------------


class Cached(Block):
    """A block that appends to a cache of keys and values by ``torch.cat``."""

    def forward(self, x, past=None):
        q, k, v = self.attention.qkv(self.norm1(x)).chunk(3, -1)
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        x = x + self.attention.out(attend(q, k, v, q.size(1) > 1))
        return x + self.mlp(self.norm2(x)), (k, v)


class CachedLM(LM):
    def __init__(self):
        super().__init__(block=Cached)

    def forward(self, ids, past=None):
        x, kept = self.embed(ids), []
        for i, block in enumerate(self.blocks):
            x, entry = block(x, None if past is None else past[i])
            kept.append(entry)
        return self.head(self.norm(x)), kept


@torch.no_grad()
def sample(model, ids, count, tracer):
    with tracer.within("generate"):
        past, given = None, ids
        for _ in range(count):
            logits, past = model(given, past)
            for k, v in past:
                tracer.mark(k, "kv_cache", "keys")
                tracer.mark(v, "kv_cache", "values")
            given = torch.multinomial(logits[:, -1].softmax(-1), 1)
            ids = torch.cat((ids, given), 1)
        return ids


def cat_cache(tracer):
    """REINFORCE with a cache by ``torch.cat``; many sequences sampled, small batches trained: sampling is the peak."""
    policy = CachedLM()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
    for _ in range(2):
        ids = sample(policy, batch(length=160, rows=24), 6, tracer)
        for rows in ids[:2].split(1):
            logits, _ = policy(rows[:, -24:-1])
            chosen = logits.log_softmax(-1).gather(-1, rows[:, -23:, None])
            (-chosen.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy, optimizer


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value = LM(dim=160, layers=3), nn.Linear(160, 1)
        del self.body.head

    def forward(self, ids):
        return self.value(self.body.hidden(ids)).squeeze(-1)


@dataclass
class Experience:
    ids: torch.Tensor
    old: torch.Tensor
    values: torch.Tensor
    reward: torch.Tensor


def replayed(tracer):
    """PPO in a style of public loops: a list of experiences that is replayed, a critic of another size."""
    policy, critic = CachedLM(), Critic()
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-4) for m in (policy, critic)]
    memory = []
    for _ in range(2):
        for _ in range(3):
            ids = sample(policy, batch(length=12), 5, tracer)
            with torch.no_grad():
                old = policy(ids[:, :-1])[0].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
                memory.append(Experience(ids, old, critic(ids[:, :-1]), torch.rand(BATCH, 1)))
        for one in memory[-3:]:
            new = policy(one.ids[:, :-1])[0].log_softmax(-1).gather(-1, one.ids[:, 1:, None]).squeeze(-1)
            gain = (new - one.old).exp() * (one.reward - one.values)
            loss = -gain.mean() + F.mse_loss(critic(one.ids[:, :-1]), one.reward.expand_as(one.values))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    return policy, critic, optimizers, memory


PROGRAMS = {
    run.__name__: run
    for run in (
        muon, adam_8bit, fused_checkpointed, averaged, functional, mixture_of_experts, encoder_decoder, autoencoder,
        vision_language, recurrent, distillation, preference, reward_training, own_adapters, cat_cache, replayed,
    )
}  # fmt: skip


def main(name, tracer):
    """Run a program; what it returns lives until the recording ends."""
    return PROGRAMS[name](tracer)
