"""Ranking of query/document pairs with a margin loss; best epoch is restored for the final test."""
import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


@dataclasses.dataclass
class Options:
    epochs: int = 14
    batch_size: int = 8
    lr: float = 0.12
    margin: float = 0.5


class Scorer(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.q = nn.Linear(dim, 32)
        self.d = nn.Linear(dim, 32)
        self.mix = nn.Sequential(nn.ReLU(), nn.Linear(32, 1))

    def forward(self, q, pos, neg):
        hq = self.q(q)
        return self.mix(hq * self.d(pos)).squeeze(1), self.mix(hq * self.d(neg)).squeeze(1)


def triples(n, seed):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(n, 12, generator=g)
    pos = q.roll(1, 1) + 1.2 * torch.randn(n, 12, generator=g)
    return TensorDataset(q, pos, torch.randn(n, 12, generator=g))


def loaders(opt):
    parts = []
    for n, seed, shuffle in ((64, 1, True), (64, 2, False), (64, 3, False)):
        ds = triples(n, seed)
        parts.append(DataLoader(ds, opt.batch_size, sampler=DistributedSampler(ds, shuffle=shuffle)))
    return parts


@torch.no_grad()
def score(model, loader, margin):
    model.eval()
    out = torch.zeros(3)
    for batch in loader:
        p, n = model(*batch)
        out += torch.tensor([(margin - p + n).clamp(min=0).sum().item(), (p > n).sum().item(), len(p)])
    return out


def main(opt):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, val, test = loaders(opt)
    model = DDP(Scorer())
    optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr, momentum=0.9)
    best, kept = float("inf"), None
    for epoch in range(opt.epochs):
        model.train()
        train.sampler.set_epoch(epoch)
        for batch in train:
            pos, neg = model(*batch)
            loss = (opt.margin - pos + neg).clamp(min=0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        stats = score(model, val, opt.margin)
        val_loss = (stats[0] / stats[2]).item()
        if val_loss < best:
            best = val_loss
            kept = {k: v.clone() for k, v in model.module.state_dict().items()}
        dist.all_reduce(stats)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: hinge {stats[0] / stats[2]:.4f} pairs in order {stats[1] / stats[2]:.3f}")
    model.module.load_state_dict(kept)
    final = score(model, test, opt.margin)
    dist.all_reduce(final)
    if dist.get_rank() == 0:
        print(f"test: pairs in order {final[1] / final[2]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Options())
