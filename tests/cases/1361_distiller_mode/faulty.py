"""Knowledge distillation: a small student learns from a wide teacher that was trained before."""
import argparse
import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("distill")


@dataclass
class DistillConfig:
    epochs: int = 5
    teacher_steps: int = 60
    batch_size: int = 32
    lr: float = 4e-3
    temperature: float = 3.0
    alpha: float = 0.7
    seed: int = 0
    teacher_path: str = "teacher.pt"
    student_path: str = "student.pt"


class GlyphDataset(Dataset):
    """Noisy 12x12 glyphs of six classes."""

    def __init__(self, size, seed):
        g = torch.Generator().manual_seed(seed)
        shapes = (torch.rand(6, 1, 12, 12, generator=torch.Generator().manual_seed(123)) > 0.6).float()
        self.labels = torch.randint(0, 6, (size,), generator=g)
        self.images = shapes[self.labels] + 0.9 * torch.randn(size, 1, 12, 12, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def conv_block(c_in, c_out, drop):
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(c_out),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(drop),
    )


class GlyphNet(nn.Module):
    def __init__(self, width, drop=0.0):
        super().__init__()
        self.stem = conv_block(1, width, drop)
        self.body = conv_block(width, 2 * width, drop)
        self.classifier = nn.Linear(2 * width * 9, 6)

    def forward(self, x):
        return self.classifier(self.body(self.stem(x)).flatten(1))


class StudentNet(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(9 * width, 6))

    def forward(self, x):
        return self.net(x)


class Distiller(nn.Module):
    """Student and teacher in one module; forward returns the mixed loss and the student's logits."""

    def __init__(self, student, teacher, temperature, alpha):
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.temperature = temperature
        self.alpha = alpha
        for p in self.teacher.parameters():
            p.requires_grad = False
        self.teacher.eval()

    def forward(self, images, labels):
        logits = self.student(images)
        with torch.no_grad():
            soft = F.softmax(self.teacher(images) / self.temperature, dim=1)
        kd = F.kl_div(F.log_softmax(logits / self.temperature, dim=1), soft, reduction="batchmean")
        ce = F.cross_entropy(logits, labels)
        loss = self.alpha * self.temperature ** 2 * kd + (1 - self.alpha) * ce
        return loss, logits


class Meter:
    def __init__(self):
        self.values = torch.zeros(3, dtype=torch.float64)

    def add(self, loss, hits, n):
        self.values += torch.tensor([loss * n, hits, n], dtype=torch.float64)

    def result(self):
        total = self.values.clone()
        dist.all_reduce(total)
        return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def fit_teacher(cfg, dataset):
    """Only called on rank 0: trains the teacher once and writes it to disk."""
    torch.manual_seed(cfg.seed + 1)
    net = GlyphNet(16, drop=0.3)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net.train()
    for _ in range(cfg.teacher_steps):
        idx = torch.randint(0, len(dataset), (64,))
        loss = F.cross_entropy(net(dataset.images[idx]), dataset.labels[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    torch.save(net.state_dict(), cfg.teacher_path)


class DistillTrainer:
    def __init__(self, cfg, train_set, test_set):
        self.cfg = cfg
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        teacher = GlyphNet(16, drop=0.3)
        teacher.load_state_dict(torch.load(cfg.teacher_path, map_location="cpu"))
        torch.manual_seed(cfg.seed)
        self.model = DDP(Distiller(StudentNet(), teacher, cfg.temperature, cfg.alpha))
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=cfg.lr, weight_decay=1e-4)
        self.sampler = DistributedSampler(train_set, shuffle=True, seed=cfg.seed)
        self.loader = DataLoader(train_set, batch_size=cfg.batch_size, sampler=self.sampler)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.epochs * len(self.loader))
        self.test_set = test_set

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        meter = Meter()
        for images, labels in self.loader:
            loss, logits = self.model(images, labels)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            meter.add(loss.item(), (logits.argmax(1) == labels).sum().item(), len(labels))
        return meter.result()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        student = self.model.module.student
        meter = Meter()
        images = self.test_set.images[self.rank::self.world]
        labels = self.test_set.labels[self.rank::self.world]
        for x, y in zip(images.split(50), labels.split(50)):
            out = student(x)
            meter.add(F.cross_entropy(out, y).item(), (out.argmax(1) == y).sum().item(), len(y))
        return meter.result()

    def fit(self):
        for epoch in range(self.cfg.epochs):
            loss, acc = self.train_epoch(epoch)
            test_loss, test_acc = self.evaluate()
            log.info("epoch %d: kd loss %.4f acc %.3f | test loss %.4f acc %.3f", epoch, loss, acc, test_loss, test_acc)
        if self.rank == 0:
            torch.save(self.model.module.student.state_dict(), self.cfg.student_path)
        dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=3.0)
    args = parser.parse_args()
    cfg = DistillConfig(epochs=args.epochs, temperature=args.temperature)

    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    train_set, test_set = GlyphDataset(640, 1), GlyphDataset(200, 2)
    if rank == 0:
        fit_teacher(cfg, train_set)
    dist.barrier()
    DistillTrainer(cfg, train_set, test_set).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
