"""Random search over training settings for a box regressor; each trial is trained by all processes together."""
import argparse
import json
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Boxes(Dataset):
    """One bright rectangle on noise, target: its normalised corners."""

    def __init__(self, n, seed, size=20):
        g = torch.Generator().manual_seed(seed)
        self.images = 0.3 * torch.randn(n, 1, size, size, generator=g)
        top = torch.randint(0, 9, (n, 2), generator=g)
        extent = torch.randint(5, 11, (n, 2), generator=g)
        self.boxes = torch.cat([top, top + extent], dim=1)
        for img, (y0, x0, y1, x1) in zip(self.images, self.boxes.tolist()):
            img[0, y0:y1, x0:x1] += 1
        self.boxes = self.boxes.float() / size

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, i):
        return self.images[i], self.boxes[i]


def regressor(dropout):
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 64), nn.ReLU(),
        nn.Dropout(dropout), nn.Linear(64, 4),
    )


def iou(a, b):
    low, high = torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])
    inter = (high - low).clamp(min=0).prod(1)
    area = lambda z: (z[:, 2:] - z[:, :2]).clamp(min=0).prod(1)
    return inter / (area(a) + area(b) - inter).clamp(min=1e-6)


def draw_trial():
    return {
        "lr": 10 ** random.uniform(-3.2, -2.2),
        "beta1": random.choice([0.8, 0.9]),
        "weight_decay": 10 ** random.uniform(-5, -2),
        "dropout": random.choice([0.0, 0.1]),
    }


def train(trial, data, epochs, batch):
    torch.manual_seed(0)
    model = DDP(regressor(trial["dropout"]))
    torch.manual_seed(100 + dist.get_rank())
    opt = torch.optim.AdamW(
        model.parameters(), lr=trial["lr"], betas=(trial["beta1"], 0.999), weight_decay=trial["weight_decay"]
    )
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, box in loader:
            loss = nn.functional.smooth_l1_loss(model(x), box, beta=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return model


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    x, box = data.images[rank::world], data.boxes[rank::world]
    stat = torch.stack([iou(model.module(x), box).sum(), torch.tensor(float(len(box)))])
    dist.all_reduce(stat)
    return (stat[0] / stat[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--trials", type=int, default=3)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data, held_out = Boxes(512, seed=1), Boxes(200, seed=2)

    results = []
    for number in range(args.trials):
        trial = draw_trial()
        dist.broadcast_object_list([trial], src=0)
        model = train(trial, data, args.epochs, args.batch)
        score = evaluate(model, held_out, rank, world)
        results.append({"trial": number, "iou": score, **trial})
        if rank == 0:
            print(f"trial {number}: IoU {score:.3f} with lr {trial['lr']:.1e}", flush=True)
    if rank == 0:
        with open("trials.json", "w") as f:
            json.dump(sorted(results, key=lambda r: -r["iou"]), f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
