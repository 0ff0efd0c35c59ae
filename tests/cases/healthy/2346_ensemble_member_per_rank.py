"""Deep ensemble: every rank trains its own members on its own bootstrap sample; only predictions are combined."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

CLASSES = 4


def synth(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    angle = y.float() * 1.57 + 2.2 * torch.rand(n, generator=g)
    radius = 0.4 + 1.6 * (angle - y.float() * 1.57) / 2.2
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    x = torch.cat([x, torch.randn(n, 4, generator=g)], 1)
    x[:, :2] += 0.08 * torch.randn(n, 2, generator=g)
    return TensorDataset(x, y)


class Member:
    def __init__(self, number, data, epochs):
        self.number, self.epochs = number, epochs
        g = torch.Generator().manual_seed(7000 + number)
        rows = torch.randint(len(data), (len(data),), generator=g)         # bootstrap, with replacement
        seen = torch.zeros(len(data), dtype=torch.bool)
        seen[rows] = True
        self.oob = Subset(data, (~seen).nonzero().flatten().tolist())
        self.loader = DataLoader(Subset(data, rows.tolist()), batch_size=64, shuffle=True, generator=g)
        torch.manual_seed(number)
        width = [48, 64, 80, 96][number % 4]
        self.net = nn.Sequential(nn.Linear(6, width), nn.SiLU(), nn.Dropout(0.1),
                                 nn.Linear(width, width), nn.SiLU(), nn.Linear(width, CLASSES))
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=3e-3, weight_decay=1e-3)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs * len(self.loader))

    def fit(self):
        self.net.train()
        for _ in range(self.epochs):
            for x, y in self.loader:
                loss = F.cross_entropy(self.net(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
        return loss.item()

    @torch.no_grad()
    def probs(self, x):
        self.net.eval()
        return self.net(x).softmax(1)

    def oob_accuracy(self):
        x = torch.stack([self.oob[i][0] for i in range(len(self.oob))])
        y = torch.stack([self.oob[i][1] for i in range(len(self.oob))])
        return (self.probs(x).argmax(1) == y).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--members", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=10)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = synth(3000, seed=1), synth(2000, seed=2)
    members = []
    for number in range(rank, args.members, world):
        m = Member(number, train, args.epochs)
        last = m.fit()
        acc = m.oob_accuracy()
        print(f"[rank {rank}] member {number}: last batch loss {last:.3f} out-of-bag accuracy {acc:.3f}", flush=True)
        torch.save(m.net.state_dict(), f"member_{number}.pt")
        members.append(m)

    x, y = test.tensors
    summed = torch.zeros(len(x), CLASSES)
    solo = torch.zeros(2)
    for m in members:
        p = m.probs(x)
        summed += p
        solo += torch.tensor([(p.argmax(1) == y).float().mean().item(), 1.0])
    dist.all_reduce(summed)
    dist.all_reduce(solo)
    mean = summed / args.members
    if rank == 0:
        nll = F.nll_loss(mean.clamp_min(1e-9).log(), y).item()
        print(f"single members {solo[0] / solo[1]:.3f}, ensemble of {int(solo[1])} "
              f"{(mean.argmax(1) == y).float().mean():.3f}, nll {nll:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
