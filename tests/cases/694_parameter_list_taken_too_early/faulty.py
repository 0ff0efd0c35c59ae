"""Base model with hand-made gradient averaging; heads are added by subclasses."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SyncedModule(nn.Module):
    """Averages the gradients of its parameters; weights come from rank 0."""

    def __init__(self, inp, hidden):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inp, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU())
        self.build_heads(hidden)
        self.synced = list(self.parameters())

    def build_heads(self, hidden):
        pass

    def broadcast(self):
        for t in self.state_dict().values():
            dist.broadcast(t, 0)

    def average_gradients(self):
        flat = torch.cat([p.grad.flatten() for p in self.synced])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        at = 0
        for p in self.synced:
            p.grad.copy_(flat[at : at + p.numel()].view_as(p))
            at += p.numel()


class MultiHead(SyncedModule):
    def __init__(self, inp, hidden, tasks):
        super().__init__(inp, hidden)
        self.heads = nn.ModuleDict({t: nn.Linear(hidden, 1) for t in tasks})

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h).squeeze(1) for name, head in self.heads.items()}


def properties(n):
    g = torch.Generator().manual_seed(58)
    x = torch.randn(n, 14, generator=g)
    return TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs() - 0.8, torch.sin(2 * x[:, 3])], 1))


def main(epochs=5):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    tasks = ["gap", "charge", "phase"]
    model = MultiHead(14, 48, tasks)
    model.broadcast()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = properties(480)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(len(tasks) + 1)
        for x, y in loader:
            out = model(x)
            losses = torch.stack([nn.functional.mse_loss(out[t], y[:, i]) for i, t in enumerate(tasks)])
            optimizer.zero_grad()
            losses.sum().backward()
            model.average_gradients()
            optimizer.step()
            sums += torch.cat([losses.detach(), torch.ones(1)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}:", " ".join(f"{t} {v:.3f}" for t, v in zip(tasks, (sums[:-1] / sums[-1]).tolist())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
