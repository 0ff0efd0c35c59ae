"""Box regression on generated scenes. A guard takes the model back to its last good state when the loss jumps."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Scenes(Dataset):
    """One bright rectangle a picture; a few annotations are in pixels instead of fractions, as in the real export."""

    def __init__(self, count=720, size=24):
        gen = torch.Generator().manual_seed(17)
        self.size = size
        corner = torch.rand(count, 2, generator=gen) * 0.5
        extent = 0.2 + torch.rand(count, 2, generator=gen) * 0.3
        self.boxes = torch.cat([corner, corner + extent], 1)
        self.noise = torch.randn(count, size, size, generator=gen) * 0.3
        self.in_pixels = torch.rand(count, generator=gen) < 0.006

    def __len__(self):
        return len(self.boxes)

    def __getitem__(self, i):
        x0, y0, x1, y1 = (self.boxes[i] * self.size).round().long().tolist()
        image = self.noise[i].clone()
        image[y0:y1, x0:x1] += 1.0
        target = self.boxes[i] * (self.size if self.in_pixels[i] else 1)
        return image[None], target


class BoxNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(32 * 36, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, image):
        return self.head(self.features(image).flatten(1))


class SpikeGuard:
    """Keeps a copy of model and optimizer; brings it back when the loss is far above its running mean."""

    def __init__(self, model, optimizer, factor=4.0, refresh=5, decay=0.9):
        self.model, self.optimizer = model, optimizer
        self.factor, self.refresh, self.decay = factor, refresh, decay
        self.mean, self.good, self.rollbacks = None, 0, 0
        self.keep()

    def keep(self):
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def check(self, loss):
        """Call after the step. True: the step was taken back."""
        level = global_mean(loss).item()
        if self.mean is not None and level > self.factor * self.mean:
            weights, moments = copy.deepcopy(self.saved)
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(moments)
            self.rollbacks += 1
            return True
        self.mean = level if self.mean is None else self.decay * self.mean + (1 - self.decay) * level
        self.good += 1
        if self.good % self.refresh == 0:
            self.keep()
        return False


def global_mean(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(2)
    scenes = Scenes()
    sampler = DistributedSampler(scenes, shuffle=True, seed=4)
    loader = DataLoader(scenes, batch_size=18, sampler=sampler)
    model = DDP(BoxNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    guard = SpikeGuard(model, optimizer)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        kept, total = 0, 0.0
        for images, boxes in loader:
            loss = F.smooth_l1_loss(model(images), boxes, beta=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not guard.check(loss):
                kept += 1
                total += loss.item()
        report = global_mean(torch.tensor(total / max(kept, 1)))
        if rank == 0:
            print(f"epoch {epoch}: loss {report.item():.5f}, taken back so far {guard.rollbacks}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "boxes.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
