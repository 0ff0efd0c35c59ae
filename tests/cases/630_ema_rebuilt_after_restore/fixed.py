"""Score regression with an EMA tracker, interrupted and resumed."""
import copy
import dataclasses
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

CKPT = pathlib.Path("ema_trainer.ckpt")


class EMATracker:
    def __init__(self, module, decay):
        self.decay, self.updates = decay, 0
        self.shadow = copy.deepcopy(module).requires_grad_(False)

    @torch.no_grad()
    def __call__(self, module):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for s, p in zip(self.shadow.parameters(), module.parameters()):
            s.mul_(d).add_(p, alpha=1 - d)

    def state_dict(self):
        return {"updates": self.updates, "shadow": self.shadow.state_dict()}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        self.shadow.load_state_dict(state["shadow"])


@dataclasses.dataclass
class Conf:
    batch: int = 20
    lr: float = 5e-3
    decay: float = 0.98


class Trainer:
    def __init__(self, conf):
        torch.manual_seed(0)
        self.conf, self.epoch = conf, 0
        g = torch.Generator().manual_seed(17)
        x = torch.randn(400, 7, generator=g)
        y = (x[:, :1] * x[:, 1:2]).tanh() + 0.3 * torch.randn(400, 1, generator=g)
        train, self.val = TensorDataset(x[:320], y[:320]), (x[320:], y[320:])
        self.loader = DataLoader(train, conf.batch, sampler=DistributedSampler(train))
        self.model = DDP(nn.Sequential(nn.Linear(7, 64), nn.SiLU(), nn.Linear(64, 1)))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=conf.lr)
        self.ema = EMATracker(self.model.module, conf.decay)
        if CKPT.exists():
            self.restore()

    def restore(self):
        c = torch.load(CKPT, map_location="cpu")
        self.model.module.load_state_dict(c["model"])
        self.opt.load_state_dict(c["opt"])
        self.ema.load_state_dict(c["ema"])
        self.epoch = c["epoch"]

    def save(self):
        if dist.get_rank() == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "ema": self.ema.state_dict(), "epoch": self.epoch}, CKPT)
        dist.barrier()

    @torch.no_grad()
    def validate(self):
        x, y = self.val
        return nn.functional.mse_loss(self.ema.shadow(x), y).item()

    def run(self, epochs):
        while self.epoch < epochs:
            self.loader.sampler.set_epoch(self.epoch)
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.ema(self.model.module)
            self.epoch += 1
            score = self.validate()
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch}: ema validation mse {score:.4f}")
            self.save()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        CKPT.unlink(missing_ok=True)
    dist.barrier()
    Trainer(Conf()).run(3)
    Trainer(Conf()).run(6)
    dist.destroy_process_group()
