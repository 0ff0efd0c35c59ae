"""Iteration-based detector training with hooks, a registry, dict losses and a profiler on the main process."""
import itertools
import os
import weakref

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset, Sampler

META_ARCH = {}


def register(cls):
    META_ARCH[cls.__name__] = cls
    return cls


class TrainingSampler(Sampler):
    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __iter__(self):
        yield from itertools.islice(self._infinite(), dist.get_rank(), None, dist.get_world_size())

    def _infinite(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=g).tolist()


class Squares(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        k = int(torch.randint(0, 3, (1,), generator=g))
        img, boxes = 0.1 * torch.randn(1, 16, 16, generator=g), []
        for _ in range(k):
            x, y = torch.randint(0, 12, (2,), generator=g).tolist()
            img[0, y:y + 4, x:x + 4] += 1
            boxes.append([x / 16, y / 16, (x + 4) / 16, (y + 4) / 16])
        return {"image": img, "boxes": torch.tensor(boxes).view(-1, 4)}


@register
class GridDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 4, stride=4), nn.ReLU())
        self.objectness, self.box = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1)

    def forward(self, batch):
        feat = self.backbone(torch.stack([b["image"] for b in batch]))
        obj, reg = self.objectness(feat)[:, 0], self.box(feat)
        if not self.training:
            return obj.sigmoid()
        target, want, mask = torch.zeros_like(obj), torch.zeros_like(reg), torch.zeros_like(obj)
        for n, b in enumerate(batch):
            for box in b["boxes"]:
                cx, cy = ((box[0] + box[2]) * 2).long(), ((box[1] + box[3]) * 2).long()
                target[n, cy, cx] = mask[n, cy, cx] = 1
                want[n, :, cy, cx] = box
        return {"loss_obj": F.binary_cross_entropy_with_logits(obj, target),
                "loss_box": ((reg - want).abs().sum(1) * mask).sum() / len(batch)}


class Hook:
    trainer = None

    def before_train(self): pass
    def after_step(self): pass
    def after_train(self): pass


class LRScheduler(Hook):
    def before_train(self):
        opt = self.trainer.optimizer
        self.s = torch.optim.lr_scheduler.SequentialLR(opt, [
            torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=10), torch.optim.lr_scheduler.MultiStepLR(opt, [40])], milestones=[10])

    def after_step(self):
        self.s.step()


class EvalHook(Hook):
    def __init__(self, period, dataset):
        self.period, self.dataset = period, dataset

    def after_step(self):
        if (self.trainer.iter + 1) % self.period == 0:
            if dist.get_rank() == 0:
                self.evaluate()
            dist.barrier()

    @torch.no_grad()
    def evaluate(self):
        net = self.trainer.model.module
        net.eval()
        err = 0.0
        for i in range(len(self.dataset)):
            item = self.dataset[i]
            err += abs((net([item]) > 0.5).sum().item() - len(item["boxes"]))
        net.train()
        print(f"iter {self.trainer.iter}: counting error {err / len(self.dataset):.3f}")


class PeriodicWriter(Hook):
    def after_step(self):
        if self.trainer.iter % 20 == 0:
            names = sorted(self.trainer.last)
            t = torch.stack([self.trainer.last[n] for n in names])
            dist.reduce(t, 0)
            if dist.get_rank() == 0:
                print(" ".join(f"{n}={v / dist.get_world_size():.4f}" for n, v in zip(names, t.tolist())))


class Checkpointer(Hook):
    def after_train(self):
        if dist.get_rank() == 0:
            os.makedirs("output", exist_ok=True)
            torch.save({"model": self.trainer.model.module.state_dict(), "iteration": self.trainer.iter}, "output/model_final.pth")


class TorchProfiler(Hook):
    def before_train(self):
        self.p = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=5, warmup=2, active=3, repeat=1))
        self.p.start()

    def after_step(self):
        self.p.step()

    def after_train(self):
        self.p.stop()


class SimpleTrainer:
    def __init__(self, model, loader, optimizer):
        self.model, self.loader, self.optimizer, self.hooks = model, iter(loader), optimizer, []

    def register_hooks(self, hooks):
        for h in hooks:
            h.trainer = weakref.proxy(self)
        self.hooks += hooks

    def run_step(self):
        loss_dict = self.model(next(self.loader))
        self.optimizer.zero_grad()
        sum(loss_dict.values()).backward()
        self.optimizer.step()
        self.last = {k: v.detach() for k, v in loss_dict.items()}

    def train(self, max_iter):
        self.model.train()
        for h in self.hooks:
            h.before_train()
        for self.iter in range(max_iter):
            self.run_step()
            for h in self.hooks:
                h.after_step()
        for h in self.hooks:
            h.after_train()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(META_ARCH["GridDetector"]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    train = Squares(300, 1)
    loader = DataLoader(train, batch_size=16, sampler=TrainingSampler(len(train), seed=5), collate_fn=list)
    trainer = SimpleTrainer(model, loader, optimizer)
    hooks = [LRScheduler(), EvalHook(30, Squares(40, 2)), PeriodicWriter(), Checkpointer()]
    if dist.get_rank() == 0:
        hooks.append(TorchProfiler())
    trainer.register_hooks(hooks)
    trainer.train(60)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
