"""Feature matching between a student and a fixed random projection network."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Textures(Dataset):
    def __init__(self, n=512, size=20):
        g = torch.Generator().manual_seed(33)
        self.freq = 0.3 + torch.rand(n, 2, generator=g) * 1.5
        self.shift = 6.28 * torch.rand(n, generator=g)
        self.yy, self.xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")

    def __len__(self):
        return len(self.freq)

    def __getitem__(self, i):
        fy, fx = self.freq[i]
        return torch.sin(fy * self.yy + fx * self.xx + self.shift[i]).unsqueeze(0)


def conv_net(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1)
    )


def matching_step(student, target_net, images, opt):
    captured = []
    handle = student.module[2].register_forward_hook(lambda module, inputs, output: captured.append(output))
    with torch.no_grad():
        middle = target_net[2](target_net[1](target_net[0](images)))
        final = target_net[4](target_net[3](middle))
    out = student(images)
    loss = F.mse_loss(out, final) + 0.5 * F.mse_loss(captured[-1], middle)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch-size", type=int, default=32)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])

    torch.manual_seed(12)
    target_net = conv_net(24).requires_grad_(False)
    student = DistributedDataParallel(conv_net(8))
    opt = torch.optim.Adam(student.parameters(), lr=3e-3)
    data = Textures()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for images in loader:
            total += matching_step(student, target_net, images, opt)
        mean = torch.tensor(total / len(loader))
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: matching loss {mean.item() / dist.get_world_size():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
