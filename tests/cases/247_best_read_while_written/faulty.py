"""Cyclic training: at the end of every cycle all ranks go back to the weights that rank 0 has just written."""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Store:
    def __init__(self, folder, rank):
        self.folder, self.rank = folder, rank

    def path(self, cycle):
        return os.path.join(self.folder, f"cycle{cycle}.pt")

    def publish(self, cycle, net):
        if self.rank == 0:
            time.sleep(0.3)  # a slow file system
            torch.save(net.state_dict(), self.path(cycle))

    def fetch(self, cycle, net):
        net.load_state_dict(torch.load(self.path(cycle), map_location="cpu", weights_only=True))


def ellipses(n):
    g = torch.Generator().manual_seed(12)
    p = torch.randn(n, 3, generator=g)
    inside = (p * torch.tensor([1.0, 0.7, 1.5])).square().sum(1) < 2.5
    return TensorDataset(p, inside.float().unsqueeze(1))


def train_cycle(model, loader, sampler, opt, cycle, epochs):
    total = torch.zeros(2)
    for epoch in range(cycle * epochs, (cycle + 1) * epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main(cycles=3):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    store = Store(box[0], rank)
    net = nn.Sequential(nn.Linear(3, 40), nn.ReLU(), nn.Linear(40, 1))
    model = DDP(net)
    data = ellipses(288)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 18, sampler=sampler)
    for cycle in range(cycles):
        opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        loss = train_cycle(model, loader, sampler, opt, cycle, 2)
        store.publish(cycle, net)
        store.fetch(cycle, net)
        if rank == 0:
            print(f"cycle {cycle}: loss {loss:.4f}")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
