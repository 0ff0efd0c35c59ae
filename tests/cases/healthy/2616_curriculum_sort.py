"""Learn to sort digits: the sequences get longer as the model gets better, within a time allowance."""
import argparse
import glob
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

DIGITS = 10


class Sorter(nn.Module):
    def __init__(self, dim=64, longest=12):
        super().__init__()
        self.emb = nn.Embedding(DIGITS, dim)
        self.slots = nn.Parameter(torch.randn(longest, dim) * 0.1)
        enc = nn.TransformerEncoderLayer(dim, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(enc, 1, enable_nested_tensor=False)
        self.cross = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.out = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 128), nn.ReLU(), nn.Linear(128, DIGITS))

    def forward(self, x):
        n = x.shape[1]
        h = self.enc(self.emb(x))
        counts = nn.functional.one_hot(x, DIGITS).float().cumsum(1)[:, -1:]
        q = self.slots[:n].expand(len(x), n, -1) + counts @ self.emb.weight
        y, _ = self.cross(q, h, h)
        return self.out(q + y)


class Checkpoints:
    def __init__(self, folder, keep=2):
        self.folder, self.keep = folder, keep
        if dist.get_rank() == 0:
            os.makedirs(folder, exist_ok=True)
            for old in glob.glob(f"{folder}/step*.pt"):
                os.remove(old)
        dist.barrier()

    def save(self, step, model, opt, **extra):
        if dist.get_rank() == 0:
            tmp = f"{self.folder}/tmp.pt"
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step, **extra}, tmp)
            os.replace(tmp, f"{self.folder}/step{step:06d}.pt")
            for old in sorted(glob.glob(f"{self.folder}/step*.pt"))[:-self.keep]:
                os.remove(old)
        dist.barrier()

    def last(self):
        return sorted(glob.glob(f"{self.folder}/step*.pt"))[-1]


def batch(n, size, gen):
    x = torch.randint(0, DIGITS, (size, n), generator=gen)
    return x, x.sort(1).values


@torch.no_grad()
def accuracy(model, length, rank, world):
    x, y = batch(length, 300, torch.Generator().manual_seed(31 + length))
    hit = (model(x[rank::world]).argmax(-1) == y[rank::world]).float()
    acc = torch.tensor([hit.sum().item(), hit.numel()])
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def out_of_time(deadline):
    flag = torch.tensor([int(time.monotonic() > deadline)])
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seconds", type=float, default=6.0)
    ap.add_argument("--steps", type=int, default=500)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = Sorter()
    model = DDP(net)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(4000 + rank)
    keeper = Checkpoints("rot")
    length, deadline = 3, time.monotonic() + args.seconds
    for step in range(1, args.steps + 1):
        x, y = batch(length, 32, gen)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if step % 50 == 0:
            net.eval()
            acc = accuracy(net, length, rank, world)
            net.train()
            if rank == 0:
                print(f"step {step} length {length} loss {loss.item():.3f} acc {acc:.3f}", flush=True)
            if acc > 0.85 and length < 12:
                length += 1
        if step % 150 == 0:
            keeper.save(step, net, opt, length=length)
        if step % 10 == 0 and out_of_time(deadline):
            break
    keeper.save(step, net, opt, length=length)
    state = torch.load(keeper.last(), map_location="cpu")
    assert state["step"] == step and state["length"] == length
    net.load_state_dict(state["model"])
    if rank == 0:
        print(f"stopped at step {step}, length {length}, kept {len(glob.glob('rot/step*.pt'))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
