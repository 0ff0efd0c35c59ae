"""Image classifier with a nearest-centroid probe on backbone features after each epoch."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

N_CLASSES = 6


def shapes(n, seed):
    proto = torch.randn(N_CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(99))
    proto = F.avg_pool2d(proto, 3, 1, 1) * 2
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, N_CLASSES, (n,), generator=g)
    x = proto[y] + 4.0 * torch.randn(n, 3, 16, 16, generator=g)
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, ch, 3, padding=1), nn.GroupNorm(8, ch), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(ch, ch, 3, padding=1), nn.GroupNorm(8, ch), nn.ReLU())
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * ch, N_CLASSES))

    def forward(self, x):
        return self.classifier(self.backbone(x))


class FeatureTap:
    """Collects what a layer puts out."""

    def __init__(self, layer):
        self.outputs = []
        self.handle = layer.register_forward_hook(self._hook)

    def _hook(self, module, inputs, output):
        self.outputs.append(output)

    def take(self):
        feats, self.outputs = [o.flatten(1) for o in self.outputs], []
        return torch.cat(feats)

    def close(self):
        self.handle.remove()
        self.outputs.clear()


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        train, val = shapes(1920, 1), shapes(384, 2)
        self.sampler = DistributedSampler(train, seed=args.seed)
        self.loader = DataLoader(train, args.batch, sampler=self.sampler, drop_last=True)
        self.probe_bank = self.share(shapes(512, 3))
        self.val = self.share(val)
        self.model = DDP(Net())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, args.epochs)

    def share(self, data):
        return [t[self.rank::self.world] for t in data.tensors]

    @torch.no_grad()
    def probe(self):
        self.model.eval()
        net = self.model.module
        tap = FeatureTap(net.backbone)
        (bx, by), (vx, vy) = self.probe_bank, self.val
        for chunk in bx.split(64):
            net(chunk)
        bank = tap.take()
        logits = torch.cat([net(chunk) for chunk in vx.split(64)])
        feats = tap.take()
        tap.close()
        onehot = F.one_hot(by, N_CLASSES).float()
        sums, counts = onehot.t() @ bank, onehot.sum(0)
        dist.all_reduce(sums)
        dist.all_reduce(counts)
        centroids = sums / counts[:, None].clamp(min=1)
        near = torch.cdist(feats, centroids).argmin(1)
        c = torch.tensor([(near == vy).sum().item(), (logits.argmax(1) == vy).sum().item(), len(vy)],
                         dtype=torch.float64)
        dist.all_reduce(c)
        self.model.train()
        return (c[0] / c[2]).item(), (c[1] / c[2]).item()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            tot = torch.zeros(2)
            for x, y in self.loader:
                loss = F.cross_entropy(self.model(x), y, label_smoothing=0.05)
                self.opt.zero_grad(set_to_none=True)
                loss.backward()
                self.opt.step()
                tot += torch.tensor([loss.item(), 1.0])
            self.sched.step()
            dist.all_reduce(tot)
            centroid_acc, acc = self.probe()
            if self.rank == 0:
                print(f"epoch {epoch} loss {tot[0] / tot[1]:.4f} acc {acc:.3f} centroid-acc {centroid_acc:.3f}",
                      flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--seed", type=int, default=8)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    Trainer(args).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
