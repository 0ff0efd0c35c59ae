"""Each rank simulates three clients a round; the server's weights are the moving mean of theirs."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + y * 2.0944 + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1), y)


def build():
    return nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    counts = torch.zeros(2)
    for x, y in loader:
        counts += torch.stack([(net(x).argmax(1) == y).sum(), torch.tensor(len(y))])
    net.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main(rounds=8, clients=3):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    net = build()
    held_out = DataLoader(torch.utils.data.Subset(spirals(512, 2), range(rank, 512, world)), batch_size=128)
    shares = [spirals(256, 50 + rank * clients + c) for c in range(clients)]
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    server = {k: v.clone() for k, v in net.state_dict().items()}
    for turn in range(rounds):
        returned = []
        for c, share in enumerate(shares):
            net.load_state_dict(server)
            order = torch.Generator().manual_seed(1000 * turn + rank * clients + c)
            for x, y in DataLoader(share, batch_size=64, shuffle=True, generator=order):
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                opt.step()
            returned.append({k: v.clone() for k, v in net.state_dict().items()})
        for k, v in server.items():
            mean = torch.stack([r[k] for r in returned]).mean(0)
            dist.all_reduce(mean)
            v.lerp_(mean / world, 0.7)
        net.load_state_dict(server)
        found = accuracy(net, held_out)
        if rank == 0:
            print(f"round {turn}: {found:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
