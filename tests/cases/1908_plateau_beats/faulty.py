"""Heart-beat classification from 1-D signals, lr lowered when the validation loss stalls."""
import logging
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

OPTIONS = dict(classes=4, length=64, train=640, val=96, epochs=8, batch=20, lr=0.15, factor=0.5, patience=0, seed=41)


class Beats(Dataset):
    def __init__(self, n, opt, seed):
        rng = np.random.default_rng(seed)
        self.label = rng.integers(0, opt["classes"], n)
        t = np.linspace(0, 1, opt["length"])
        freq = 3 + 1.0 * self.label[:, None] + 0.3 * rng.standard_normal((n, 1))
        phase = rng.uniform(0, 6.28, (n, 1))
        wave = np.sin(6.28 * freq * t + phase) + 0.8 * rng.standard_normal((n, opt["length"]))
        self.wave = wave.astype(np.float32)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return torch.from_numpy(self.wave[i]).unsqueeze(0), int(self.label[i])


def network(opt):
    return nn.Sequential(
        nn.Conv1d(1, 16, 9, padding=4), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(16, 32, 9, padding=4), nn.ReLU(), nn.AdaptiveAvgPool1d(4),
        nn.Flatten(), nn.Linear(128, opt["classes"]),
    )  # fmt: skip


class BeatTrainer:
    def __init__(self, opt):
        self.opt = opt
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.log = logging.getLogger("beats")
        torch.manual_seed(opt["seed"])
        self.model = DistributedDataParallel(network(opt))
        self.optim = torch.optim.SGD(self.model.parameters(), lr=opt["lr"], momentum=0.9)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optim, factor=opt["factor"], patience=opt["patience"], threshold=0.02
        )
        train, val = Beats(opt["train"], opt, 1), Beats(opt["val"], opt, 2)
        self.sampler = DistributedSampler(train, seed=opt["seed"])
        self.train_loader = DataLoader(train, batch_size=opt["batch"], sampler=self.sampler)
        self.val_loader = DataLoader(Subset(val, range(self.rank, len(val), self.world)), batch_size=24)

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        self.model.train()
        sums = torch.zeros(2)
        for wave, label in self.train_loader:
            self.optim.zero_grad()
            loss = nn.functional.cross_entropy(self.model(wave), label)
            loss.backward()
            self.optim.step()
            sums += torch.tensor([loss.item() * len(label), len(label)])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        sums = torch.zeros(3)
        for wave, label in self.val_loader:
            out = self.model.module(wave)
            loss = nn.functional.cross_entropy(out, label, reduction="sum").item()
            sums += torch.tensor([loss, (out.argmax(1) == label).sum().item(), len(label)])
        val_loss = sums[0] / sums[2]
        dist.all_reduce(sums)
        return val_loss.item(), (sums[1] / sums[2]).item()

    def run(self):
        for epoch in range(self.opt["epochs"]):
            train_loss = self.train_epoch(epoch)
            val_loss, acc = self.validate()
            self.plateau.step(val_loss)
            self.log.info("epoch %d train %.4f val acc %.3f", epoch, train_loss, acc)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    level = logging.INFO if int(os.environ["RANK"]) == 0 else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(message)s")
    BeatTrainer(OPTIONS).run()
    dist.barrier()
    dist.destroy_process_group()
