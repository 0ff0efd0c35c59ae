import os, math
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def share(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    accumulate = 2
    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 40, (1024, 16), generator=g)
    y = x % 7
    y[:, :8] = -100  # the prompt
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 7))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // accumulate):
            window = [next(batches) for _ in range(accumulate)]
            tokens = sum((y != -100).sum() for _, y in window)
            dist.all_reduce(tokens)  # of the window, on all ranks
            for i, (x, y) in enumerate(window):
                with nullcontext() if i + 1 == accumulate else model.no_sync():
                    total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100)
                    loss = total * world / tokens  # DDP takes the mean over the ranks
                    loss.backward()
            opt.step()
            opt.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item() / world * accumulate:.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
