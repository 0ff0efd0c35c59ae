"""Box regression with a pool of hard examples."""
import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIDE = 128


class Rectangles(Dataset):
    """Images are drawn on demand; index i always gives the same picture."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        w, h = (torch.randint(20, 60, (2,), generator=g)).tolist()
        left = int(torch.randint(0, SIDE - w, (1,), generator=g))
        top = int(torch.randint(0, SIDE - h, (1,), generator=g))
        image = 0.3 * torch.randn(3, SIDE, SIDE, generator=g)
        image[:, top:top + h, left:left + w] += 1.0
        return image, torch.tensor([left + w / 2, top + h / 2, w, h]) / SIDE


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 8, stride=8), nn.ReLU(),
            nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.box = nn.Sequential(nn.Linear(24 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x):
        return self.box(self.features(x)).sigmoid()


class HardPool:
    """Keeps the worst example of every batch, worst first."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.items = []

    def offer(self, images, boxes, losses):
        worst = int(losses.argmax())
        self.items.append((losses[worst].item(), images[worst].clone(), boxes[worst].clone()))
        self.items.sort(key=lambda item: -item[0])
        del self.items[self.capacity:]

    def draw(self, k):
        top = self.items[:k]
        return torch.stack([im for _, im, _ in top]), torch.stack([b for _, _, b in top])


def update(model, opt, images, boxes):
    losses = F.smooth_l1_loss(model(images), boxes, beta=0.05, reduction="none").mean(dim=1)
    opt.zero_grad()
    losses.mean().backward()
    opt.step()
    return losses.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--images", type=int, default=1024)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--replay-every", type=int, default=16)
    ap.add_argument("--pool", type=int, default=112)
    ap.add_argument("--lr", type=float, default=0.08)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(relativeCreated)6d %(message)s")
    torch.manual_seed(3)

    data = Rectangles(args.images)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(BoxNet())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    pool = HardPool(args.pool)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(1)
        for images, boxes in loader:
            losses = update(model, opt, images, boxes)
            pool.offer(images, boxes, losses)
            running += losses.mean()
            step += 1
            if step % args.replay_every == 0:
                update(model, opt, *pool.draw(args.batch))
        dist.all_reduce(running)
        logging.info("epoch %d loss %.4f pool %d", epoch,
                     running.item() / len(loader) / dist.get_world_size(), len(pool.items))
    if rank == 0:
        torch.save(model.module.state_dict(), "boxnet.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
