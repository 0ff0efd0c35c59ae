"""Text-to-code retrieval with a two-tower model; recall@1 and MRR after every epoch."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class TextCode(Dataset):
    """Two views of one hidden vector."""

    def __init__(self, n, seed, hidden=6, dim=24):
        shared = torch.Generator().manual_seed(1)
        a, b = torch.randn(hidden, dim, generator=shared), torch.randn(hidden, dim, generator=shared)
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, hidden, generator=g)
        self.text = z @ a + 1.2 * torch.randn(n, dim, generator=g)
        self.code = torch.tanh(z @ b) + 0.4 * torch.randn(n, dim, generator=g)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        return self.text[i], self.code[i]


class TwoTower(nn.Module):
    def __init__(self, dim=24, width=64, out=16):
        super().__init__()
        self.text = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, out))
        self.code = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.Linear(width, out))

    def forward(self, text, code):
        return F.normalize(self.text(text), dim=1), F.normalize(self.code(code), dim=1)


class RetrievalMetric:
    def __init__(self):
        self.text, self.code = [], []

    def update(self, t, c):
        self.text.append(t)
        self.code.append(c)

    def compute(self):
        t, c = torch.cat(self.text), torch.cat(self.code)
        gold = torch.arange(len(t))
        parts = [torch.empty_like(c) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, c)
        gallery = torch.cat(parts)
        gold = gold + dist.get_rank() * len(t)
        sims = t @ gallery.T
        place = (sims > sims.gather(1, gold[:, None])).sum(1)
        sums = torch.tensor([(place == 0).sum(), (1 / (place + 1.0)).sum(), len(t)], dtype=torch.float64)
        dist.all_reduce(sums)
        return {"recall@1": (sums[0] / sums[2]).item(), "mrr": (sums[1] / sums[2]).item()}


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    metric = RetrievalMetric()
    for text, code in loader:
        metric.update(*net(text, code))
    net.train()
    return metric.compute()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--temperature", type=float, default=0.07)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    net = TwoTower()
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    train_set, eval_set = TextCode(768, 10), TextCode(200, 11)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    eval_loader = DataLoader(Subset(eval_set, range(rank, len(eval_set), world)), batch_size=50)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for text, code in loader:
            t, c = model(text, code)
            logits = t @ c.T / args.temperature
            target = torch.arange(len(t))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scores = evaluate(net, eval_loader)
        if rank == 0:
            print(f"epoch {epoch}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
