"""Box regression; the best weights by validation IoU are stored."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Boxes(Dataset):
    def __init__(self, n, seed, size=16):
        g = torch.Generator().manual_seed(seed)
        self.corner = torch.randint(0, 8, (n, 2), generator=g)
        self.extent = torch.randint(3, 8, (n, 2), generator=g)
        self.noise = 0.3 * torch.randn(n, size, size, generator=g)

    def __len__(self):
        return len(self.corner)

    def __getitem__(self, i):
        (y, x), (h, w) = self.corner[i].tolist(), self.extent[i].tolist()
        image = self.noise[i].clone()
        image[y : y + h, x : x + w] += 1
        return image.unsqueeze(0), torch.tensor([x, y, x + w, y + h]) / 16


def iou(a, b):
    lt, rb = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inter = (rb - lt).clamp_min(0).prod(1)
    area = lambda t: (t[:, 2:] - t[:, :2]).clamp_min(0).prod(1)
    return inter / (area(a) + area(b) - inter).clamp_min(1e-6)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU())
        self.box = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.box(self.conv(x)).sigmoid()


class Evaluator:
    def __init__(self, dataset, rank, world):
        self.loader = DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=20)

    @torch.no_grad()
    def __call__(self, net):
        net.eval()
        total = torch.zeros(2)
        for image, box in self.loader:
            total += torch.tensor([iou(net(image), box).sum().item(), len(box)])
        net.train()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--out", default="detector_best.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Detector())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_set, val_set = Boxes(256, 1), Boxes(120, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    evaluator = Evaluator(val_set, rank, world)
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, box in loader:
            loss = nn.functional.smooth_l1_loss(model(image), box, beta=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = evaluator(model.module)
        if rank == 0:
            print(f"epoch {epoch}: validation IoU {score:.4f}", flush=True)
            if score > best:
                best = score
                torch.save(model.module.state_dict(), args.out)
    if rank == 0:
        print(f"best validation IoU {best:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
