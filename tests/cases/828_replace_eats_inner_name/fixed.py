"""Two-tower matching model: pre-train, then fine-tune with a margin loss."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def pairs(n=256):
    g = torch.Generator().manual_seed(40)
    topic = torch.randn(n, 4, generator=g)
    image = topic @ torch.randn(4, 20, generator=g)
    text = topic @ torch.randn(4, 12, generator=g)
    return TensorDataset(image + 0.1 * torch.randn(n, 20, generator=g), text)


class TwoTower(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.image_module = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, dim))
        self.text_module = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, dim))
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, image, text):
        a, b = F.normalize(self.image_module(image), dim=1), F.normalize(self.text_module(text), dim=1)
        return self.scale * a @ b.t()


def train(model, data, epochs, margin, rank):
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for image, text in loader:
            logits = model(image, text) - margin * torch.eye(len(image))
            loss = F.cross_entropy(logits, torch.arange(len(image)))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"margin {margin} epoch {epoch}: loss {loss.item():.4f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", default="towers.pt")
    ap.add_argument("--margin", type=float, default=0.2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    data = pairs()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoTower())
    train(model, data, 3, 0.0, rank)
    if rank == 0:
        torch.save(model.state_dict(), args.ckpt)
    dist.barrier()

    torch.manual_seed(1)
    net = TwoTower()
    state = torch.load(args.ckpt, map_location="cpu")
    net.load_state_dict({k.replace("module.", "", 1): v for k, v in state.items()})
    train(DistributedDataParallel(net), data, 2, args.margin, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
