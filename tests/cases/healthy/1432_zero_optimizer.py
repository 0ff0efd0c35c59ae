"""Optimizer state sharded with ZeroRedundancyOptimizer, consolidated for the checkpoint."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def waves(n=320, t=20):
    g = torch.Generator().manual_seed(2)
    phase, freq = 6.28 * torch.rand(n, 1, generator=g), 0.2 + 0.3 * torch.rand(n, 1, generator=g)
    s = (phase + freq * torch.arange(t + 1)).sin()
    return TensorDataset(s[:, :-1, None], s[:, -1:])


class Experiment:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(11)
        self.model = DDP(Forecaster(), gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.Adam, lr=4e-3)
        data = waves()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=20, sampler=self.sampler)

    def epoch(self, e):
        self.sampler.set_epoch(e)
        total = torch.zeros(1)
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        return total.item() / (self.world * len(self.loader))

    def save(self, e):
        self.optimizer.consolidate_state_dict(to=0)
        if self.rank == 0:
            torch.save({"epoch": e, "model": self.model.module.state_dict(), "optim": self.optimizer.state_dict()}, "zero.pt")
        dist.barrier()

    def restore(self):
        state = torch.load("zero.pt", map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])
        return state["epoch"] + 1


def main():
    dist.init_process_group("gloo")
    first = Experiment()
    for e in range(3):
        loss = first.epoch(e)
        if first.rank == 0:
            print(f"epoch {e}: {loss:.4f}")
        first.save(e)
    second = Experiment()
    for e in range(second.restore(), 6):
        loss = second.epoch(e)
        if second.rank == 0:
            print(f"epoch {e} (resumed): {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
