"""Detector training with a launcher-agnostic set-up."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

cfg = dict(total_epochs=3, samples_per_gpu=10, lr=0.02, dist_params=dict(backend=None))


def init_dist(backend=None, **kwargs):
    rank = int(os.environ["RANK"])
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        torch.cuda.set_device(rank % num_gpus)
    dist.init_process_group(backend=backend or ("nccl" if num_gpus >= int(os.environ["WORLD_SIZE"]) else "gloo"), **kwargs)


def get_device():
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class Neck(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.box = nn.Linear(8 * 6 * 6, 4)

    def forward(self, img):
        return self.box(self.stem(img).flatten(1))


def coco_like(n=160):
    g = torch.Generator().manual_seed(368)
    xy = torch.randint(0, 8, (n, 2), generator=g)
    img = 0.1 * torch.randn(n, 1, 12, 12, generator=g)
    for i, (x, y) in enumerate(xy.tolist()):
        img[i, 0, y:y + 4, x:x + 4] += 1
    return TensorDataset(img, torch.cat([xy, xy + 4], 1).float() / 12)


def main():
    init_dist(**cfg["dist_params"])
    device = get_device()
    torch.manual_seed(0)
    net = Neck().to(device)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)
    dataset = coco_like()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=cfg["samples_per_gpu"], sampler=sampler)
    for epoch in range(cfg["total_epochs"]):
        sampler.set_epoch(epoch)
        for img, box in loader:
            loss = nn.functional.smooth_l1_loss(model(img.to(device)), box.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"Epoch [{epoch + 1}] loss_bbox: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
