"""Own shuffling: one permutation per epoch from a shared seed, every process takes its slice."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def blobs(n=256):
    g = torch.Generator().manual_seed(3)
    y = torch.randint(0, 4, (n,), generator=g)
    return torch.eye(4)[y].repeat(1, 3) + 0.6 * torch.randn(n, 12, generator=g), y


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(50 + rank)  # initial weights come from rank 0 anyway
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = blobs()
    os.makedirs("logs", exist_ok=True)
    with open(f"logs/rank{rank}.txt", "w") as log:
        for epoch in range(5):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
            for batch in order.view(-1, 16 * world):
                mine = batch[rank * 16 : (rank + 1) * 16]
                loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
                opt.zero_grad()
                loss.backward()
                opt.step()
            log.write(f"epoch {epoch} local loss {loss.item():.4f}\n")
    dist.barrier()
    if rank == 0:
        print(open("logs/rank0.txt").read(), end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
