"""Two-tower contrastive training; the negatives come from the batches of all processes."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    mix = torch.Generator().manual_seed(500)
    to_image, to_text = torch.randn(10, 40, generator=mix), torch.randn(10, 30, generator=mix)
    z = torch.randn(n, 10, generator=g)
    image = (z @ to_image).tanh() + 0.3 * torch.randn(n, 40, generator=g)
    text = (z @ to_text).tanh() + 0.3 * torch.randn(n, 30, generator=g)
    return TensorDataset(image, text)


class TwoTower(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(40, 96), nn.GELU(), nn.Linear(96, dim))
        self.text = nn.Sequential(nn.Linear(30, 96), nn.GELU(), nn.Linear(96, dim))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.log_scale.exp()


def gather(features):
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    return torch.cat(parts)


def contrastive_loss(image, text, scale):
    all_image, all_text = gather(image.contiguous()), gather(text.contiguous())
    target = torch.arange(len(image)) + dist.get_rank() * len(image)
    by_image = scale * image @ all_text.t()
    by_text = scale * text @ all_image.t()
    return (F.cross_entropy(by_image, target) + F.cross_entropy(by_text, target)) / 2


@torch.no_grad()
def retrieval(net, data):
    """Every process holds the same few hundred pairs; the work is split by query."""
    net.eval()
    image, text, _ = net(*data.tensors)
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(rank, len(image), world)
    hits = (image[rows] @ text.t()).argmax(1) == rows
    count = torch.tensor([hits.sum().item(), len(rows)])
    dist.all_reduce(count)
    net.train()
    return (count[0] / count[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--seed", type=int, default=19)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, test_set = pairs(768, 1), pairs(200, 2)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(TwoTower())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(1)
        for image, text in loader:
            loss = contrastive_loss(*model(image, text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.detach()
        dist.all_reduce(running)
        top1 = retrieval(model.module, test_set)
        if rank == 0:
            print(f"epoch {epoch}: loss {running.item() / (world * len(loader)):.4f} top-1 {top1:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
