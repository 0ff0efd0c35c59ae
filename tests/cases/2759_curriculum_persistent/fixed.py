import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# difficulty -> (noise, largest time shift, interfering tones)
STAGES = [(0.2, 0, 0), (0.5, 4, 1), (0.8, 12, 2), (1.0, 32, 3)]


class Tones(Dataset):
    """Waveforms of 64 samples, the label is the frequency bin of the dominant chirp."""

    classes, length = 10, 64

    def __init__(self, n, level=0, frozen_seed=None):
        self.n, self.frozen_seed = n, frozen_seed
        self._level = torch.tensor(level).share_memory_()

    def set_level(self, level):
        self._level.fill_(level)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        gen = None if self.frozen_seed is None else torch.Generator().manual_seed(self.frozen_seed * 100003 + i)
        noise, shift, others = STAGES[int(self._level)]
        label = i % self.classes
        t = torch.arange(self.length, dtype=torch.float32)
        t = t + float(torch.randint(0, shift + 1, (), generator=gen))
        wave = torch.sin(0.25 * (label + 2) * t)
        for _ in range(others):
            f = 0.25 * (2 + float(torch.randint(0, self.classes, (), generator=gen)))
            wave = wave + 0.45 * torch.sin(f * t + 6.28 * torch.rand((), generator=gen))
        return wave + noise * torch.randn(self.length, generator=gen), label


class ToneNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 32, 9, padding=4), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(32, 48, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4))
        self.fc = nn.Sequential(nn.Dropout(0.1), nn.Linear(48 * 4, Tones.classes))

    def forward(self, x):
        return self.fc(self.conv(x.unsqueeze(1)).flatten(1))


class Hook:
    def epoch_begin(self, t):
        ...

    def epoch_end(self, t):
        ...


class Curriculum(Hook):
    def __init__(self, epochs_per_stage):
        self.k = epochs_per_stage

    def epoch_begin(self, t):
        level = min(t.epoch // self.k, len(STAGES) - 1)
        t.train_loader.dataset.set_level(level)
        t.log["stage"] = level


class Validate(Hook):
    def __init__(self, loader):
        self.loader = loader

    @torch.no_grad()
    def epoch_end(self, t):
        t.net.eval()
        acc = torch.zeros(3)
        for x, y in self.loader:
            out = t.net(x)
            acc += torch.stack([F.cross_entropy(out, y, reduction="sum"), (out.argmax(1) == y).sum(), torch.tensor(float(len(y)))])
        dist.all_reduce(acc)
        t.net.train()
        t.log["val_loss"], t.log["val_acc"] = (acc[0] / acc[2]).item(), (acc[1] / acc[2]).item()


class EarlyStop(Hook):
    def __init__(self, patience, after):
        self.patience, self.after, self.best, self.bad, self.state = patience, after, float("inf"), 0, None

    def epoch_end(self, t):
        if t.epoch < self.after:
            return
        if t.log["val_loss"] < self.best:
            self.best, self.bad, self.state = t.log["val_loss"], 0, copy.deepcopy(t.net.state_dict())
        else:
            self.bad += 1
        t.stop = self.bad > self.patience


class Printer(Hook):
    def epoch_end(self, t):
        if dist.get_rank() == 0:
            print(f"epoch {t.epoch:2d} " + " ".join(f"{k} {v:.4g}" for k, v in t.log.items()), flush=True)


class Trainer:
    def __init__(self, net, loader, lr, hooks):
        self.net, self.train_loader, self.hooks = net, loader, hooks
        self.model = DDP(net)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
        self.log, self.stop, self.epoch = {}, False, 0

    def emit(self, name):
        for h in self.hooks:
            getattr(h, name)(self)

    def train_step(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(x).float(), y)
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.detach()

    def fit(self, epochs):
        for self.epoch in range(epochs):
            self.train_loader.sampler.set_epoch(self.epoch)
            self.emit("epoch_begin")
            losses = torch.stack([self.train_step(x, y) for x, y in self.train_loader])
            mean = losses.mean()
            dist.all_reduce(mean)
            self.log["loss"] = mean.item() / dist.get_world_size()
            self.emit("epoch_end")
            if self.stop:
                break


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--stage-epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.05)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = ToneNet()
    torch.manual_seed(10 + rank)

    train = Tones(1920)
    loader = DataLoader(train, args.batch, sampler=DistributedSampler(train, seed=1), num_workers=1,
                        persistent_workers=True, drop_last=True)
    hard = Tones(512, level=len(STAGES) - 1, frozen_seed=9)
    val = DataLoader(torch.utils.data.Subset(hard, range(rank, len(hard), world)), 128)
    stopper = EarlyStop(patience=3, after=args.stage_epochs * (len(STAGES) - 1))
    trainer = Trainer(net, loader, args.lr, [Curriculum(args.stage_epochs), Validate(val), stopper, Printer()])
    trainer.fit(args.epochs)
    if rank == 0 and stopper.state is not None:
        torch.save(stopper.state, "best_tone.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
