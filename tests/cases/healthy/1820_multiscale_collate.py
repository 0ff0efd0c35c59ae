"""Multi-scale training: all ranks must have the same resolution at each step (or the quicker rank waits for the slower), so the loader workers of
all ranks draw the size alike; noise and flips are drawn per sample, seeded by epoch and index."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)
SIZES = (12, 16, 20, 24)


class Shapes(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.labels = torch.randint(0, 4, (n,), generator=g)
        self.base = torch.randn(4, 1, 24, 24, generator=g)
        self.epoch = 0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.epoch * 1_000_003 + i)
        image = self.base[self.labels[i]] + 0.7 * torch.randn(1, 24, 24, generator=g)
        if torch.rand((), generator=g) < 0.5:
            image = image.flip(-1)
        return image, int(self.labels[i])


def collate(batch):
    size = SIZES[int(torch.randint(len(SIZES), ()))]
    images = torch.stack([b[0] for b in batch])
    return nn.functional.interpolate(images, size=(size, size), mode="bilinear"), torch.tensor([b[1] for b in batch])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = Shapes(1024)
    sampler = DistributedSampler(data, seed=3)
    sizes = torch.Generator().manual_seed(42)               # the same on all ranks: one size per step for everybody
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2, collate_fn=collate, generator=sizes)
    model = DDP(nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
                              nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(288, 4)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f} last size {x.shape[-1]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
