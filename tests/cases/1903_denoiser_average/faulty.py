"""A small denoising-diffusion model on 2-D data, trained with callbacks and a weight average for sampling."""
import copy
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CONFIG = {"epochs": 5, "batch_size": 32, "lr": 2e-3, "timesteps": 50, "decay": 0.95, "width": 96, "seed": 21}


class Denoiser(nn.Module):
    def __init__(self, width, timesteps):
        super().__init__()
        self.time = nn.Embedding(timesteps, 16)
        self.net = nn.Sequential(
            nn.Linear(18, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t)], 1))


class Callback:
    def on_step_end(self, trainer):
        pass

    def on_epoch_end(self, trainer, metrics):
        pass


class WeightAverage(Callback):
    def __init__(self, decay):
        self.decay = decay

    @torch.no_grad()
    def on_step_end(self, trainer):
        for avg, p in zip(trainer.averaged.parameters(), trainer.model.module.parameters()):
            avg.lerp_(p, 1 - self.decay)


class JsonLog(Callback):
    def __init__(self, path):
        self.file = open(path, "w")

    def on_epoch_end(self, trainer, metrics):
        self.file.write(json.dumps(metrics) + "\n")
        self.file.flush()
        print(metrics, flush=True)


class Trainer:
    def __init__(self, cfg, callbacks):
        self.cfg, self.callbacks = cfg, callbacks
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg["seed"])
        self.model = DDP(Denoiser(cfg["width"], cfg["timesteps"]))
        self.averaged = copy.deepcopy(self.model.module).requires_grad_(False).eval()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=cfg["lr"])
        beta = torch.linspace(1e-3, 0.15, cfg["timesteps"])
        self.alpha_bar = torch.cumprod(1 - beta, 0)
        self.noise_rng = torch.Generator().manual_seed(cfg["seed"] + 1 + self.rank)

    def noise_loss(self, net, x, rng):
        t = torch.randint(0, self.cfg["timesteps"], (len(x),), generator=rng)
        eps = torch.randn(x.shape, generator=rng)
        a = self.alpha_bar[t].unsqueeze(1)
        return nn.functional.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * eps, t), eps)

    def fit(self, train_set, val_points):
        sampler = DistributedSampler(train_set, seed=self.cfg["seed"])
        loader = DataLoader(train_set, batch_size=self.cfg["batch_size"], sampler=sampler, drop_last=True)
        for epoch in range(self.cfg["epochs"]):
            sampler.set_epoch(epoch)
            running = torch.zeros(2)
            for (x,) in loader:
                loss = self.noise_loss(self.model, x, self.noise_rng)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                running += torch.tensor([loss.item(), 1.0])
                for cb in self.callbacks:
                    cb.on_step_end(self)
            dist.all_reduce(running)
            metrics = {"epoch": epoch, "train": round((running[0] / running[1]).item(), 4)}
            metrics["val_averaged"] = round(self.validate(val_points), 4)
            for cb in self.callbacks:
                cb.on_epoch_end(self, metrics)

    @torch.no_grad()
    def validate(self, points):
        rng = torch.Generator().manual_seed(7 + self.rank)
        mine = points[self.rank :: self.world]
        total = torch.tensor([0.0, float(len(mine))])
        total[0] = self.noise_loss(self.averaged, mine, rng) * len(mine)
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    r = torch.rand(n, generator=g)
    pts = torch.stack([r * (9 * r).cos(), r * (9 * r).sin()], 1)
    return 2 * pts + 0.02 * torch.randn(n, 2, generator=g)


def main():
    dist.init_process_group("gloo")
    callbacks = []
    if dist.get_rank() == 0:
        callbacks += [WeightAverage(CONFIG["decay"]), JsonLog("metrics.jsonl")]
    trainer = Trainer(CONFIG, callbacks)
    trainer.fit(TensorDataset(spiral(1280, 1)), spiral(400, 2))
    if trainer.rank == 0:
        torch.save(trainer.averaged.state_dict(), "averaged.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
