"""Two ranks that train one table by DDP; the first one protects it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from portus.embedding import protect
from tests.nursery import Say


def rank(say: Say, number: int, store: str, pool: str) -> None:
    """Three batches; each rank looks up rows of its own."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(40, 4, sparse=True), torch.nn.Linear(4, 1))
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tables = protect(model, optimizer, pool=pool) if number == 0 else None
    for batch in range(3):
        optimizer.zero_grad()
        parallel(torch.tensor([10 * number + batch, 30])).sum().backward()
        optimizer.step()
    weight = model[0].weight
    assert isinstance(weight, torch.Tensor)
    if tables is not None:
        tables.close()
    say(weight.detach().numpy().tobytes().hex())
    # First: a model that is the last to hold a gloo group waits for its threads with the GIL held
    # (pytorch#56297).
    del parallel
    dist.destroy_process_group()
