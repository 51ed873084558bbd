"""A loop of plain torch that knows nothing of memprof, for ``memprof run``."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for _ in range(3):
    loss = model(torch.randn(512, 256, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("LOSS", loss.item())
print("PEAK", torch.cuda.max_memory_allocated())
