"""Image classification with a distributed test pass in the manner of a runner + hooks."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CFG = dict(seed=5, classes=6, train=900, val=301, batch=30, epochs=5, lr=0.05, momentum=0.9, eval_interval=1)


class Shapes(Dataset):
    def __init__(self, count, seed, classes, size=16):
        rng = np.random.RandomState(seed)
        self.gt_labels = rng.randint(0, classes, count)
        proto = np.random.RandomState(99).randn(classes, 1, size, size)
        self.images = (proto[self.gt_labels] * 0.6 + rng.randn(count, 1, size, size)).astype(np.float32)

    def __len__(self):
        return len(self.gt_labels)

    def __getitem__(self, i):
        return dict(img=torch.from_numpy(self.images[i]), label=int(self.gt_labels[i]))

    def evaluate(self, scores):
        order = np.argsort(-scores, 1)
        top1 = (order[:, 0] == self.gt_labels).mean()
        top2 = (order[:, :2] == self.gt_labels[:, None]).any(1).mean()
        return dict(top1=float(top1), top2=float(top2))


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.head = nn.Linear(32 * 16, classes)

    def forward(self, img):
        return self.head(self.stem(img).flatten(1))


def collect_results(part, size):
    world = dist.get_world_size()
    parts = [torch.empty_like(part) for _ in range(world)]
    dist.all_gather(parts, part)
    ordered = torch.cat(parts, dim=0)
    return ordered[:size].numpy()


@torch.no_grad()
def multi_process_test(model, loader):
    model.eval()
    scores = [model(batch["img"]).softmax(-1) for batch in loader]
    model.train()
    return collect_results(torch.cat(scores), len(loader.dataset))


class EvalHook:
    def __init__(self, loader, interval):
        self.loader, self.interval = loader, interval
        self.best = -1.0

    def after_epoch(self, runner):
        if (runner.epoch + 1) % self.interval:
            return
        scores = multi_process_test(runner.model.module, self.loader)
        metrics = self.loader.dataset.evaluate(scores)
        if runner.rank == 0:
            print(f"Epoch(val) [{runner.epoch + 1}] " + " ".join(f"{k}: {v:.4f}" for k, v in metrics.items()), flush=True)
            if metrics["top1"] > self.best:
                torch.save(runner.model.module.state_dict(), "best_top1.pth")
        self.best = max(self.best, metrics["top1"])


class LogHook:
    def __init__(self):
        self.sums = torch.zeros(2)

    def after_iter(self, runner, loss):
        self.sums += torch.tensor([loss.item(), 1.0])

    def after_epoch(self, runner):
        dist.all_reduce(self.sums)
        if runner.rank == 0:
            print(f"Epoch [{runner.epoch + 1}] lr: {runner.optimizer.param_groups[0]['lr']:.4f} "
                  f"loss: {self.sums[0] / self.sums[1]:.4f}", flush=True)
        self.sums = torch.zeros(2)


class Runner:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank = dist.get_rank()
        torch.manual_seed(cfg["seed"])
        self.model = DistributedDataParallel(Net(cfg["classes"]))
        train = Shapes(cfg["train"], 1, cfg["classes"])
        val = Shapes(cfg["val"], 2, cfg["classes"])
        self.sampler = DistributedSampler(train, shuffle=True, seed=cfg["seed"])
        self.loader = DataLoader(train, cfg["batch"], sampler=self.sampler)
        val_loader = DataLoader(val, 50, sampler=DistributedSampler(val, shuffle=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), cfg["lr"], cfg["momentum"], weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.1)
        self.hooks = [LogHook(), EvalHook(val_loader, cfg["eval_interval"])]
        self.epoch = 0

    def call(self, name, *args):
        for hook in self.hooks:
            fn = getattr(hook, name, None)
            if fn is not None:
                fn(self, *args)

    def run(self):
        loss_fn = nn.CrossEntropyLoss()
        for self.epoch in range(self.cfg["epochs"]):
            self.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                loss = loss_fn(self.model(batch["img"]), batch["label"])
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.call("after_iter", loss)
            self.call("after_epoch")
            self.scheduler.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    start = time.time()
    Runner(CFG).run()
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"finished in {time.time() - start:.1f}s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
