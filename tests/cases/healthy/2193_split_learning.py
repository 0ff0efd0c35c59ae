"""Split learning: a clinic (rank 0) keeps the images and the lower layers, a server (rank 1) the upper layers."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn

CLIENT, SERVER = 0, 1


@dataclass
class Config:
    epochs: int = 5
    batch: int = 32
    train: int = 640
    test: int = 192
    classes: int = 4
    cut: tuple = (8, 6, 6)


def images(n, cfg, seed):
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(cfg.classes, (n,), generator=gen)
    x = 0.6 * torch.randn(n, 1, 12, 12, generator=gen)
    for i, label in enumerate(y.tolist()):
        r, c = divmod(label, 2)
        x[i, 0, 6 * r:6 * r + 5, 6 * c:6 * c + 5] += 0.8
    return x, y


class Client:
    def __init__(self, cfg):
        self.cfg = cfg
        self.lower = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.optimizer = torch.optim.SGD(self.lower.parameters(), lr=0.05, momentum=0.9)
        self.train_set = images(cfg.train, cfg, seed=1)
        self.test_set = images(cfg.test, cfg, seed=2)

    def fit_epoch(self, epoch):
        x, y = self.train_set
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        self.lower.train()
        for pick in order.split(self.cfg.batch):
            smashed = self.lower(x[pick])
            dist.send(smashed.detach().contiguous(), SERVER)
            dist.send(y[pick], SERVER)
            grad = torch.empty_like(smashed)
            dist.recv(grad, SERVER)
            self.optimizer.zero_grad()
            smashed.backward(grad)
            self.optimizer.step()

    @torch.no_grad()
    def test(self):
        x, y = self.test_set
        self.lower.eval()
        for start in range(0, len(x), self.cfg.batch):
            dist.send(self.lower(x[start:start + self.cfg.batch]).contiguous(), SERVER)
            dist.send(y[start:start + self.cfg.batch], SERVER)


class Server:
    def __init__(self, cfg):
        self.cfg = cfg
        width = cfg.cut[0] * cfg.cut[1] * cfg.cut[2]
        self.upper = nn.Sequential(nn.Flatten(), nn.Linear(width, 64), nn.ReLU(), nn.Dropout(0.2),
                                   nn.Linear(64, cfg.classes))
        self.optimizer = torch.optim.Adam(self.upper.parameters(), lr=1e-3)

    def receive(self):
        smashed = torch.empty(self.cfg.batch, *self.cfg.cut)
        labels = torch.empty(self.cfg.batch, dtype=torch.long)
        dist.recv(smashed, CLIENT)
        dist.recv(labels, CLIENT)
        return smashed, labels

    def fit_epoch(self, epoch):
        self.upper.train()
        total = 0.0
        batches = self.cfg.train // self.cfg.batch
        for _ in range(batches):
            smashed, labels = self.receive()
            smashed.requires_grad_(True)
            loss = F.cross_entropy(self.upper(smashed), labels)
            self.optimizer.zero_grad()
            loss.backward()
            dist.send(smashed.grad, CLIENT)
            self.optimizer.step()
            total += loss.item()
        print(f"epoch {epoch}: loss {total / batches:.4f}", flush=True)

    @torch.no_grad()
    def test(self):
        self.upper.eval()
        hits = 0
        for _ in range(self.cfg.test // self.cfg.batch):
            smashed, labels = self.receive()
            hits += (self.upper(smashed).argmax(-1) == labels).sum().item()
        print(f"test accuracy {hits / self.cfg.test:.3f}", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cfg = Config()
    # both sides count on full batches
    assert cfg.train % cfg.batch == 0 and cfg.test % cfg.batch == 0
    torch.manual_seed(11 + dist.get_rank())
    party = Client(cfg) if dist.get_rank() == CLIENT else Server(cfg)
    for epoch in range(cfg.epochs):
        party.fit_epoch(epoch)
        party.test()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
