"""Trainer with a resume() that copes with large files: mmap, assign, weights_only."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_into(module, file, *, strict=True, assign=False):
    """Loads a state dict without holding it in memory twice."""
    state = torch.load(file, mmap=True, weights_only=True)
    return module.load_state_dict(state, strict=strict, assign=assign)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(15, 64), nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class Trainer:
    def __init__(self, data, lr=0.05):
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.model = DDP(Net())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=20, sampler=self.sampler)
        self.epoch = 0

    def save(self, folder):
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), os.path.join(folder, "weights.pt"))
            torch.save({"optimizer": self.optimizer.state_dict(), "epoch": self.epoch}, os.path.join(folder, "state.pt"))
        dist.barrier()

    def resume(self, folder):
        load_into(self.model.module, os.path.join(folder, "weights.pt"))
        state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]

    def run(self, until):
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            total = torch.zeros(2)
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.model.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {self.epoch}: loss {(total[0] / total[1]).item():.4f}")
            self.epoch += 1


def blobs(n):
    g = torch.Generator().manual_seed(12)
    y = torch.randint(0, 3, (n,), generator=g)
    return TensorDataset(torch.randn(3, 15, generator=g)[y] + 1.3 * torch.randn(n, 15, generator=g), y)


def main():
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    data = blobs(480)
    first = Trainer(data)
    first.run(2)
    first.save(box[0])
    second = Trainer(data)
    second.resume(box[0])
    second.run(6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
