"""Two-tower contrastive training (pictures and captions) with negatives from all processes."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Towers(nn.Module):
    def __init__(self, picture_dim=30, caption_dim=18, dim=16):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(picture_dim, 48), nn.GELU(), nn.Linear(48, dim))
        self.caption = nn.Sequential(nn.Linear(caption_dim, 48), nn.GELU(), nn.Linear(48, dim))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, picture, caption):
        p = F.normalize(self.picture(picture), dim=1)
        c = F.normalize(self.caption(caption), dim=1)
        return p, c, self.log_scale.exp()


def pairs(n):
    g = torch.Generator().manual_seed(15)
    topic = torch.randn(n, 6, generator=g)
    to_picture, to_caption = torch.randn(6, 30, generator=g), torch.randn(6, 18, generator=g)
    picture = topic @ to_picture + 0.3 * torch.randn(n, 30, generator=g)
    caption = topic @ to_caption + 0.3 * torch.randn(n, 18, generator=g)
    return TensorDataset(picture, caption)


def gather(z):
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z)
    return torch.cat(parts)


def clip_loss(p, c, scale):
    all_p, all_c = gather(p), gather(c)
    truth = torch.arange(len(p)) + dist.get_rank() * len(p)
    return 0.5 * (F.cross_entropy(scale * p @ all_c.t(), truth) + F.cross_entropy(scale * c @ all_p.t(), truth))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=24)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)

    model = DDP(Towers())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = pairs(384)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = torch.zeros(1)
        for picture, caption in loader:
            p, c, scale = model(picture, caption)
            loss = clip_loss(p, c, scale)
            opt.zero_grad()
            loss.backward()
            opt.step()
            mean += loss.detach() / len(loader)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: contrastive loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
