"""A Trainer with callbacks; stops in the middle of an epoch, saves, and a second Trainer resumes there, skipping the batches that are done."""
import os, shutil, tempfile
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_num_threads(1)


class Callback:
    def on_step(self, t): ...
    def on_epoch(self, t): ...


class Log(Callback):
    def on_epoch(self, t):
        mean = torch.tensor([t.total, float(t.seen)])
        dist.all_reduce(mean)
        if t.rank == 0:
            print(f"epoch {t.epoch} loss {mean[0] / mean[1]:.4f}")


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, t):
        t.stop = t.step >= self.step


class Trainer:
    def __init__(self, data, callbacks):
        self.rank = dist.get_rank()
        self.sampler = DistributedSampler(data, seed=7)
        self.loader = DataLoader(data, 32, sampler=self.sampler)
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3)))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=128)
        self.callbacks, self.step, self.epoch, self.done, self.stop = callbacks, 0, 0, 0, False

    def fit(self, epochs):
        for self.epoch in range(self.epoch, epochs):
            self.sampler.set_epoch(self.epoch)
            self.total, self.seen, skip = 0.0, 0, self.done
            for i, (x, y) in enumerate(self.loader):
                if i < skip:
                    continue
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.total, self.seen = self.total + loss.item() * len(x), self.seen + len(x)
                self.step, self.done = self.step + 1, i + 1
                for c in self.callbacks:
                    c.on_step(self)
                if self.stop:
                    return
            self.done = 0
            for c in self.callbacks:
                c.on_epoch(self)

    def save(self, path):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                        "step": self.step, "epoch": self.epoch, "done": self.done}, path)
        dist.barrier()

    def load(self, path):
        c = torch.load(path, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(c["model"])
        self.opt.load_state_dict(c["opt"])
        self.sched.load_state_dict(c["sched"])
        self.step, self.epoch, self.done = c["step"], c["epoch"], c["done"]


def main():
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(2048, 16, generator=g)
    data = TensorDataset(x, (x @ torch.randn(16, 3, generator=g)).argmax(1))
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "last.pt")
    first = Trainer(data, [Log(), StopAt(45)])
    first.fit(4)
    first.save(path)
    second = Trainer(data, [Log()])
    second.load(path)
    second.fit(4)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
