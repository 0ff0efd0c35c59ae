"""ZeRO stage 1 by hand: every parameter has one owner, which alone keeps Adam moments for it and updates it."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn


class ShardedAdamW:
    def __init__(self, params, **options):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        load = [0] * self.world
        self.owner = {}
        for i in sorted(range(len(self.params)), key=lambda i: -self.params[i].numel()):
            self.owner[i] = load.index(min(load))
            load[self.owner[i]] += self.params[i].numel()
        self.mine = [p for i, p in enumerate(self.params) if self.owner[i] == self.rank]
        self.inner = torch.optim.AdamW(self.mine, **options)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def reduce_to_owners(self):
        for i, p in enumerate(self.params):
            dist.reduce(p.grad, dst=self.owner[i])
            if self.owner[i] == self.rank:
                p.grad /= self.world
            else:
                p.grad = None  # of no use here any more

    def clip(self, limit):
        square = torch.stack([p.grad.square().sum() for p in self.mine]).sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        for p in self.mine:
            p.grad *= (limit / (norm + 1e-6)).clamp(max=1.0)
        return norm.item()

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for i, p in enumerate(self.params):
            dist.broadcast(p, src=self.owner[i])

    def state_bytes(self):
        return sum(v.numel() * v.element_size() for s in self.inner.state.values() for v in s.values())

    def save_shard(self, folder):
        torch.save(self.inner.state_dict(), os.path.join(folder, f"optimizer_{self.rank}_of_{self.world}.pt"))


class Mixer(nn.Module):
    """A small MLP-mixer for 4 x 4 patches of 16 x 16 pictures."""

    def __init__(self, dim=48, tokens=16, classes=8):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.token_mix = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channel_mix = nn.Sequential(nn.Linear(dim, 96), nn.GELU(), nn.Linear(96, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = h + self.token_mix(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        h = h + self.channel_mix(self.norm2(h))
        return self.head(h.mean(1))


def pictures(n, gen):
    y = torch.randint(8, (n,), generator=gen)
    phase = 6.28 * torch.rand(n, 1, 1, generator=gen)
    t = torch.arange(16).float()
    freq = 0.4 + 0.3 * (y % 4).view(-1, 1, 1).float()
    vertical = (y >= 4).view(-1, 1, 1)
    wave = torch.sin(freq * torch.where(vertical, t.view(1, -1, 1), t.view(1, 1, -1)) + phase)
    return (wave + 0.3 * torch.randn(n, 16, 16, generator=gen)).unsqueeze(1), y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--out", default="zero1")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Mixer()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = ShardedAdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    draw = torch.Generator().manual_seed(10 + rank)
    for step in range(1, args.steps + 1):
        x, y = pictures(args.batch, draw)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.reduce_to_owners()
        norm = optimizer.clip(1.0)
        optimizer.step()
        if step % 30 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / world:.4f} grad norm {norm:.3f}", flush=True)
    print(f"rank {rank}: {len(optimizer.mine)} parameters owned, {optimizer.state_bytes()} bytes of state", flush=True)
    os.makedirs(args.out, exist_ok=True)
    optimizer.save_shard(args.out)  # each rank writes its own part
    if rank == 0:
        torch.save(model.state_dict(), os.path.join(args.out, "model.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
