"""Session object that can go back to its last snapshot when the loss explodes."""
import dataclasses
import io
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclasses.dataclass
class Settings:
    dim: int = 14
    hidden: int = 48
    classes: int = 4
    lr: float = 0.05
    rounds: int = 3
    epochs_per_round: int = 2


class Session:
    def __init__(self, settings):
        self.s = settings
        self.rank = dist.get_rank()
        self.model = self.build()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=settings.lr, momentum=0.9)
        self.snapshot = None

    def build(self):
        s = self.s
        net = nn.Sequential(nn.Linear(s.dim, s.hidden), nn.ReLU(), nn.Linear(s.hidden, s.hidden), nn.ReLU(), nn.Linear(s.hidden, s.classes))
        return DistributedDataParallel(net)

    def save(self):
        buffer = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, buffer)
        self.snapshot = buffer.getvalue()

    def restore(self):
        state = torch.load(io.BytesIO(self.snapshot))
        self.model = self.build()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def run_epoch(self, loader, epoch):
        self.model.train()
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def mixture(n):
    g = torch.Generator().manual_seed(77)
    y = torch.randint(0, 4, (n,), generator=g)
    centres = torch.randn(4, 14, generator=g)
    return TensorDataset(centres[y] + 1.2 * torch.randn(n, 14, generator=g), y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    session = Session(Settings())
    data = mixture(400)
    loader = DataLoader(data, batch_size=20, sampler=DistributedSampler(data))
    epoch = 0
    for rnd in range(session.s.rounds):
        if rnd:
            session.restore()  # every round starts from the snapshot, as after a preemption
        for _ in range(session.s.epochs_per_round):
            loss = session.run_epoch(loader, epoch)
            if session.rank == 0:
                print(f"round {rnd} epoch {epoch}: loss {loss:.4f}")
            epoch += 1
        session.save()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
