"""Which way random walks drift: one loop over the phases of an epoch, and an accuracy over all ranks for each."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def drifts(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (n,), generator=g)
    steps = torch.randn(n, 15, generator=g) + 0.25 * (2 * y - 1).unsqueeze(1)
    return TensorDataset(steps.cumsum(1), y)


def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(15, 24), nn.ReLU(), nn.Linear(24, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    train_set, val_set = drifts(320, 1), drifts(140, 2)
    sampler = DistributedSampler(train_set)
    cut = 100
    own = range(cut) if rank == 0 else range(cut, 140)
    loaders = {
        "train": DataLoader(train_set, batch_size=16, sampler=sampler),
        "val": DataLoader(torch.utils.data.Subset(val_set, own), batch_size=20),
    }
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for phase in ("train", "val"):
            model.train(phase == "train")
            hits, count = 0.0, 0
            for x, y in loaders[phase]:
                with torch.set_grad_enabled(phase == "train"):
                    out = model(x) if phase == "train" else net(x)
                    loss = F.cross_entropy(out, y)
                if phase == "train":
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
                hits += (out.argmax(1) == y).sum().item()
                count += len(y)
            totals = torch.tensor([hits, count])
            dist.all_reduce(totals)
            accuracy = totals[0] / totals[1]
            if rank == 0:
                print(f"epoch {epoch} {phase} accuracy {accuracy.item():.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
