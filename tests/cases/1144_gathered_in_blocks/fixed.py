"""Image-text style contrastive training and a retrieval score."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        latent = torch.randn(n, 8, generator=g)
        mix = torch.Generator().manual_seed(0)
        self.image = latent @ torch.randn(8, 40, generator=mix) + 0.3 * torch.randn(n, 40, generator=g)
        self.text = latent @ torch.randn(8, 24, generator=mix) + 0.3 * torch.randn(n, 24, generator=g)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.text[i]


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 16))
        self.text = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 16))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        return a, b, self.scale.exp()


@torch.no_grad()
def retrieval_at_1(net, data):
    world = dist.get_world_size()
    net.eval()
    mine = []
    sampler = DistributedSampler(data, shuffle=False)
    for image, _ in DataLoader(data, batch_size=20, sampler=sampler):
        mine.append(F.normalize(net.image(image), dim=1))
    mine = torch.cat(mine)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    images = torch.stack(parts, dim=1).flatten(0, 1)
    texts = F.normalize(net.text(data.text), dim=1)
    best = (images @ texts.t()).argmax(1)
    net.train()
    return (best == torch.arange(len(data))).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = TwoTowers()
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    train, test = Pairs(384, 1), Pairs(80, 2)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, batch_size=24, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, text in loader:
            a, b, scale = model(image, text)
            logits = scale * a @ b.t()
            target = torch.arange(len(a))
            loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
        score = retrieval_at_1(net, test)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, R@1 {score:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
