"""Denoising autoencoder over several processes."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def reduce_mean(tensor):
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor / dist.get_world_size()


def waves(n=384, length=32):
    g = torch.Generator().manual_seed(8)
    phase = 6.2832 * torch.rand(n, 1, generator=g)
    freq = 1 + 3 * torch.rand(n, 1, generator=g)
    t = torch.linspace(0, 6.2832, length)
    clean = torch.sin(freq * t + phase)
    return TensorDataset(clean + 0.3 * torch.randn(n, length, generator=g), clean)


def build(length=32, code=6):
    encoder = nn.Sequential(nn.Linear(length, 64), nn.ReLU(), nn.Linear(64, code))
    decoder = nn.Sequential(nn.Linear(code, 64), nn.ReLU(), nn.Linear(64, length))
    net = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    for tensor in net.state_dict().values():
        dist.broadcast(tensor, src=0)
    return net


def train(opts):
    torch.manual_seed(0)
    net = build()
    opt = torch.optim.SGD(net.parameters(), lr=opts.lr, momentum=0.9)
    dataset = waves()
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, opts.batch_size, sampler=sampler)
    for epoch in range(opts.epochs):
        sampler.set_epoch(epoch)
        mean_loss = 0.0
        for noisy, clean in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(net["decoder"](net["encoder"](noisy)), clean)
            loss = reduce_mean(loss)
            loss.backward()
            opt.step()
            mean_loss += loss.item() / len(loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: reconstruction {mean_loss:.5f}", flush=True)
    return net


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.barrier()
    dist.destroy_process_group()
