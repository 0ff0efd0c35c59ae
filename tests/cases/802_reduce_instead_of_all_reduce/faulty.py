"""Two-layer classifier on CPU nodes; gradient exchange in one flat message."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 3
BATCH = 16


class Spirals(Dataset):
    def __init__(self, n=320):
        g = torch.Generator().manual_seed(77)
        self.label = torch.randint(0, 2, (n,), generator=g)
        t = 3 * torch.rand(n, generator=g) + 0.3
        turn = 2 * t + 3.1416 * self.label
        self.xy = torch.stack([t * turn.cos(), t * turn.sin()], dim=1) + 0.05 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.xy[i], self.label[i]


def sync_gradients(params, world_size):
    """One message for the whole model instead of one per tensor."""
    flat = parameters_to_vector([p.grad for p in params])
    dist.reduce(flat, dst=0, op=dist.ReduceOp.SUM)
    flat /= world_size
    offset = 0
    for p in params:
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(5)

    net = nn.Sequential(nn.Linear(2, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2))
    params = list(net.parameters())
    for p in params:
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(params, lr=5e-3)

    data = Spirals()
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        right = torch.zeros(2)
        for xy, label in loader:
            out = net(xy)
            loss = F.cross_entropy(out, label)
            opt.zero_grad()
            loss.backward()
            sync_gradients(params, world_size)
            opt.step()
            right += torch.tensor([(out.argmax(1) == label).float().sum().item(), len(label)])
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(right[0] / right[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
