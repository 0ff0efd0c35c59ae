"""Curriculum: the dataset itself is re-ordered and grows each epoch; the DistributedSampler does not shuffle, because the dataset does."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Curriculum(Dataset):
    def __init__(self, n=400):
        g = torch.Generator().manual_seed(0)
        self.len = torch.randint(2, 16, (n,), generator=g)
        self.bits = torch.randint(0, 2, (n, 16), generator=g).float()
        self.bits *= (torch.arange(16)[None] < self.len[:, None])
        self.target = (self.bits.sum(1) >= self.len / 2).long()
        self.order = torch.arange(n)

    def stage(self, epoch, total):
        """the same on all ranks: easiest share, in an order that depends on the epoch only"""
        share = int(len(self.len) * min(1.0, 0.4 + 0.6 * epoch / (total - 2)))
        easy = self.len.argsort(stable=True)[:share]
        self.order = easy[torch.randperm(share, generator=torch.Generator().manual_seed(50 + epoch))]

    def __len__(self):
        return len(self.order)

    def __getitem__(self, i):
        j = self.order[i]
        return torch.cat([self.bits[j], (torch.arange(16) < self.len[j]).float()]), self.target[j]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)))
    opt = torch.optim.Adam(net.parameters(), 5e-3)
    ds = Curriculum()
    E = 6
    for ep in range(E):
        ds.stage(ep, E)
        dl = DataLoader(ds, 10, sampler=DistributedSampler(ds, shuffle=False, drop_last=True), drop_last=True)
        t = torch.zeros(2)
        for x, y in dl:
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
            t += torch.tensor([loss.item(), 1])
        dist.all_reduce(t)
        if rank == 0:
            print(f"epoch {ep} samples {len(ds)} loss {t[0] / t[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
