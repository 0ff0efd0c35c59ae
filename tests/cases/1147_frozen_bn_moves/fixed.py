"""Feature extractor with BatchNorm is kept fixed, a new head is trained."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
    )


class Model(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = backbone()
        self.head = nn.Linear(48, classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def freeze_backbone(self):
        for p in self.backbone.parameters():
            p.requires_grad = False
        self.backbone.eval()


def patterns(n, classes, seed, gain, shift):
    proto = torch.randn(classes, 1, 9, 9, generator=torch.Generator().manual_seed(classes))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(gain * (proto[y] + 0.7 * torch.randn(n, 1, 9, 9, generator=g)) + shift, y)


def stage(net, data, epochs, lr, frozen):
    model = DDP(net)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        if frozen:
            net.backbone.eval()
        seen = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(seen)
        if dist.get_rank() == 0:
            print(f"{'head only' if frozen else 'full'} {epoch}: accuracy {(seen[0] / seen[1]).item():.3f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pre-epochs", type=int, default=3)
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = Model(6)
    stage(source, patterns(256, 6, 1, 1.0, 0.0), args.pre_epochs, 0.05, frozen=False)
    net = Model(3)
    net.backbone.load_state_dict(source.backbone.state_dict())
    net.freeze_backbone()
    stage(net, patterns(256, 3, 2, 0.8, 0.3), args.epochs, 0.05, frozen=True)
    if int(os.environ["RANK"]) == 0:
        torch.save(net.state_dict(), "target.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
