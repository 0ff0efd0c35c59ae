"""Point-cloud segmentation, starts its own workers."""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EasyDict(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class PointNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.local = nn.Sequential(nn.Conv1d(3, width, 1), nn.ReLU())
        self.seg = nn.Sequential(nn.Conv1d(2 * width, width, 1), nn.ReLU(), nn.Conv1d(width, 2, 1))

    def forward(self, pts):
        f = self.local(pts)
        g = f.amax(2, keepdim=True).expand_as(f)
        return self.seg(torch.cat([f, g], 1))


def rooms(n=128, k=24):
    g = torch.Generator().manual_seed(8)
    pts = torch.randn(n, 3, k, generator=g)
    return TensorDataset(pts, (pts[:, 2] > pts[:, 2].mean(1, keepdim=True)).long())


def main(gpu, cfg):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(cfg.port)
    dist.init_process_group("gloo", rank=gpu, world_size=cfg.world_size)
    torch.set_num_threads(1)
    torch.manual_seed(cfg.seed)
    model = DDP(PointNet())
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    data = rooms()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        for pts, label in loader:
            loss = nn.functional.cross_entropy(model(pts), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if gpu == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    cfg = EasyDict(epochs=3, batch_size=16, lr=5e-3, seed=1, world_size=2)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        cfg.port = s.getsockname()[1]
    if cfg.world_size > 1:
        mp.spawn(main, nprocs=cfg.world_size, args=(cfg))
    else:
        main(0, cfg)
