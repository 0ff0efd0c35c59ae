"""Gradient averaging through a thin communication layer."""
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Comm:
    """What the project needs of torch.distributed, with its defaults."""

    def __init__(self, async_op=False):
        self.async_op = async_op
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum_(self, tensor, async_op=None):
        return dist.all_reduce(tensor, async_op=self.async_op if async_op is None else async_op)

    def mean_(self, tensor):
        self.sum_(tensor)
        return tensor.div_(self.size)

    def bcast_(self, tensor):
        dist.broadcast(tensor, 0)


class Highway(nn.Module):
    def __init__(self, inp=24, width=256, depth=3):
        super().__init__()
        self.inp = nn.Linear(inp, width)
        self.gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.out = nn.Linear(width, 5)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for gate in self.gates:
            h, t = gate(x).chunk(2, 1)
            t = torch.sigmoid(t - 1)
            x = t * torch.tanh(h) + (1 - t) * x
        return self.out(x)


def sensor(n):
    g = torch.Generator().manual_seed(39)
    y = torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(torch.randn(5, 24, generator=g)[y] + 1.2 * torch.randn(n, 24, generator=g), y)


def main(epochs=4):
    dist.init_process_group("gloo")
    comm = Comm()
    torch.manual_seed(2)
    model = Highway()
    for p in model.parameters():
        comm.bcast_(p.data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = sensor(480)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                comm.mean_(p.grad)
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        comm.sum_(total, async_op=False)
        if comm.rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
