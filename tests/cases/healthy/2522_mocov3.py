import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

parser = argparse.ArgumentParser("moco-v3 in small")
parser.add_argument("--epochs", default=6, type=int)
parser.add_argument("--warmup-epochs", default=1, type=int)
parser.add_argument("-b", "--batch-size", default=128, type=int, help="over all processes")
parser.add_argument("--lr", default=0.02, type=float)
parser.add_argument("--moco-m", default=0.98, type=float)
parser.add_argument("--moco-m-cos", action="store_true", default=True)
parser.add_argument("--moco-t", default=0.3, type=float)
parser.add_argument("--seed", default=11, type=int)


class TwoCrops(Dataset):
    """Eight classes of noisy 1-channel patterns; two random views of each sample."""

    def __init__(self, n=1024, seed=0):
        g = torch.Generator().manual_seed(seed)
        protos = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(99))
        self.y = torch.randint(8, (n,), generator=g)
        self.x = protos[self.y] + 0.4 * torch.randn(n, 1, 12, 12, generator=g)

    def __len__(self):
        return len(self.x)

    def view(self, img):
        s = int(torch.randint(0, 3, ()))
        img = torch.roll(img, s - 1, dims=2) * (0.8 + 0.4 * torch.rand(()))
        return img + 0.2 * torch.randn_like(img)

    def __getitem__(self, i):
        return self.view(self.x[i]), self.view(self.x[i]), self.y[i]


def mlp(sizes, last_bn=True):
    layers = []
    for k, (a, b) in enumerate(zip(sizes[:-1], sizes[1:])):
        layers.append(nn.Linear(a, b, bias=False))
        if k < len(sizes) - 2:
            layers += [nn.BatchNorm1d(b), nn.ReLU(inplace=True)]
        elif last_bn:
            layers.append(nn.BatchNorm1d(b, affine=False))
    return nn.Sequential(*layers)


def conv_net():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(2), nn.Flatten())


@torch.no_grad()
def concat_all_gather(t):
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t.contiguous())
    return torch.cat(out)


class MoCo(nn.Module):
    def __init__(self, T):
        super().__init__()
        self.T = T
        self.base_encoder = nn.Sequential(conv_net(), mlp([128, 64, 32]))
        self.momentum_encoder = copy.deepcopy(self.base_encoder)
        for p in self.momentum_encoder.parameters():
            p.requires_grad = False
        self.predictor = mlp([32, 64, 32])

    @torch.no_grad()
    def _update_momentum_encoder(self, m):
        for pb, pm in zip(self.base_encoder.parameters(), self.momentum_encoder.parameters()):
            pm.data = pm.data * m + pb.data * (1.0 - m)

    def contrastive_loss(self, q, k):
        q, k = F.normalize(q, dim=1), F.normalize(k, dim=1)
        k = concat_all_gather(k)
        logits = q @ k.t() / self.T
        n = logits.shape[0]
        labels = torch.arange(n, dtype=torch.long) + n * dist.get_rank()
        return F.cross_entropy(logits, labels) * (2 * self.T)

    def forward(self, x1, x2, m):
        q1 = self.predictor(self.base_encoder(x1))
        q2 = self.predictor(self.base_encoder(x2))
        with torch.no_grad():
            self._update_momentum_encoder(m)
            k1 = self.momentum_encoder(x1)
            k2 = self.momentum_encoder(x2)
        return self.contrastive_loss(q1, k2) + self.contrastive_loss(q2, k1)


def adjust_lr(opt, e, args):
    if e < args.warmup_epochs:
        lr = args.lr * e / args.warmup_epochs
    else:
        lr = args.lr * 0.5 * (1 + math.cos(math.pi * (e - args.warmup_epochs) / (args.epochs - args.warmup_epochs)))
    for g in opt.param_groups:
        g["lr"] = lr
    return lr


@torch.no_grad()
def knn_accuracy(encoder, bank, query):
    encoder.eval()
    fb = F.normalize(encoder[0](bank.x), dim=1)
    fq = F.normalize(encoder[0](query.x), dim=1)
    pred = bank.y[(fq @ fb.t()).topk(1).indices[:, 0]]
    encoder.train()
    return (pred == query.y).float().mean().item()


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    model = DistributedDataParallel(MoCo(args.moco_t))
    opt = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), args.lr * args.batch_size / 64,
                          momentum=0.9, weight_decay=1e-5)
    ds = TwoCrops()
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=args.batch_size // world, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for i, (x1, x2, _) in enumerate(loader):
            e = epoch + i / len(loader)
            adjust_lr(opt, e, args)
            m = 1.0 - 0.5 * (1.0 + math.cos(math.pi * e / args.epochs)) * (1.0 - args.moco_m) if args.moco_m_cos else args.moco_m
            loss = model(x1, x2, m)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            acc = knn_accuracy(model.module.base_encoder, TwoCrops(256, 1), TwoCrops(256, 2))
            print(f"epoch {epoch} loss {total[0] / total[1]:.4f} knn {acc:.3f}")
            os.makedirs("moco", exist_ok=True)
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": opt.state_dict()},
                       "moco/checkpoint.pth.tar")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
