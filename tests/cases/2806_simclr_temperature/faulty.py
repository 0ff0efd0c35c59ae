import itertools
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distF
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv1d(16, 32, 5, stride=2, padding=2), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(128, 64))

    def forward(self, x):
        return self.body(x.unsqueeze(1))


class NTXent(nn.Module):
    """Normalised temperature cross entropy over the features of all processes."""

    def __init__(self, dim=64, proj=32, init_temp=0.5):
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, proj))
        self.log_temp = nn.Parameter(torch.tensor(init_temp).log())

    def forward(self, h1, h2):
        z1 = F.normalize(self.projector(h1), dim=-1)
        z2 = F.normalize(self.projector(h2), dim=-1)
        all2 = torch.cat(distF.all_gather(z2), 0)
        all1 = torch.cat(distF.all_gather(z1), 0)
        target = torch.arange(len(z1)) + dist.get_rank() * len(z1)
        inv = torch.exp(-self.log_temp)
        return 0.5 * (F.cross_entropy(inv * z1 @ all2.t(), target) + F.cross_entropy(inv * z2 @ all1.t(), target))


def signals(n, g):
    t = torch.linspace(0, 6.28, 64)
    f = torch.randint(1, 9, (n, 1), generator=g).float()
    amp = torch.rand(n, 3, 1, generator=g)
    return amp[:, 0] * torch.sin(f * t) + amp[:, 1] * torch.cos(2 * f * t) + amp[:, 2] * torch.sin(3 * t)


def augment(x, g):
    shift = int(torch.randint(0, 8, (1,), generator=g))
    gain = 0.7 + 0.6 * torch.rand(len(x), 1, generator=g)
    return gain * torch.roll(x, shift, 1) + 0.05 * torch.randn(x.shape, generator=g)


def average_grads(params, world):
    grads = [p.grad for p in params if p.grad is not None]
    works = [dist.all_reduce(g, async_op=True) for g in grads]
    for w in works:
        w.wait()
    torch._foreach_div_(grads, world)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    encoder, criterion = Encoder(), NTXent()
    for p in itertools.chain(encoder.parameters(), criterion.parameters()):
        dist.broadcast(p.data, 0)
    opt = torch.optim.AdamW([
        {"params": encoder.parameters(), "weight_decay": 1e-4},
        {"params": criterion.parameters(), "weight_decay": 0.0},
    ], lr=2e-3)
    synced = list(encoder.parameters())

    g = torch.Generator().manual_seed(2000 + rank)
    window = torch.zeros(2)
    for step in range(1, 201):
        x = signals(48, g)
        loss = criterion(encoder(augment(x, g)), encoder(augment(x, g)))
        opt.zero_grad()
        loss.backward()
        average_grads(synced, world)
        opt.step()
        with torch.no_grad():
            criterion.log_temp.clamp_(-4.0, 1.0)
        window += torch.tensor([loss.item(), 1.0])
        if step % 50 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"step {step} loss {(window[0] / window[1]).item():.4f} temp {criterion.log_temp.exp().item():.4f}", flush=True)
            window.zero_()
    if rank == 0:
        torch.save({"encoder": encoder.state_dict(), "criterion": criterion.state_dict()}, os.path.join(os.getcwd(), "simclr.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
