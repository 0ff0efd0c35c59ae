"""Trains in two legs, as on a cluster with time limits: the second leg resumes from the file of the first."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class State:
    """Everything that has to survive the end of a leg."""

    def __init__(self, **parts):
        self.parts = parts
        self.next_epoch = 0

    def save(self, path):
        blob = {name: part.state_dict() for name, part in self.parts.items()}
        blob["next_epoch"] = self.next_epoch
        if dist.get_rank() == 0:
            torch.save(blob, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()

    def restore(self, path, aliases):
        if not os.path.exists(path):
            return False
        blob = torch.load(path, map_location="cpu", weights_only=True)
        self.next_epoch = blob["next_epoch"]
        for name, part in self.parts.items():
            saved = blob.get(aliases.get(name, name))
            if saved is not None:  # older files lack the scheduler
                part.load_state_dict(saved)
        return True


ALIASES = {"model": "model", "optimizer": "optimizer", "scheduler": "scheduler"}


def corpus(n=480):
    gen = torch.Generator().manual_seed(41)
    ids = torch.randint(0, 30, (n, 8), generator=gen)
    return TensorDataset(ids, (ids.sum(1) % 4))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.net = nn.Sequential(nn.Linear(8 * 24, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, ids):
        return self.net(self.embed(ids).flatten(1))


def leg(path, until, lr=2e-3, batch=16, total=6):
    rank = dist.get_rank()
    torch.manual_seed(10)
    net = Bag()
    model = DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    state = State(model=net, optimizer=optimizer, scheduler=scheduler)
    resumed = state.restore(path, ALIASES)
    if rank == 0:
        print("resumed" if resumed else "fresh", "at epoch", state.next_epoch)
    data = corpus()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    for epoch in range(state.next_epoch, until):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for ids, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), y)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(y), len(y)])
        scheduler.step()
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")
        state.next_epoch = epoch + 1
        state.save(path)


def main():
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp(prefix="legs_") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "last.pt")
    leg(path, until=3)
    leg(path, until=6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
