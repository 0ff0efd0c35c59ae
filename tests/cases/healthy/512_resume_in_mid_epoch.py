"""Stop in mid-epoch, resume at the very next batch."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ResumableSampler(DistributedSampler):
    """skips what this epoch has already used"""

    start = 0

    def __iter__(self):
        indices = list(super().__iter__())
        return iter(indices[self.start :])

    def __len__(self):
        return super().__len__() - self.start


class Run:
    path = "resume.pt"

    def __init__(self):
        torch.manual_seed(2)
        g = torch.Generator().manual_seed(0)
        x = torch.randn(512, 8, generator=g)
        self.data = TensorDataset(x, x.cumsum(1)[:, ::2].tanh())
        self.net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 4))
        self.model = DDP(self.net)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, 1e-2, total_steps=64)
        self.sampler = ResumableSampler(self.data, seed=4)
        self.loader = DataLoader(self.data, batch_size=16, sampler=self.sampler)
        self.epoch, self.batch = 0, 0
        torch.manual_seed(50 + dist.get_rank())

    def state(self):
        return {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                "epoch": self.epoch, "batch": self.batch}

    def save(self):
        rng = [None] * dist.get_world_size()
        dist.all_gather_object(rng, torch.get_rng_state())
        if dist.get_rank() == 0:
            torch.save({**self.state(), "rng": rng}, self.path)
        dist.barrier()

    def load(self):
        s = torch.load(self.path, weights_only=True)
        self.net.load_state_dict(s["net"])
        self.opt.load_state_dict(s["opt"])
        self.sched.load_state_dict(s["sched"])
        self.epoch, self.batch = s["epoch"], s["batch"]
        torch.set_rng_state(s["rng"][dist.get_rank()])
        return self

    def train(self, epochs, stop_after=None):
        done = 0
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            self.sampler.start = self.batch * 16
            for x, y in self.loader:
                loss = nn.functional.mse_loss(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.batch += 1
                done += 1
                if done == stop_after:
                    return self.save()
            mean = loss.detach()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"epoch {self.epoch} finished after {self.batch} batches, loss {mean.item() / dist.get_world_size():.4f}")
            self.epoch, self.batch = self.epoch + 1, 0


def main():
    dist.init_process_group("gloo")
    Run().train(epochs=4, stop_after=25)
    run = Run().load()
    if os.environ["RANK"] == "0":
        print(f"resumed in epoch {run.epoch} at batch {run.batch}")
    run.train(epochs=4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
