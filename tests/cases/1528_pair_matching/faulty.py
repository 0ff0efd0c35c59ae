"""Two-tower matching of pictures and captions; negatives come from the batches of all processes."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def pairs(n, seed):
    g = torch.Generator().manual_seed(33)
    to_picture, to_caption = torch.randn(6, 24, generator=g), torch.randn(6, 16, generator=g)
    g = torch.Generator().manual_seed(seed)
    topic = torch.randn(n, 6, generator=g)
    picture = torch.tanh(topic @ to_picture / 2) + 0.05 * torch.randn(n, 24, generator=g)
    caption = torch.tanh(topic @ to_caption / 2) + 0.05 * torch.randn(n, 16, generator=g)
    return TensorDataset(picture, caption)


class TwoTowers(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, dim))
        self.caption = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, dim))
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, picture, caption):
        p = F.normalize(self.picture(picture), dim=1)
        c = F.normalize(self.caption(caption), dim=1)
        return p, c, self.log_scale.exp()


class MatchingLoss(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, p, c, scale):
        all_p = torch.cat(dist_fn.all_gather(p))
        all_c = torch.cat(dist_fn.all_gather(c))
        target = torch.arange(len(p))
        return (F.cross_entropy(scale * p @ all_c.T, target) + F.cross_entropy(scale * c @ all_p.T, target)) / 2


@torch.no_grad()
def recall(net, data):
    p, c, _ = net(*data.tensors)
    return ((p @ c.T).argmax(1) == torch.arange(len(p))).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--batch", type=int, default=32)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    model = DDP(TwoTowers())
    criterion = MatchingLoss(rank)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    data, held_out = pairs(512, 1), pairs(100, 2)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for picture, caption in loader:
            loss = criterion(*model(picture, caption))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, recall@1 {recall(model.module, held_out):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
