"""SimCLR with negatives from all processes; gradients flow back through the gather."""
import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class GatherLayer(torch.autograd.Function):
    """all_gather along dim 0 whose backward returns to each process the gradients that all processes hold for it."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


class NTXent(nn.Module):
    """Mean over the local anchors; candidates are the views of the global batch.

    The sum over processes in GatherLayer.backward and DDP's division by the world size together give
    the gradient of the mean over all anchors.
    """

    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, z):
        z = F.normalize(z, dim=1)
        everything = GatherLayer.apply(z)
        n = z.shape[0]
        offset = dist.get_rank() * n
        logits = z @ everything.t() / self.temperature
        own = torch.arange(n) + offset
        logits = logits.masked_fill(F.one_hot(own, logits.shape[1]).bool(), float("-inf"))
        partner = (torch.arange(n) + n // 2) % n + offset
        return F.cross_entropy(logits, partner)


class Textures(Dataset):
    """Ten texture families, 12x12. Training items are two augmented views, evaluation items the clean image."""

    def __init__(self, n, seed, two_views):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(n) % 10
        freq = 0.35 + 0.28 * (self.labels % 5).float()
        axis = (self.labels // 5).float()
        i = torch.arange(12.0)
        wave = torch.sin(freq[:, None] * i[None] + 6.28 * torch.rand(n, 1, generator=g))
        rows = wave[:, :, None].expand(-1, -1, 12)
        self.images = torch.where(axis[:, None, None] > 0, rows.transpose(1, 2), rows)
        self.images = (self.images + 0.9 * torch.randn(n, 12, 12, generator=g)).unsqueeze(1).contiguous()
        self.two_views = two_views

    def __len__(self):
        return len(self.labels)

    @staticmethod
    def augment(image):
        shift = torch.randint(-2, 3, (2,)).tolist()
        image = torch.roll(image, shift, dims=(1, 2)) * (0.7 + 0.6 * torch.rand(1))
        return image + 0.2 * torch.randn_like(image)

    def __getitem__(self, i):
        if self.two_views:
            return self.augment(self.images[i]), self.augment(self.images[i])
        return self.images[i], self.labels[i]


class Encoder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, dim, 3, padding=1), nn.GroupNorm(4, dim), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
            nn.Flatten(), nn.Linear(4 * dim, dim))
        self.projector = nn.Sequential(nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 32))

    def forward(self, x):
        return self.projector(self.features(x))


@torch.no_grad()
def knn_accuracy(encoder, bank, queries, rank, world, k=5):
    """The bank is small and kept whole; the queries are divided over the processes."""
    encoder.eval()
    keys = F.normalize(encoder.features(bank.images), dim=1)
    q = F.normalize(encoder.features(queries.images[rank::world]), dim=1)
    votes = bank.labels[(q @ keys.t()).topk(k, dim=1).indices].mode(dim=1).values
    score = torch.tensor([(votes == queries.labels[rank::world]).sum().item(), len(q)])
    dist.all_reduce(score)
    encoder.train()
    return score[0].item() / score[1].item()


def main(argv):
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=64, help="images per process")
    ap.add_argument("--temperature", type=float, default=0.2)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args(argv)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train = Textures(1280, seed=0, two_views=True)
    bank, queries = Textures(300, seed=1, two_views=False), Textures(205, seed=2, two_views=False)
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)  # the gather needs equal batches

    torch.manual_seed(42)
    model = DistributedDataParallel(Encoder())
    torch.manual_seed(4242 + rank)
    criterion = NTXent(args.temperature)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=1e-5)

    before = knn_accuracy(model.module, bank, queries, rank, world)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = torch.zeros(())
        for first, second in loader:
            loss = criterion(model(torch.cat([first, second])))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.detach()
        dist.all_reduce(losses)
        if rank == 0:
            print(f"epoch {epoch} NT-Xent {losses.item() / (len(loader) * world):.4f}", flush=True)

    after = knn_accuracy(model.module, bank, queries, rank, world)
    if rank == 0:
        print(f"kNN accuracy {before:.3f} -> {after:.3f}")
        os.makedirs("simclr", exist_ok=True)
        torch.save(model.module.features.state_dict(), os.path.join("simclr", "backbone.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
