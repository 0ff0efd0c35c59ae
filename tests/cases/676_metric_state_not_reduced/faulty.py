"""Metric classes in the manner of torchmetrics: add_state, update, compute."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Metric:
    def __init__(self):
        self._defaults, self._reduce = {}, {}

    def add_state(self, name, default, dist_reduce_fx=None):
        self._defaults[name], self._reduce[name] = default, dist_reduce_fx
        setattr(self, name, default.clone())

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, default.clone())

    def sync(self):
        for name, op in self._reduce.items():
            if op == "sum":
                t = getattr(self, name).clone()
                dist.all_reduce(t)
                setattr(self, name, t)

    def compute(self):
        self.sync()
        value = self._compute()
        self.reset()
        return value


class MeanLoss(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss, n):
        self.total += loss.detach() * n
        self.count += n

    def _compute(self):
        return (self.total / self.count).item()


class MacroF1(Metric):
    def __init__(self, classes):
        super().__init__()
        self.add_state("confusion", torch.zeros(classes, classes))

    def update(self, logits, target):
        k = len(self.confusion)
        self.confusion += torch.bincount(target * k + logits.argmax(1), minlength=k * k).view(k, k)

    def _compute(self):
        tp = self.confusion.diag()
        return (2 * tp / (self.confusion.sum(0) + self.confusion.sum(1)).clamp(min=1)).mean().item()


def wine(n, seed):
    centres = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return TensorDataset(centres[y] + 1.3 * torch.randn(n, 11, generator=g), y)


def main(epochs=5):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(12)
    model = DDP(nn.Sequential(nn.Linear(11, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 3)))
    torch.manual_seed(12 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train, valid = wine(360, 1), wine(120, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=18, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=30, sampler=DistributedSampler(valid, shuffle=False))
    mean_loss, f1 = MeanLoss(), MacroF1(3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, y in valid_loader:
                logits = model(x)
                mean_loss.update(nn.functional.cross_entropy(logits, y), len(x))
                f1.update(logits, y)
        values = {"val_loss": mean_loss.compute(), "val_f1": f1.compute()}
        if rank == 0:
            print(f"epoch {epoch}", " ".join(f"{k}={v:.4f}" for k, v in values.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
