"""Probe on a frozen encoder: only the head is new and trained."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32))
        self.head = nn.Linear(32, outputs)

    def forward(self, x):
        return self.head(self.encoder(x))


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return x


def loop(model, opt, data, loss_fn, epochs, rank, tag):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_fn(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"{tag} {epoch}: {loss.item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--weights", default="encoder.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    torch.manual_seed(0)
    model = DDP(Net(16))
    torch.manual_seed(10 + rank)
    x = dataset(320, 1)
    loop(model, torch.optim.Adam(model.parameters(), lr=2e-3), TensorDataset(x, x), nn.functional.mse_loss, 3, rank, "reconstruct")
    if rank == 0:
        state = {k: v for k, v in model.module.state_dict().items() if k.startswith("encoder.")}
        torch.save(state, args.weights)
    dist.barrier()

    torch.manual_seed(1)
    net = Net(3)
    result = net.load_state_dict(torch.load(args.weights), strict=False)
    assert sorted(result.missing_keys) == ["head.bias", "head.weight"] and not result.unexpected_keys
    net.encoder.requires_grad_(False)
    net.encoder.eval()
    probe = DDP(net)
    x = dataset(320, 2)
    y = x[:, :3].argmax(1)
    opt = torch.optim.Adam(net.head.parameters(), lr=1e-2)
    loop(probe, opt, TensorDataset(x, y), nn.functional.cross_entropy, 4, rank, "probe")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
