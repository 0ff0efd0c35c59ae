"""Step-based training: validate every N steps, keep going."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def cycle(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for batch in loader:
            yield batch
        epoch += 1


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    num = torch.randn(n, 5, generator=g)
    cat = torch.randint(0, 8, (n, 2), generator=g)
    effect = torch.linspace(-1, 1, 8)
    y = (num[:, 0] * effect[cat[:, 0]] + effect[cat[:, 1]] + 0.3 * num[:, 1] > 0).float()
    return TensorDataset(num, cat, y)


class TabularNet(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(8, 4) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(13, 48, bias=False), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(dropout), nn.Linear(48, 1))

    def forward(self, num, cat):
        parts = [num] + [e(cat[:, i]) for i, e in enumerate(self.emb)]
        return self.mlp(torch.cat(parts, 1)).squeeze(1)


def evaluate(net, loader):
    net.eval()
    t = torch.zeros(2)
    with torch.no_grad():
        for num, cat, y in loader:
            t += torch.tensor([nn.functional.binary_cross_entropy_with_logits(net(num, cat), y, reduction="sum").item(), len(y)])
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-steps", type=int, default=48)
    p.add_argument("--eval-every", type=int, default=12)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--dropout", type=float, default=0.2)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(60 + rank)
    net = TabularNet(args.dropout)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    train, val = table(400, 1), table(121, 2)
    sampler = DistributedSampler(train, drop_last=True)
    batches = cycle(DataLoader(train, args.batch, sampler=sampler, drop_last=True), sampler)
    val_loader = DataLoader(Subset(val, range(rank, len(val), world)), 40)
    model.train()
    for step in range(1, args.max_steps + 1):
        num, cat, y = next(batches)
        loss = nn.functional.binary_cross_entropy_with_logits(model(num, cat), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % args.eval_every == 0:
            for b in net.buffers():  # one set of statistics for the validation
                if b.is_floating_point():
                    dist.broadcast(b, 0)
            value = evaluate(net, val_loader)
            if rank == 0:
                print(f"step {step}: validation loss {value:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
