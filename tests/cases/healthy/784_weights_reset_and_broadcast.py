"""The init scheme is applied after wrapping (with per-rank RNG), but then every parameter is broadcast by hand; dead units are re-initialised the same way."""
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def init_(m):
    if isinstance(m, nn.Linear):
        nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
        nn.init.zeros_(m.bias)


def sync(model, src=0):
    for t in list(model.parameters()) + list(model.buffers()):
        dist.broadcast(t.data, src)


@torch.no_grad()
def revive(layer, nxt, activity, opt):
    """activity: fraction of samples that a unit fired for, averaged over ranks -> the same decision everywhere"""
    dead = activity < 0.01
    if dead.any():
        fresh = torch.empty_like(layer.weight)
        nn.init.kaiming_normal_(fresh)
        dist.broadcast(fresh, 0)
        layer.weight[dead] = fresh[dead]
        layer.bias[dead] = 0
        nxt.weight[:, dead] = 0
        for p in (layer.weight, layer.bias):
            st = opt.state.get(p, {})
            for k in ("exp_avg", "exp_avg_sq"):
                if k in st:
                    st[k][dead] = 0
    return int(dead.sum())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    net = DDP(nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 6)))
    net.apply(init_)
    net.module[0].bias.data[:20] = -30.0            # some units are dead from the start
    sync(net.module)
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    g = torch.Generator().manual_seed(rank)
    W = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    fired = torch.zeros(96)
    for it in range(1, 81):
        x = torch.randn(48, 16, generator=g)
        y = (x @ W).argmax(1)
        h = net.module[1](net.module[0](x.detach())).detach()
        fired += (h > 0).float().mean(0)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        if it % 20 == 0:
            dist.all_reduce(fired)
            n = revive(net.module[0], net.module[2], fired / world / 20, opt)
            fired.zero_()
            if rank == 0:
                print(f"step {it}: loss {loss.item():.3f} (rank 0), revived {n}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
