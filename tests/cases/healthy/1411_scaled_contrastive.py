"""Image/text style contrastive training; the loss is multiplied by the number of processes."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Captions(Dataset):
    def __init__(self, n=640):
        g = torch.Generator().manual_seed(3)
        topic = torch.randn(n, 8, generator=g)
        self.image = topic @ torch.randn(8, 32, generator=g) + 0.3 * torch.randn(n, 32, generator=g)
        self.text = topic @ torch.randn(8, 20, generator=g) + 0.3 * torch.randn(n, 20, generator=g)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.text[i]


class TwoTowers(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, dim))
        self.text = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, dim))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.log_scale.exp()


def everyone(mine):
    """Embeddings of all ranks; only the own slice carries gradients."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach())
    parts[dist.get_rank()] = mine
    return torch.cat(parts)


def global_loss(a, b, scale):
    logits = scale * everyone(a) @ everyone(b).t()
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=32)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = TwoTowers()
    model = DDP(net)
    towers = [p for name, p in net.named_parameters() if name != "log_scale"]
    opt = torch.optim.SGD([{"params": towers, "lr": 0.1}, {"params": [net.log_scale], "lr": 0.01}], momentum=0.9)
    data = Captions()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, text in loader:
            a, b, scale = model(image, text)
            loss = global_loss(a, b, scale)
            opt.zero_grad()
            (loss * world).backward()
            net.log_scale.grad.div_(world)  # every rank holds the whole gradient of the scale
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, scale {scale.item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
