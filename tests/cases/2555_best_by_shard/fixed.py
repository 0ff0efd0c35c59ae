"""Sensor anomaly classifier with fully_shard; keeps the best weights in a distributed checkpoint."""
import logging
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("anomaly")


@dataclass
class Settings:
    channels: int = 24
    width: int = 64
    epochs: int = 12
    batch: int = 32
    lr: float = 0.006
    seed: int = 3
    best_dir: str = "best"
    history: list = field(default_factory=list)


def readings(n, seed, channels):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, channels, generator=g)
    score = (x[:, :6] * x[:, 6:12]).sum(1) + 0.5 * x[:, 12:].sum(1)
    y = (score + 1.5 * torch.randn(n, generator=g) > 0).long()
    return TensorDataset(x, y)


def network(s, mesh):
    torch.manual_seed(s.seed)
    net = nn.Sequential(
        nn.Linear(s.channels, s.width), nn.SiLU(),
        nn.Linear(s.width, s.width), nn.SiLU(),
        nn.Linear(s.width, 2),
    )
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train_epoch(net, loader, opt):
    net.train()
    for x, y in loader:
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()


@torch.no_grad()
def validate(net, loader):
    net.eval()
    stats = torch.zeros(3)
    for x, y in loader:
        logits = net(x)
        stats += torch.stack([
            F.cross_entropy(logits, y, reduction="sum"),
            (logits.argmax(1) == y).sum().float(),
            torch.tensor(float(len(y))),
        ])
    dist.all_reduce(stats)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def fit(s):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    train, val = readings(2400, 21, s.channels), readings(400, 22, s.channels)
    sampler = DistributedSampler(train, seed=s.seed)
    train_loader = DataLoader(train, s.batch, sampler=sampler)
    val_loader = DataLoader(val, 100, sampler=DistributedSampler(val, shuffle=False))
    net = network(s, mesh)
    opt = torch.optim.AdamW(net.parameters(), lr=s.lr, weight_decay=0.02)
    best, best_epoch = float("inf"), -1

    for epoch in range(s.epochs):
        sampler.set_epoch(epoch)
        train_epoch(net, train_loader, opt)
        val_loss, acc = validate(net, val_loader)
        s.history.append(val_loss)
        if rank == 0:
            log.info("epoch %d val loss %.4f acc %.3f", epoch, val_loss, acc)
        if val_loss < best:
            best, best_epoch = val_loss, epoch
            dcp.save({"model": get_model_state_dict(net)}, checkpoint_id=s.best_dir)

    state = {"model": get_model_state_dict(net)}
    dcp.load(state, checkpoint_id=s.best_dir)
    set_model_state_dict(net, state["model"])
    val_loss, acc = validate(net, val_loader)
    if rank == 0:
        log.info("best epoch %d: val loss %.4f acc %.3f", best_epoch, val_loss, acc)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    dist.init_process_group("gloo")
    fit(Settings(epochs=int(os.environ.get("EPOCHS", 12))))
    dist.barrier()
    dist.destroy_process_group()
