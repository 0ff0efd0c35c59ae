"""Click prediction with embeddings and a linear part, each with its own optimizer."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

PLACES, ADS = 40, 30


class ClickLog(IterableDataset):
    """A day of the log, made on the fly; entry k belongs to rank k % world."""

    def __init__(self, day, entries, rank, world):
        self.day, self.mine = day, range(rank, entries, world)
        g = torch.Generator().manual_seed(0)
        self.place, self.ad = torch.randn(PLACES, 4, generator=g), torch.randn(ADS, 4, generator=g)
        self.w = torch.randn(5, generator=g)

    def __iter__(self):
        for k in self.mine:
            g = torch.Generator().manual_seed(self.day * 1_000_003 + k)
            p = int(torch.randint(0, PLACES, (), generator=g))
            a = int(torch.randint(0, ADS, (), generator=g))
            x = torch.randn(5, generator=g)
            score = self.place[p] @ self.ad[a] + x @ self.w
            yield p, a, x, (torch.rand((), generator=g) < torch.sigmoid(2 * score)).float()


class WideAndDeep(nn.Module):
    def __init__(self):
        super().__init__()
        self.place, self.ad = nn.Embedding(PLACES, 4), nn.Embedding(ADS, 4)
        self.wide = nn.Linear(5, 1)

    def forward(self, p, a, x):
        return (self.place(p) * self.ad(a)).sum(1) + self.wide(x).squeeze(1)


def mean_loss(net, loader):
    """Mean over the equal-sized batches of this rank."""
    losses = [F.binary_cross_entropy_with_logits(net(p, a, x), y) for p, a, x, y in loader]
    return torch.stack(losses).mean()


@torch.no_grad()
def validate(model, rank, world):
    model.eval()
    val = mean_loss(model.module, DataLoader(ClickLog(99, 800, rank, world), batch_size=50))
    dist.all_reduce(val)
    model.train()
    return val.item()


def main(days=4):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2)
    model = DDP(WideAndDeep())
    net = model.module
    opt_emb = torch.optim.Adagrad([*net.place.parameters(), *net.ad.parameters()], lr=0.2)
    opt_wide = torch.optim.SGD(net.wide.parameters(), lr=0.3)
    lines = []
    for day in range(days):
        for p, a, x, y in DataLoader(ClickLog(day, 1600, rank, world), batch_size=50):
            loss = F.binary_cross_entropy_with_logits(model(p, a, x), y)
            opt_emb.zero_grad()
            opt_wide.zero_grad()
            loss.backward()
            opt_emb.step()
            opt_wide.step()
        val = validate(model, rank, world)
        lines.append(f"day {day}: validation log-loss {val:.4f}")
        if rank == 0:
            print(lines[-1])
    if rank == 0:
        with open("results.txt", "w") as f:
            f.write("\n".join(lines) + "\n")
        torch.save(net.state_dict(), "clicks.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
