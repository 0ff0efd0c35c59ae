"""Deep gradient compression: each rank sends its k largest entries (values+indices by all_gather); the residual stays local and differs by rank."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist


class TopK:
    def __init__(self, params, ratio):
        self.params = [p for p in params if p.requires_grad]
        self.n = sum(p.numel() for p in self.params)
        self.k = max(1, int(ratio * self.n))
        self.residual = torch.zeros(self.n)

    @torch.no_grad()
    def sync(self):
        world = dist.get_world_size()
        acc = self.residual + torch.cat([p.grad.flatten() for p in self.params])
        idx = acc.abs().topk(self.k).indices
        val = acc[idx]
        self.residual = acc
        self.residual[idx] = 0
        idxs = [torch.empty_like(idx) for _ in range(world)]
        vals = [torch.empty_like(val) for _ in range(world)]
        dist.all_gather(idxs, idx)
        dist.all_gather(vals, val)
        dense = torch.zeros(self.n)
        for i, v in zip(idxs, vals):
            dense.index_add_(0, i, v)
        dense /= world
        o = 0
        for p in self.params:
            p.grad = dense[o:o + p.numel()].view_as(p).clone()
            o += p.numel()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(123)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    comp = TopK(model.parameters(), 0.05)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1000 + rank)
    W = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    for it in range(100):
        x = torch.randn(64, 20, generator=g)
        y = (x @ W).argmax(1)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        comp.sync()
        opt.step()
        if it % 25 == 24:
            l = torch.tensor([loss.item()])
            dist.all_reduce(l)
            if rank == 0:
                print(f"it {it + 1} loss {l.item() / world:.4f} residual {comp.residual.norm():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
