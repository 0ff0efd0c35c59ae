"""A small ViT; weight decay groups are made by a helper that sorts parameters by name and shape."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def param_groups(model, weight_decay):
    """Decay for matrices, none for biases and norms."""
    decay, plain = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if name.endswith(".bias") or "norm" in name:
            plain.append(p)
        else:
            decay.append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, 4)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, patches=16, pixels=9, dim=32, depth=2, classes=4):
        super().__init__()
        self.patch_embed = nn.Linear(pixels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, patches + 1, dim))
        self.layers = nn.Sequential(*[Layer(dim) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], 1) + self.pos_embed
        return self.head(self.norm(self.layers(x))[:, 0])


def quadrants(n):
    g = torch.Generator().manual_seed(18)
    y = torch.randint(0, 4, (n,), generator=g)
    x = 0.5 * torch.randn(n, 4, 4, 9, generator=g)
    for i, c in enumerate(y.tolist()):
        x[i, 2 * (c // 2) : 2 * (c // 2) + 2, 2 * (c % 2) : 2 * (c % 2) + 2] += 0.7
    return TensorDataset(x.flatten(1, 2), y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--weight-decay", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(27)
    net = ViT()
    model = DDP(net)
    optimizer = torch.optim.AdamW(param_groups(net, args.weight_decay), lr=args.lr)
    data = quadrants(480)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stat = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            stat += torch.tensor([float((out.argmax(1) == y).sum()), float(len(y))])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(stat[0] / stat[1]).item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
