"""After each epoch BatchNorm statistics are estimated anew ("precise BN"): train mode under no_grad, then averaged over the ranks."""
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    protos = torch.randn(5, 1, 10, 10, generator=torch.Generator().manual_seed(0))
    y = torch.randint(5, (n,), generator=g)
    return TensorDataset(protos[y] * 1.2 + torch.randn(n, 1, 10, 10, generator=g), y)


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


@torch.no_grad()
def precise_bn(model, loader, batches=6):
    bns = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    keep = [m.momentum for m in bns]
    for m in bns:
        m.reset_running_stats()
        m.momentum = None                           # cumulative average
    model.train()
    for i, (x, _) in enumerate(loader):
        if i == batches:
            break
        model(x)
    for m, mom in zip(bns, keep):
        m.momentum = mom
        for buf in (m.running_mean, m.running_var):
            dist.all_reduce(buf)
            buf /= dist.get_world_size()


def evaluate(model, ds):
    r, w = dist.get_rank(), dist.get_world_size()
    model.eval()
    x, y = (t[r::w] for t in ds.tensors)
    with torch.no_grad():
        out = model(x)
        s = torch.stack([F.cross_entropy(out, y, reduction="sum"), (out.argmax(1) == y).sum().float(), torch.tensor(float(len(y)))])
    dist.all_reduce(s)
    return (s[0] / s[2]).item(), (s[1] / s[2]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = DDP(nn.Sequential(block(1, 12), nn.MaxPool2d(2), block(12, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)))
    opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    train, test = make(320, 1), make(101, 2)
    smp = DistributedSampler(train)
    dl = DataLoader(train, 16, sampler=smp, drop_last=True)
    for ep in range(3):
        smp.set_epoch(ep)
        net.train()
        for x, y in dl:
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        precise_bn(net.module, dl)
        loss, acc = evaluate(net.module, test)
        if dist.get_rank() == 0:
            print(f"epoch {ep}: test loss {loss:.3f} acc {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
