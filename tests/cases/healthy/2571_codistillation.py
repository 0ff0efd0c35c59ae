"""Codistillation: two different networks, one per process, teach each other through their logits on a shared batch."""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_f
import torch.nn.functional as F
from torch import nn


def glyphs(n, seed):
    g = torch.Generator().manual_seed(seed)
    shapes = (torch.rand(8, 10, 10, generator=torch.Generator().manual_seed(0)) < 0.35).float()
    y = torch.randint(0, 8, (n,), generator=g)
    x = shapes[y]
    shift = torch.randint(-1, 2, (n, 2), generator=g)
    x = torch.stack([torch.roll(im, tuple(s.tolist()), (0, 1)) for im, s in zip(x, shift)])
    return (x + 0.7 * torch.randn(x.shape, generator=g)).unsqueeze(1), y


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        )
        self.fc = nn.Linear(32 * 25, 8)

    def forward(self, x):
        return self.fc(self.f(x).flatten(1))


class MlpNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Flatten(), nn.Linear(100, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 8))

    def forward(self, x):
        return self.f(x)


def peers_logits(logits, rank, world):
    """Everybody's view of the shared batch; the mean of the others is the teacher."""
    pool = [torch.empty_like(logits) for _ in range(world)]
    dist.all_gather(pool, logits.detach().contiguous())
    return torch.stack([p for r, p in enumerate(pool) if r != rank]).mean(0)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    ap.add_argument("--burn-in", type=int, default=60)
    ap.add_argument("--weight", type=float, default=0.6)
    ap.add_argument("--temperature", type=float, default=2.0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(50 + rank)
    model = ConvNet() if rank % 2 == 0 else MlpNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3 if rank % 2 == 0 else 1e-3)
    x, y = glyphs(400, 10 + rank)
    pool_x, _ = glyphs(1500, 30)
    tx, ty = glyphs(600, 31)
    own = torch.Generator().manual_seed(rank)
    shared = torch.Generator().manual_seed(1234)
    T = args.temperature

    for step in range(args.steps):
        model.train()
        pick = torch.randint(0, len(y), (32,), generator=own)
        loss = F.cross_entropy(model(x[pick]), y[pick])
        if step >= args.burn_in:
            both = pool_x[torch.randint(0, len(pool_x), (32,), generator=shared)]
            logits = model(both)
            teacher = peers_logits(logits, rank, world)
            soft = F.kl_div(F.log_softmax(logits / T, 1), F.softmax(teacher / T, 1), reduction="batchmean") * T * T
            loss = loss + args.weight * soft
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 60 == 59:
            model.eval()
            with torch.no_grad():
                acc = (model(tx).argmax(1) == ty).float().mean()
            table = [torch.zeros(3) for _ in range(world)]
            dist.all_gather(table, torch.tensor([rank, loss.item(), acc.item()]))
            if rank == 0:
                print(f"step {step + 1}: " + " | ".join(f"net {int(r)} loss {l:.3f} acc {a:.3f}" for r, l, a in (t.tolist() for t in table)), flush=True)

    model.eval()
    with torch.no_grad():
        p = F.softmax(model(tx), 1)
    p = sum(dist_f.all_gather(p)) / world
    if rank == 0:
        print(f"both together: acc {(p.argmax(1) == ty).float().mean().item():.3f}", flush=True)
    torch.save(model.state_dict(), f"net{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
