"""Activity recognition from recordings on disk; gradients are averaged by a post-backward hook of our own trainer."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def record(path, n=640, length=200):
    """Three accelerometer axes; activities differ in rhythm."""
    g = torch.Generator().manual_seed(33)
    label = torch.randint(0, 4, (n,), generator=g)
    t = torch.arange(length) / 50
    rhythm = torch.tensor([0.7, 1.3, 2.1, 3.2])[label].view(n, 1, 1)
    phase = 6.2832 * torch.rand(n, 3, 1, generator=g)
    wave = torch.sin(6.2832 * rhythm * t + phase) + 0.5 * torch.randn(n, 3, length, generator=g)
    torch.save({"wave": wave, "label": label}, path)


class Recordings(Dataset):
    def __init__(self, path, n=640):
        self.path, self.n = path, n
        self.data = torch.load(path)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.data["wave"][i], self.data["label"][i]


class RhythmNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(3, 12, 25, stride=3), nn.ReLU(), nn.Conv1d(12, 24, 9, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(8)
        )
        self.out = nn.Linear(24 * 8, 4)

    def forward(self, x):
        return self.out(self.conv(x).flatten(1))


class Trainer:
    def __init__(self, net, lr):
        self.rank, self.world, self.net = dist.get_rank(), dist.get_world_size(), net
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        for p in net.parameters():
            dist.broadcast(p.detach(), src=0)

    def after_backward(self):
        handles = [dist.all_reduce(p.grad, async_op=True) for p in self.net.parameters()]
        for h, p in zip(handles, self.net.parameters()):
            h.wait()
            p.grad /= self.world

    def epoch(self, loader):
        stats = torch.zeros(3)
        for wave, label in loader:
            out = self.net(wave)
            loss = nn.functional.cross_entropy(out, label)
            self.opt.zero_grad()
            loss.backward()
            self.after_backward()
            self.opt.step()
            stats += torch.tensor([loss.item() * len(label), (out.argmax(1) == label).sum().item(), len(label)])
        dist.all_reduce(stats)
        return (stats[:2] / stats[2]).tolist()


def main(path="recordings.pt", epochs=3):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    if rank == 0:
        record(path)
    dist.barrier()
    torch.manual_seed(0)
    data = Recordings(path)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    trainer = Trainer(RhythmNet(), lr=4e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        loss, acc = trainer.epoch(loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
