"""One-shot NAS supernet: each step draws one path, the same on every rank (common generator); most weights get no gradient in a step."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Choice(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ops = nn.ModuleList([
            nn.Sequential(nn.Linear(d, d), nn.ReLU()),
            nn.Sequential(nn.Linear(d, d // 2), nn.ReLU(), nn.Linear(d // 2, d)),
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.Tanh())])

    def forward(self, x, k):
        return x + self.ops[k](x)


class Supernet(nn.Module):
    def __init__(self, d=32, depth=3):
        super().__init__()
        self.stem = nn.Linear(10, d)
        self.cells = nn.ModuleList(Choice(d) for _ in range(depth))
        self.head = nn.Linear(d, 4)

    def forward(self, x, path):
        h = self.stem(x)
        for cell, k in zip(self.cells, path):
            h = cell(h, k)
        return self.head(h)


def data(rank):
    w = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(200 + rank)
    while True:
        x = torch.randn(64, 10, generator=g)
        yield x, (x @ w + 0.3 * torch.randn(64, 4, generator=g)).argmax(1)


def search(net, rank, world, paths):
    """rate all paths on a common validation batch, each rank a stripe"""
    net.eval()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 10, generator=g)
    y = (x @ torch.randn(10, 4, generator=torch.Generator().manual_seed(1))).argmax(1)
    score = torch.zeros(len(paths))
    with torch.no_grad():
        for i in range(rank, len(paths), world):
            score[i] = (net(x, paths[i]).argmax(1) == y).float().mean()
    dist.all_reduce(score)
    return score


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(Supernet(), find_unused_parameters=True)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    pick = torch.Generator().manual_seed(77)
    stream = data(rank)
    for it in range(90):
        x, y = next(stream)
        path = torch.randint(0, 3, (3,), generator=pick).tolist()
        loss = F.cross_entropy(net(x, path), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        if it % 30 == 29:
            l = loss.detach().clone()
            dist.all_reduce(l)
            if rank == 0:
                print(f"iter {it + 1} path {path} loss {l.item() / world:.3f}")
    paths = [[a, b, c] for a in range(3) for b in range(3) for c in range(3)]
    s = search(net.module, rank, world, paths)
    if rank == 0:
        print("best path", paths[int(s.argmax())], f"acc {s.max().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
