"""Corrupt samples give inf now and then. All ranks agree (MIN of a finite flag) whether the step counts; where not, all skip it."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Sensor(Dataset):
    def __init__(self, n=480):
        g = torch.Generator().manual_seed(11)
        self.x = torch.randn(n, 14, generator=g)
        self.y = self.x.pow(2).sum(1, keepdim=True) / 14
        self.bad = set(range(7, n, 97))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i]
        if i in self.bad:
            x = x.clone()
            x[3] = float("inf")
        return x, self.y[i]


class Guard:
    def __init__(self):
        self.skipped = 0

    def ok(self, loss):
        flag = torch.isfinite(loss.detach()).float().view(1)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        good = bool(flag.item())
        self.skipped += not good
        return good


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = DDP(nn.Sequential(nn.Linear(14, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1)))
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    ds = Sensor()
    smp = DistributedSampler(ds)
    dl = DataLoader(ds, 16, sampler=smp)
    guard = Guard()
    for ep in range(4):
        smp.set_epoch(ep)
        tot = torch.zeros(2)
        for x, y in dl:
            loss = F.mse_loss(net(x), y)
            if not guard.ok(loss):
                continue
            opt.zero_grad()
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(tot)
        if rank == 0:
            print(f"epoch {ep} mse {tot[0] / tot[1]:.4f} skipped so far {guard.skipped}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
