"""ZeRO optimizer with checkpoints; a decorator keeps file work on the main process."""
import functools
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def rank_zero_only(fn):
    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        if dist.get_rank() == 0:
            return fn(*args, **kwargs)
    return wrapped


@rank_zero_only
def log(*args):
    print(*args, flush=True)


@rank_zero_only
def write(obj, path):
    torch.save(obj, path + ".tmp")
    os.replace(path + ".tmp", path)


def save_checkpoint(path, model, optimizer, epoch):
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if dist.get_rank() == 0 else None
    write({"model": model.module.state_dict(), "optimizer": state, "epoch": epoch}, path)


def rings(n):
    g = torch.Generator().manual_seed(14)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, (x.norm(dim=1) > 1.9).long())


def main(epochs=4):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(19)
    model = DDP(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=4e-3)
    data = rings(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    path = os.path.join(tempfile.gettempdir(), f"zero_{os.getppid()}.pt")
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        hits = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += torch.tensor([float((out.argmax(1) == y).sum()), float(len(y))])
        dist.all_reduce(hits)
        log(f"epoch {epoch}: accuracy {(hits[0] / hits[1]).item():.3f}")
        if epoch % 2 == 1:
            save_checkpoint(path, model, optimizer, epoch)
    dist.barrier()
    if rank == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
