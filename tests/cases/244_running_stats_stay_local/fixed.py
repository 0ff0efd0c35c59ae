"""Two-channel signals; each rank's recordings come from its own device, with another offset."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def conv_block(i, o):
    return nn.Sequential(nn.Conv1d(i, o, 3, padding=1, bias=False), nn.BatchNorm1d(o, momentum=0.3), nn.ReLU())


def build():
    return nn.Sequential(conv_block(2, 12), nn.MaxPool1d(2), conv_block(12, 16), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3))


def recordings(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    t = torch.linspace(0, 6.28, 24)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    wave = torch.sin((1 + y).unsqueeze(1) * t + phase)
    x = torch.stack([wave, torch.roll(wave, 3, 1)], 1) + 0.4 * torch.randn(n, 2, 24, generator=g)
    return TensorDataset(x, y)


def share_buffers(net):
    """rank 0's running statistics for everybody, before they are used"""
    for b in net.buffers():
        dist.broadcast(b, src=0)


@torch.no_grad()
def evaluate(net, data, rank, world):
    net.eval()
    x, y = (t[rank::world] for t in data.tensors)
    c = torch.tensor([float((net(x).argmax(1) == y).sum()), float(len(y))])
    net.train()
    dist.all_reduce(c)
    return (c[0] / c[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(4)
    net = build()
    ddp = DDP(net, broadcast_buffers=False)
    opt = torch.optim.AdamW(ddp.parameters(), lr=5e-3)
    train, test = recordings(288, 1), recordings(91, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 16, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            opt.step()
        share_buffers(net)
        score = evaluate(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {score:.4f}")
    if rank == 0:
        with tempfile.TemporaryDirectory() as d:
            torch.save(net.state_dict(), os.path.join(d, "net.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
