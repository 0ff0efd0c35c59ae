"""Knowledge distillation of a convolutional teacher into a smaller student."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, SIDE = 6, 12


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(77))
    y = torch.randint(CLASSES, (n,), generator=g)
    gain = 0.5 + torch.rand(n, 1, 1, 1, generator=g)
    return TensorDataset(proto[y] * gain + 1.2 * torch.randn(n, 1, SIDE, SIDE, generator=g), y)


def convnet(width, drop):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(3),
        nn.Flatten(), nn.Dropout(drop), nn.Linear(18 * width, CLASSES),
    )


class Distiller(nn.Module):
    def __init__(self, teacher, student, temperature=3.0, alpha=0.7):
        super().__init__()
        self.teacher = teacher.requires_grad_(False)
        self.student = student
        self.t, self.alpha = temperature, alpha
        self.teacher.eval()

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x, y=None):
        logits = self.student(x)
        if y is None:
            return logits
        with torch.no_grad():
            soft = F.softmax(self.teacher(x) / self.t, -1)
        kd = F.kl_div(F.log_softmax(logits / self.t, -1), soft, reduction="batchmean") * self.t**2
        return self.alpha * kd + (1 - self.alpha) * F.cross_entropy(logits, y)


class Meter:
    def __init__(self):
        self.v = torch.zeros(2, dtype=torch.float64)

    def update(self, total, n):
        self.v += torch.tensor([float(total), float(n)], dtype=torch.float64)

    def compute(self):
        out = self.v.clone()
        dist.all_reduce(out)
        return (out[0] / out[1]).item()


def fit(model, loader, sampler, epochs, lr, loss_fn):
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, lr, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        meter = Meter()
        for x, y in loader:
            loss = loss_fn(model, x, y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            sched.step()
            meter.update(loss.item() * len(x), len(x))
        yield epoch, meter.compute()


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    m = Meter()
    for x, y in loader:
        m.update((model(x).argmax(-1) == y).sum(), len(y))
    return m.compute()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    say = print if rank == 0 else (lambda *a, **k: None)
    torch.manual_seed(1)
    train, test = images(1024, 2), images(512, 3)
    sampler = DistributedSampler(train, seed=4)
    loader = DataLoader(train, batch_size=32, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test, batch_size=64, sampler=DistributedSampler(test, shuffle=False))
    teacher, student = convnet(16, 0.3), convnet(4, 0.0)
    torch.manual_seed(1000 + rank)

    t = DDP(teacher)
    for epoch, loss in fit(t, loader, sampler, 4, 0.05, lambda m, x, y: F.cross_entropy(m(x), y)):
        say(f"teacher {epoch}: {loss:.4f}")
    say(f"teacher accuracy {accuracy(t.module, test_loader):.3f}")
    for b in teacher.buffers():
        dist.broadcast(b, src=0)

    d = DDP(Distiller(teacher, student))
    for epoch, loss in fit(d, loader, sampler, 5, 0.05, lambda m, x, y: m(x, y)):
        say(f"student {epoch}: {loss:.4f}")
    say(f"student accuracy {accuracy(d.module, test_loader):.3f}")
    if rank == 0:
        torch.save({"student": student.state_dict(), "teacher": teacher.state_dict()}, "distilled.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
