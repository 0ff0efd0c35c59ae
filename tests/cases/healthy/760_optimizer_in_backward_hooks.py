"""Memory saver: every parameter has its own optimizer, stepped in a post-accumulate hook as soon as its gradient is there (and averaged)."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def install(model, make_opt):
    opts = {}
    world = dist.get_world_size()

    def hook(p):
        dist.all_reduce(p.grad)
        p.grad.div_(world)
        opts[p].step()
        opts[p].zero_grad()

    for p in model.parameters():
        opts[p] = make_opt([p])
        p.register_post_accumulate_grad_hook(hook)
    return opts


class Mixer(nn.Module):
    def __init__(self, tokens=9, d=24, classes=5):
        super().__init__()
        self.inp = nn.Linear(4, d)
        self.tok = nn.Sequential(nn.Linear(tokens, 16), nn.GELU(), nn.Linear(16, tokens))
        self.ch = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 48), nn.GELU(), nn.Linear(48, d))
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        h = self.inp(x)
        h = h + self.tok(h.transpose(1, 2)).transpose(1, 2)
        h = h + self.ch(h)
        return self.head(h.mean(1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Mixer()
    opts = install(net, lambda ps: torch.optim.Adam(ps, lr=2e-3))
    g = torch.Generator().manual_seed(2)
    y = torch.randint(0, 5, (480,), generator=g)
    x = torch.randn(5, 9, 4, generator=g)[y] + 0.8 * torch.randn(480, 9, 4, generator=g)
    ds = TensorDataset(x, y)
    smp = DistributedSampler(ds)
    dl = DataLoader(ds, 24, sampler=smp)
    for ep in range(5):
        smp.set_epoch(ep)
        s = torch.zeros(2)
        for xb, yb in dl:
            loss = F.cross_entropy(net(xb), yb)
            loss.backward()                     # steps happen in here
            s += torch.tensor([loss.item(), 1.0])
        for o in opts.values():
            for grp in o.param_groups:
                grp["lr"] *= 0.85
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {ep} loss {(s[0] / s[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
