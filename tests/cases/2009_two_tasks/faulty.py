"""Two tasks on one trunk; conflicting task gradients are projected onto each other (PCGrad)."""
import argparse
import random

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def scenes(n, seed):
    """Task one: which of four patterns. Task two: how bright it is."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (n,), generator=g)
    light = 0.5 + torch.rand(n, generator=g)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    bank = torch.stack([(xx // 2) % 2, (yy // 2) % 2, ((xx + yy) // 3) % 2, (((xx - 8) ** 2 + (yy - 8) ** 2).sqrt() // 2) % 2])
    image = light.view(-1, 1, 1) * bank[kind] + 0.7 * torch.randn(n, 16, 16, generator=g)
    return TensorDataset(image.unsqueeze(1), kind, light)


class Perception(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(288, 64), nn.ReLU())
        self.kind, self.light = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.kind(h), self.light(h).squeeze(1)


def flatten(grads, params):
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, params)])


class PCGrad:
    def __init__(self, optimizer, seed):
        self.optimizer = optimizer
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.dice = random.Random(seed)

    def gradient(self, loss, keep):
        grads = torch.autograd.grad(loss, self.params, retain_graph=keep, allow_unused=True)
        flat = flatten(grads, self.params)
        return flat

    def step(self, losses):
        flats = [self.gradient(loss, keep=k < len(losses) - 1) for k, loss in enumerate(losses)]
        merged = torch.zeros_like(flats[0])
        for i, own in enumerate(flats):
            own = own.clone()
            others = [j for j in range(len(flats)) if j != i]
            self.dice.shuffle(others)
            for j in others:
                overlap = own @ flats[j]
                if overlap < 0:
                    own -= overlap / flats[j].pow(2).sum().clamp(min=1e-12) * flats[j]
            merged += own
        at = 0
        for p in self.params:
            p.grad = merged[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        self.optimizer.step()


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    sums = torch.zeros(3)
    for image, kind, light in loader:
        a, b = net(image)
        sums += torch.stack([(a.argmax(1) == kind).float().sum(), (b - light).abs().sum(), torch.tensor(float(len(kind)))])
    dist.all_reduce(sums)
    net.train()
    return (sums[:2] / sums[2]).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = DDP(Perception())
    opt = PCGrad(torch.optim.Adam(model.parameters(), lr=args.lr), seed=2)
    train, val = scenes(384, 1), scenes(128, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, args.batch, sampler=DistributedSampler(val, shuffle=False))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, kind, light in loader:
            a, b = model(image)
            opt.step([nn.functional.cross_entropy(a, kind), 2 * nn.functional.smooth_l1_loss(b, light)])
        accuracy, error = evaluate(model.module, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: pattern accuracy {accuracy:.3f}, brightness error {error:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
