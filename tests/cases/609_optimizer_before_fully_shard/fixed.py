"""Encoder-only transformer for sequence classification, FSDP2 on a 1-D mesh."""
import dataclasses

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


@dataclasses.dataclass
class Args:
    epochs: int = 3
    batch_size: int = 16
    lr: float = 2e-3
    dim: int = 32
    layers: int = 2


class SeqClassifier(nn.Module):
    def __init__(self, a, vocab=20, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, a.dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(a.dim, 4, 64, dropout=0.0, batch_first=True) for _ in range(a.layers)
        )
        self.head = nn.Linear(a.dim, classes)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


def toy_sequences(n=256):
    g = torch.Generator().manual_seed(99)
    x = torch.randint(0, 20, (n, 10), generator=g)
    y = (x.float().mean(1) > 8.5).long() + (x.float().mean(1) > 10.5).long()
    return TensorDataset(x, y)


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main():
    a = Args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = SeqClassifier(a)
    model = shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr)

    data = toy_sequences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, a.batch_size, sampler=sampler)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        model.train()
        meter = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            meter += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(meter)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {meter[0] / meter[1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
