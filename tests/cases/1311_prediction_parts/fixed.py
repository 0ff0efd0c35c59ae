"""Train a scorer, then write the predictions of the test set in parts and merge them."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Letters(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 6, (n,), generator=g)
        shapes = torch.randn(6, 5, 5, generator=torch.Generator().manual_seed(1))
        self.image = shapes[self.label] + 0.7 * torch.randn(n, 5, 5, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return i, self.image[i].unsqueeze(0), self.label[i]


def network():
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(300, 6))


@torch.no_grad()
def write_parts(net, data, folder, rank, world):
    net.eval()
    loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=20)
    for part, (ids, image, _) in enumerate(loader):
        rows = {"id": ids, "class": net(image).argmax(1)}
        torch.save(rows, os.path.join(folder, f"part_{rank}_{part:03d}.pt"))


def merge(data, folder):
    hits = total = 0
    for path in sorted(glob.glob(os.path.join(folder, "part_*.pt"))):
        rows = torch.load(path)
        hits += (data.label[rows["id"]] == rows["class"]).sum().item()
        total += len(rows["id"])
    return hits / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--out", default="predictions")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.makedirs(args.out, exist_ok=True)
    torch.manual_seed(6)
    model = DDP(network())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train, test = Letters(256, 10), Letters(120, 11)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for _, image, label in loader:
            loss = nn.functional.cross_entropy(model(image), label)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)

    write_parts(model.module, test, args.out, rank, world)
    dist.barrier()
    if rank == 0:
        print(f"test accuracy {merge(test, args.out):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
