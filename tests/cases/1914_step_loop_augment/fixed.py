"""Image classifier trained for a number of steps rather than epochs, with random shifts and flips."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Textures(Dataset):
    def __init__(self, n, train, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 4, (n,), generator=g)
        yy, xx = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
        waves = torch.stack([(yy * 0.9).sin(), (xx * 0.9).sin(), ((xx + yy) * 0.6).sin(), (yy * 0.4).sin()])
        self.image = waves[self.label].unsqueeze(1) + 0.8 * torch.randn(n, 1, 20, 20, generator=g)
        self.train = train

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        image = self.image[i]
        if self.train:
            dy, dx = torch.randint(0, 5, (2,)).tolist()
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        else:
            dy = dx = 2
        return image[:, dy : dy + 16, dx : dx + 16], self.label[i]


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(96, 4),
    )  # fmt: skip


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    hits = torch.zeros(2)
    for i in range(rank, len(data), world):
        image, label = data[i]
        hits += torch.tensor([float(model.module(image[None]).argmax() == label), 1.0])
    dist.all_reduce(hits)
    model.train()
    return (hits[0] / hits[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-steps", type=int, default=90)
    ap.add_argument("--eval-every", type=int, default=30)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--seed", type=int, default=29)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DDP(make_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed + 1 + rank)  # other augmentations on other ranks

    train_set, val_set = Textures(480, True, 1), Textures(120, False, 2)
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

    running = torch.zeros(2)
    for step in range(args.max_steps):
        if step % len(loader) == 0:
            sampler.set_epoch(step // len(loader))
            batches = iter(loader)
        image, label = next(batches)
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += torch.tensor([loss.item(), 1.0])
        if (step + 1) % args.eval_every == 0:
            dist.all_reduce(running)
            acc = evaluate(model, val_set, rank, world)
            if rank == 0:
                print(f"step {step + 1}: train {running[0] / running[1]:.4f} val {acc:.3f}", flush=True)
            running.zero_()
    if rank == 0:
        torch.save(model.module.state_dict(), "textures.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
