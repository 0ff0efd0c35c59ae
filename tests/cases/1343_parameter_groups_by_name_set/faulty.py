"""Residual denoiser with separate weight-decay groups, trained in two consecutive jobs."""
import argparse
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WIDTH = 32


class Noisy(Dataset):
    def __init__(self, n=384):
        g = torch.Generator().manual_seed(19)
        low = torch.randn(n, 5, generator=g) @ torch.randn(5, WIDTH, generator=g)
        self.clean = torch.tanh(low / 2)
        self.noisy = self.clean + 0.4 * torch.randn(n, WIDTH, generator=g)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, i):
        return self.noisy[i], self.clean[i]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.relu(self.mix(self.norm(x)))


class Denoiser(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.blocks(x))


def make_optimizer(net, lr):
    table = dict(net.named_parameters())
    decay, plain = set(), set()
    for name in table:
        if name.endswith("weight") and ".norm." not in name:
            decay.add(name)
        else:
            plain.add(name)
    groups = [
        {"params": [table[name] for name in decay], "weight_decay": 0.02},
        {"params": [table[name] for name in plain], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def job(path, first, last, lr):
    torch.manual_seed(11)
    net = Denoiser()
    optimizer = make_optimizer(net, lr)
    if path.exists():
        saved = torch.load(path)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    model = DDP(net)
    data = Noisy()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for noisy, clean in loader:
            loss = nn.functional.mse_loss(model(noisy), clean)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.5f}", flush=True)
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--checkpoint", type=pathlib.Path, default=pathlib.Path("denoiser.pt"))
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        args.checkpoint.unlink(missing_ok=True)
    dist.barrier()
    job(args.checkpoint, 0, 3, args.lr)
    job(args.checkpoint, 3, 6, args.lr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
