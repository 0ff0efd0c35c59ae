"""A class-conditional generator: the stream gives class numbers in turn, evenly, from every worker; what is random is drawn in the step."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

CLASSES = 24


class Prompts(IterableDataset):
    """Conditions to generate for: all equally often."""

    def __init__(self, rounds):
        self.rounds = rounds

    def __iter__(self):
        for _ in range(self.rounds):
            for one in range(CLASSES):
                yield one


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 16)
        self.net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, condition, noise):
        return self.net(torch.cat([self.embed(condition), noise], 1))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    means = torch.randn(CLASSES, 8)
    model = DDP(Generator())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(31 + rank)
    loader = DataLoader(Prompts(8), batch_size=16, num_workers=2)
    for epoch in range(4):
        total, count = 0.0, 0
        for condition in loader:
            noise = torch.randn(len(condition), 8, generator=generator)
            target = means[condition] + 0.3 * noise.flip(1) + 0.1 * torch.randn(noise.shape, generator=generator)
            loss = (model(condition, noise) - target).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, count = total + loss.item(), count + 1
        told = torch.tensor([total, count])
        dist.all_reduce(told)
        if rank == 0:
            print(f"epoch {epoch} loss {(told[0] / told[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
