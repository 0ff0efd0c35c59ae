"""Train a wide teacher, then distil it into a narrow student on partly unlabelled data."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, TensorDataset

CLASSES, T, ALPHA = 6, 3.0, 0.3


def blobs(n, seed, labelled=True):
    centres = 1.6 * torch.randn(CLASSES * 2, 10, generator=torch.Generator().manual_seed(60))
    g = torch.Generator().manual_seed(seed)
    which = torch.randint(0, CLASSES * 2, (n,), generator=g)
    x = centres[which] + torch.randn(n, 10, generator=g)
    y = which % CLASSES
    return TensorDataset(x, y if labelled else torch.full_like(y, -100))


def mlp(width, p):
    return nn.Sequential(
        nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(p),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES),
    )


class Stage:
    def __init__(self, name, net, ds, val, epochs, lr):
        self.name, self.net, self.epochs = name, net, epochs
        self.ddp = DDP(net)
        self.sampler = DistributedSampler(ds, shuffle=True, seed=14)
        self.dl = DataLoader(ds, batch_size=48, sampler=self.sampler, drop_last=True)
        self.vdl = DataLoader(val, batch_size=64, sampler=DistributedSampler(val, shuffle=False))
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, lr, total_steps=epochs * len(self.dl))

    def criterion(self, x, logits, y):
        return F.cross_entropy(logits, y)

    def fit(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            self.net.train()
            agg = torch.zeros(2, dtype=torch.float64)
            for x, y in self.dl:
                loss = self.criterion(x, self.ddp(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                agg += torch.tensor([loss.item(), 1.0], dtype=torch.float64)
            dist.all_reduce(agg)
            acc = self.accuracy()
            if dist.get_rank() == 0:
                print(f"[{self.name}] epoch {epoch} loss {agg[0] / agg[1]:.3f} val acc {acc:.3f}")
        return self.net

    @torch.no_grad()
    def accuracy(self):
        for b in self.net.buffers():
            dist.broadcast(b, src=0)
        self.net.eval()
        c = torch.zeros(2, dtype=torch.long)
        for x, y in self.vdl:
            c[0] += (self.net(x).argmax(1) == y).sum()
            c[1] += len(y)
        dist.all_reduce(c)
        return c[0].item() / c[1].item()


class DistilStage(Stage):
    def __init__(self, teacher, *args):
        super().__init__(*args)
        self.teacher = teacher

    def criterion(self, x, logits, y):
        with torch.no_grad():
            target = F.log_softmax(self.teacher(x) / T, dim=1)
        soft = F.kl_div(F.log_softmax(logits / T, dim=1), target, log_target=True, reduction="batchmean") * T * T
        hard = F.cross_entropy(logits, y, ignore_index=-100, reduction="sum") / len(y)
        return (1 - ALPHA) * soft + ALPHA * hard


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(30)
    labelled, unlabelled, val = blobs(768, 1), blobs(1024, 2, labelled=False), blobs(512, 3)

    net = Stage("teacher", mlp(128, 0.2), labelled, val, 4, 8e-3).fit()
    teacher = copy.deepcopy(net).eval().requires_grad_(False)
    torch.manual_seed(31)
    student = DistilStage(
        teacher, "student", mlp(24, 0.0), ConcatDataset([labelled, unlabelled]), val, 4, 1e-2
    ).fit()

    if rank == 0:
        torch.save({"teacher": teacher.state_dict(), "student": student.state_dict()}, "distilled.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
