"""Stop in the middle of an epoch and go on: skips the batches that were used, restores random states of each rank."""
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ResumableSampler(Sampler):
    """Seeded permutation, dealt out to the ranks; starts at `position` samples of this rank once, then at 0."""

    def __init__(self, size, rank, world, seed=0):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.epoch = self.position = 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 10007 + self.epoch)
        order = torch.randperm(self.size - self.size % self.world, generator=g)[self.rank :: self.world].tolist()
        start, self.position = self.position, 0
        return iter(order[start:])

    def __len__(self):
        return self.size // self.world - self.position


def build(rank, world):
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 1))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(402, 10, generator=g)
    data = TensorDataset(x, (x**2).sum(1, keepdim=True) / 10)
    return model, opt, sched, data, ResumableSampler(len(data), rank, world, seed=5)


def save(folder, rank, model, opt, sched, epoch, position):
    torch.save({"torch": torch.get_rng_state(), "python": random.getstate()}, os.path.join(folder, f"rng_{rank}.pt"))
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "epoch": epoch, "position": position}, os.path.join(folder, "state.pt"))
    dist.barrier()


def run(folder, rank, world, epochs, stop_at=None, resume=False):
    model, opt, sched, data, sampler = build(rank, world)
    loader = DataLoader(data, batch_size=12, sampler=sampler, drop_last=False, generator=torch.Generator())  # its base seed must not come out of the random state that is restored
    epoch, position = 0, 0
    torch.manual_seed(1000 + rank)
    random.seed(rank)
    if resume:
        state = torch.load(os.path.join(folder, "state.pt"))
        model.module.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        epoch, position = state["epoch"], state["position"]
        rng = torch.load(os.path.join(folder, f"rng_{rank}.pt"), weights_only=False)
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])
        if rank == 0:
            print(f"resumed in epoch {epoch} after {position} samples a rank")
    step = 0
    while epoch < epochs:
        sampler.epoch, sampler.position = epoch, position
        for x, y in loader:
            if random.random() < 0.5:
                x = -x  # a symmetry of the target
            loss = F.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            position += len(x)
            step += 1
            if step == stop_at:
                save(folder, rank, model, opt, sched, epoch, position)
                return None
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0:
            print(f"epoch {epoch}: last loss {value.item() / world:.5f}")
        epoch, position = epoch + 1, 0
    return value.item() / world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    home = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(home, src=0)
    straight = run(home[0], rank, world, epochs=3)
    run(home[0], rank, world, epochs=3, stop_at=25)
    resumed = run(home[0], rank, world, epochs=3, resume=True)
    if rank == 0:
        print("resumed run equals the straight one:", straight == resumed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
