"""Fine-tuning with frozen BatchNorm: the BN layers stay in eval mode during training on purpose (small batches), the rest trains."""
import os
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

BS, EPOCHS = 4, 3


def conv(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class Backbone(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.stem = conv(3, 12)
        self.stages = nn.Sequential(conv(12, 24, 2), conv(24, 24, 2))
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))

    def train(self, mode=True):
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        return self


def get_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    proto = torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(7))
    return TensorDataset(proto[y] + torch.randn(n, 3, 12, 12, generator=g), y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    net = Backbone()
    # "pretrained" statistics
    with torch.no_grad():
        g = torch.Generator().manual_seed(3)
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(0, 0.1, generator=g)
                m.running_var.uniform_(0.5, 1.5, generator=g)
                m.weight.requires_grad_(False)
                m.bias.requires_grad_(False)
    net = DDP(net)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.03, momentum=0.9)
    train, val = get_data(192, 0), get_data(96, 1)
    sampler = DistributedSampler(train, seed=5)
    dl = DataLoader(train, BS, sampler=sampler, drop_last=True)
    vdl = DataLoader(val, 32, sampler=DistributedSampler(val, shuffle=False))
    for ep in range(EPOCHS):
        sampler.set_epoch(ep)
        net.train()
        tot = torch.zeros(2)
        for x, y in dl:
            opt.zero_grad(set_to_none=True)
            l = F.cross_entropy(net(x), y)
            l.backward()
            opt.step()
            tot += torch.tensor([l.item() * len(y), len(y)])
        net.eval()
        hit = torch.zeros(2)
        with torch.no_grad():
            for x, y in vdl:
                hit += torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)], dtype=torch.float)
        dist.all_reduce(tot); dist.all_reduce(hit)
        if rank == 0:
            print(f"ep {ep} train {tot[0]/tot[1]:.3f} val acc {hit[0]/hit[1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
