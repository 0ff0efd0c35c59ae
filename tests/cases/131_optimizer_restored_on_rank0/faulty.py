"""Item sequences with self-attention; interrupted and continued."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

ITEMS, LENGTH = 30, 10


class Sessions(IterableDataset):
    """Endless click sessions from `seed` on: users walk through the catalogue with their own stride."""

    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.seed)
        while True:
            start, stride = torch.randint(0, ITEMS, (2,), generator=gen).tolist()
            walk = (start + (1 + stride % 3) * torch.arange(LENGTH + 1)) % ITEMS
            noise = torch.rand(LENGTH + 1, generator=gen) < 0.03
            walk = torch.where(noise, torch.randint(0, ITEMS, (LENGTH + 1,), generator=gen), walk)
            yield walk[:-1], walk[1:]


class NextItem(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.item, self.place = nn.Embedding(ITEMS, width), nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, ITEMS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, x):
        return self.out(self.block(self.item(x) + self.place, src_mask=self.mask))


def build(lr):
    torch.manual_seed(5)
    net = NextItem()
    return net, torch.optim.Adam(net.parameters(), lr=lr)


def resume(path, net, opt):
    """Returns the step to continue with."""
    step = torch.zeros(1, dtype=torch.long)
    if dist.get_rank() == 0 and os.path.exists(path):
        ckpt = torch.load(path, map_location="cpu")
        net.load_state_dict(ckpt["net"])
        opt.load_state_dict(ckpt["opt"])
        step.fill_(ckpt["step"])
    dist.broadcast(step, src=0)
    return int(step)


def session(path, steps, lr=4e-3, batch=24):
    """One job of the queue: resume, train, save."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net, opt = build(lr)
    first = resume(path, net, opt)
    model = DDP(net)
    stream = iter(DataLoader(Sessions(seed=10_000 * (first + 1) + rank), batch_size=batch))
    window = torch.zeros(())
    for step in range(first, first + steps):
        x, y = next(stream)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        window += loss.detach()
        if step % 20 == 19:
            dist.all_reduce(window)
            if rank == 0:
                print(f"step {step + 1}: loss {window.item() / 20 / world:.4f}", flush=True)
            window.zero_()
    if rank == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "step": first + steps}, path)
    dist.barrier()


def main():
    dist.init_process_group("gloo")
    session("next_item.pt", steps=60)
    session("next_item.pt", steps=60)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
