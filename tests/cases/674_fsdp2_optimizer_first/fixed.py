"""FSDP2 behind a base class: build() makes things, distribute() shards them, run() trains."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, inp=12, dim=32, depth=3, out=4):
        super().__init__()
        self.stem = nn.Linear(inp, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, out)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


class Experiment:
    lr = 3e-3

    def __init__(self, model):
        self.model = model
        self.rank = dist.get_rank()
        self.setup()

    def setup(self):
        self.distribute()
        self.optimizer = self.make_optimizer()

    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr)

    def distribute(self):
        raise NotImplementedError

    def run(self, data, epochs, batch):
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=batch, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for x, y in loader:
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.model.zero_grad()
                total += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(total)
            if self.rank == 0:
                print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")


class ShardedExperiment(Experiment):
    def distribute(self):
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)


def teacher(n):
    g = torch.Generator().manual_seed(29)
    x = torch.randn(n, 12, generator=g)
    w = torch.randn(12, 16, generator=g)
    return TensorDataset(x, (torch.tanh(x @ w) @ torch.randn(16, 4, generator=g)).argmax(1))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ShardedExperiment(Net()).run(teacher(480), epochs=4, batch=24)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
