"""SimSiam on synthetic patches, started with torchrun."""
import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class PatchPairs(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(16)
        self.img = torch.rand(n, 1, 12, 12, generator=g)

    def __len__(self):
        return len(self.img)

    def view(self, img):
        dy, dx = random.randint(0, 3), random.randint(0, 3)
        crop = img[:, dy:dy + 9, dx:dx + 9]
        return crop + 0.05 * torch.randn_like(crop)

    def __getitem__(self, i):
        return self.view(self.img[i]), self.view(self.img[i])


class SimSiam(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, width))
        self.projector = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width))
        self.predictor = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, width))

    def forward(self, a, b):
        z1, z2 = self.projector(self.backbone(a)), self.projector(self.backbone(b))
        p1, p2 = self.predictor(z1), self.predictor(z2)
        d = lambda p, z: -F.cosine_similarity(p, z.detach(), dim=-1).mean()
        return d(p1, z2) / 2 + d(p2, z1) / 2


def set_deterministic(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main(args):
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank = dist.get_rank()
    # other augmentations on every rank
    set_deterministic(args.seed + rank)

    model = DistributedDataParallel(SimSiam().to(args.device))
    dataset = PatchPairs()
    train_loader = DataLoader(
        dataset=dataset, batch_size=args.batch_size // dist.get_world_size(), drop_last=True, shuffle=True
    )
    lr = args.base_lr * args.batch_size / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader))

    for epoch in range(args.epochs):
        model.train()
        losses = []
        for a, b in train_loader:
            model.zero_grad()
            loss = model(a.to(args.device), b.to(args.device))
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        mean = torch.tensor(sum(losses) / len(losses), device=args.device)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {(mean / dist.get_world_size()).item():.4f} lr {scheduler.get_last_lr()[0]:.5f}")
    if rank == 0:
        torch.save(model.module.backbone.state_dict(), "simsiam_backbone.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--base_lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=8)
    main(parser.parse_args())
