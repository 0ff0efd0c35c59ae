"""Where is the spot? Regression of a position in small pictures, fed by a stream with random shifts."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class SpotStream(IterableDataset):
    """Endless pictures; drawn and shifted with the process's own random state."""

    def __init__(self, size=12):
        self.size = size
        grid = torch.arange(size, dtype=torch.float32)
        self.yy, self.xx = torch.meshgrid(grid, grid, indexing="ij")

    def __iter__(self):
        while True:
            centre = 3 + (self.size - 6) * torch.rand(2)
            picture = torch.exp(-((self.yy - centre[0]) ** 2 + (self.xx - centre[1]) ** 2) / 3)
            dy, dx = torch.randint(-2, 3, (2,)).tolist()
            picture = picture.roll((dy, dx), (0, 1)) + 0.1 * torch.randn(self.size, self.size)
            yield picture.unsqueeze(0), (centre + torch.tensor([dy, dx])) / self.size


class SpotNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU())
        self.position = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.position(self.features(x))


def init_weights(m):
    if isinstance(m, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
        nn.init.zeros_(m.bias)


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = int(os.environ["RANK"])
        self.world = int(os.environ["WORLD_SIZE"])
        torch.manual_seed(cfg["seed"] + self.rank)  # every rank draws other pictures
        net = SpotNet()
        net.apply(init_weights)
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg["lr"])
        self.stream = iter(DataLoader(SpotStream(), batch_size=cfg["batch"]))

    def train_step(self):
        picture, target = next(self.stream)
        loss = nn.functional.smooth_l1_loss(self.model(picture), target, beta=0.05)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self):
        window = torch.zeros(())
        for step in range(1, self.cfg["steps"] + 1):
            window += self.train_step()
            if step % self.cfg["log_every"] == 0:
                dist.all_reduce(window)
                mean = window.item() / self.world / self.cfg["log_every"]
                if self.rank == 0:
                    print(f"step {step:4d}  loss {mean:.4f}")
                window.zero_()
        if self.rank == 0:
            torch.save(self.model.module.state_dict(), self.cfg["out"])
        dist.barrier()


def main():
    dist.init_process_group("gloo")
    Trainer({"seed": 40, "lr": 3e-3, "batch": 16, "steps": 120, "log_every": 20, "out": "spot.pt"}).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
