"""Matrix factorisation with a checkpoint manager; every stage continues the previous one."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Ratings(Dataset):
    def __init__(self, users=40, items=30, rank=4):
        g = torch.Generator().manual_seed(17)
        u, v = torch.randn(users, rank, generator=g), torch.randn(items, rank, generator=g)
        self.score = (u @ v.t()).flatten()[:1024]
        self.pairs = torch.cartesian_prod(torch.arange(users), torch.arange(items))[:1024]

    def __len__(self):
        return len(self.score)

    def __getitem__(self, i):
        return self.pairs[i, 0], self.pairs[i, 1], self.score[i]


class Factors(nn.Module):
    def __init__(self, users=40, items=30, rank=8):
        super().__init__()
        self.user = nn.Embedding(users, rank)
        self.item = nn.Embedding(items, rank)
        self.mix = nn.Bilinear(rank, rank, 1)

    def forward(self, u, i):
        return self.mix(self.user(u), self.item(i)).squeeze(1)


class Progress:
    def __init__(self):
        self.epoch = 0

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


class CheckpointManager:
    def __init__(self, folder, **parts):
        self.file = os.path.join(folder, "state.pt")
        self.parts = parts
        os.makedirs(folder, exist_ok=True)

    def save(self):
        if dist.get_rank() == 0:
            torch.save({name: part.state_dict() for name, part in self.parts.items()}, self.file)
        dist.barrier()

    def restore(self):
        if not os.path.isfile(self.file):
            return False
        stored = torch.load(self.file, map_location="cpu")
        for name, part in self.parts.items():
            part.load_state_dict(stored[name])
        return True


def stage(args, until):
    torch.manual_seed(args.seed)
    model = DDP(Factors())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.999))
    progress = Progress()
    manager = CheckpointManager(args.folder, model=model.module, optimizer=optimizer, progress=progress)
    resumed = manager.restore()
    data = Ratings()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    while progress.epoch < until:
        sampler.set_epoch(progress.epoch)
        total = torch.zeros(1)
        for u, i, score in loader:
            loss = nn.functional.mse_loss(model(u, i), score)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        progress.epoch += 1
        if dist.get_rank() == 0:
            mean = total.item() / (len(loader) * dist.get_world_size())
            print(f"{'resumed' if resumed else 'fresh'} epoch {progress.epoch}: mse {mean:.4f}", flush=True)
    manager.save()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--folder", default="factors")
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    for until in (3, 6):
        stage(args, until)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
