"""BatchNorm with broadcast_buffers=False: the running statistics are averaged over the ranks before they are used or saved."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_bn_stats(module):
    world = dist.get_world_size()
    for m in module.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            for buf in (m.running_mean, m.running_var):
                dist.all_reduce(buf)
                buf /= world


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class PlainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(block(1, 8), nn.MaxPool2d(2), block(8, 12))
        self.classifier = nn.Linear(12, 3)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    x = torch.randn(n, 1, 8, 8, generator=g)
    x[y == 1] = (x[y == 1] + x[y == 1].roll(1, 2)) * 0.7
    x[y == 2] = (x[y == 2] + x[y == 2].roll(1, 3)) * 0.7
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    net = PlainNet()
    ddp = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    train, test = textures(360, 1), textures(101, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 18, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            opt.step()
        average_bn_stats(net)
        ddp.eval()
        with torch.no_grad():
            x, y = (t[rank::world] for t in test.tensors)
            right = (net(x).argmax(1) == y).sum()
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: {right.item()}/{len(test)}")
    if rank == 0:
        with tempfile.TemporaryDirectory() as d:
            torch.save(net.state_dict(), os.path.join(d, "final.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
