"""DeepCluster-like: every epoch distributed k-means assigns pseudo labels, the classifier head is made anew (and with it the DDP wrapper and the optimizer)."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

K, N = 6, 300


class Labelled(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.2 * torch.randn(self.x.shape[1]), self.y[i]


@torch.no_grad()
def features(enc, x):
    rank, world = dist.get_rank(), dist.get_world_size()
    enc.eval()
    z = F.normalize(enc(x[rank::world]), dim=1)
    enc.train()
    return z


@torch.no_grad()
def kmeans(z, iters=8, seed=0):
    """z: my stripe; centroids are the same on all ranks"""
    start = z[:K].clone()
    dist.broadcast(start, 0)
    cent = start
    for _ in range(iters):
        a = torch.cdist(z, cent).argmin(1)
        s = torch.zeros(K, z.shape[1]).index_add_(0, a, z)
        n = torch.zeros(K).index_add_(0, a, torch.ones(len(a)))
        dist.all_reduce(s); dist.all_reduce(n)
        cent = torch.where(n[:, None] > 0, s / n.clamp_min(1)[:, None], cent)
    full = torch.zeros(N, dtype=torch.long)
    full[dist.get_rank()::dist.get_world_size()] = torch.cdist(z, cent).argmin(1)
    dist.all_reduce(full)
    return full, n


class Head(nn.Module):
    def __init__(self, enc):
        super().__init__()
        self.enc, self.fc = enc, nn.Linear(16, K)

    def forward(self, x):
        return self.fc(self.enc(x))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2 + rank)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(K, 24, generator=g)[torch.randint(K, (N,), generator=g)] * 1.5 + torch.randn(N, 24, generator=g)
    enc = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))
    for p in enc.parameters():
        dist.broadcast(p.data, 0)
    for ep in range(4):
        labels, sizes = kmeans(features(enc, x))
        net = DDP(Head(enc))
        opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        ds = Labelled(x, labels)
        smp = DistributedSampler(ds, seed=ep)
        for b, t in DataLoader(ds, 15, sampler=smp):
            loss = F.cross_entropy(net(b), t)
            opt.zero_grad(); loss.backward(); opt.step()
        if rank == 0:
            print(f"epoch {ep} clusters {sizes.int().tolist()} last loss {loss.item():.3f}")
        del net
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
