"""A training loop of one's own, as people write them, that wants a GPU."""

import sys

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 8)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, 10):
    out = model(torch.randn(32, 64, device="cuda"))
    loss = torch.nn.functional.cross_entropy(out, torch.zeros(32, dtype=torch.long).cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, sys.argv[1:], loss.item() > 0)
print("the end")
