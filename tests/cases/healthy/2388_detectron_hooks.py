"""Trainer with hooks, an endless training sampler and targets of varying number per image."""
import itertools
import json
import logging
import os
import time
import weakref
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

logger = logging.getLogger("det")


def shared_random_seed():
    ints = [None] * dist.get_world_size()
    dist.all_gather_object(ints, int(torch.randint(0, 2 ** 31, (1,))))
    return ints[0]


def reduce_dict(d, average=True):
    names = sorted(d)
    values = torch.stack([d[k].detach() for k in names])
    dist.reduce(values, dst=0)
    if dist.get_rank() == 0 and average:
        values /= dist.get_world_size()
    return dict(zip(names, values.tolist()))


class TrainingSampler(Sampler):
    def __init__(self, size, seed):
        self.size, self.seed = size, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        yield from itertools.islice(self._infinite(), self.rank, None, self.world)

    def _infinite(self):
        g = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(self.size, generator=g).tolist()


class InferenceSampler(Sampler):
    def __init__(self, size):
        rank, world = dist.get_rank(), dist.get_world_size()
        shard, left = divmod(size, world)
        sizes = [shard + int(r < left) for r in range(world)]
        begin = sum(sizes[:rank])
        self.local = range(begin, begin + sizes[rank])

    def __iter__(self):
        yield from self.local

    def __len__(self):
        return len(self.local)


class Boxes(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 1000003 + i)
        image, boxes, classes = 0.2 * torch.randn(2, 32, 32, generator=g), [], []
        for _ in range(int(torch.randint(0, 5, (1,), generator=g))):
            w, h = torch.randint(6, 12, (2,), generator=g).tolist()
            x, y = int(torch.randint(0, 32 - w, (1,), generator=g)), int(torch.randint(0, 32 - h, (1,), generator=g))
            c = int(torch.randint(0, 2, (1,), generator=g))
            image[c, y:y + h, x:x + w] += 1
            boxes.append([x, y, x + w, y + h])
            classes.append(c)
        return {"image": image, "image_id": i, "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
                "classes": torch.tensor(classes, dtype=torch.long)}


class CenterDetector(nn.Module):
    def __init__(self, classes=2, stride=4):
        super().__init__()
        self.stride, self.classes = stride, classes
        self.trunk = nn.Sequential(nn.Conv2d(2, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1),
                                   nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU())
        self.heat, self.box = nn.Conv2d(32, classes, 1), nn.Conv2d(32, 4, 1)
        nn.init.constant_(self.heat.bias, -3.0)

    def forward(self, batch):
        f = self.trunk(torch.stack([b["image"] for b in batch]))
        heat, box = self.heat(f), F.softplus(self.box(f))
        return self.losses(heat, box, batch) if self.training else self.decode(heat, box)

    def losses(self, heat, box, batch):
        target, where, goal = torch.zeros_like(heat), [], []
        for n, b in enumerate(batch):
            for bx, c in zip(b["boxes"], b["classes"]):
                cx, cy = (bx[0] + bx[2]) / 2, (bx[1] + bx[3]) / 2
                gx, gy = int(cx // self.stride), int(cy // self.stride)
                target[n, c, gy, gx] = 1.0
                px, py = (gx + 0.5) * self.stride, (gy + 0.5) * self.stride
                where.append((n, gy, gx))
                goal.append(torch.stack([px - bx[0], py - bx[1], bx[2] - px, bx[3] - py]) / self.stride)
        num = torch.tensor(float(len(where)))
        dist.all_reduce(num)
        num = (num / dist.get_world_size()).clamp(min=1.0)
        p = heat.sigmoid()
        focal = F.binary_cross_entropy_with_logits(heat, target, reduction="none") * (target - p).abs().pow(2)
        if where:
            idx = torch.tensor(where)
            reg = F.l1_loss(box[idx[:, 0], :, idx[:, 1], idx[:, 2]], torch.stack(goal), reduction="sum")
        else:
            reg = box.sum() * 0.0
        return {"loss_heat": focal.sum() / num, "loss_box": 0.3 * reg / num}

    def decode(self, heat, box):
        p = heat.sigmoid()
        p = p * (F.max_pool2d(p, 3, 1, 1) == p)
        out = []
        for n in range(len(p)):
            c, y, x = (p[n] > 0.3).nonzero(as_tuple=True)
            d = box[n, :, y, x].t() * self.stride
            px, py = (x + 0.5) * self.stride, (y + 0.5) * self.stride
            out.append({"boxes": torch.stack([px - d[:, 0], py - d[:, 1], px + d[:, 2], py + d[:, 3]], 1), "classes": c})
        return out


def iou(a, b):
    wh = (torch.min(a[:, None, 2:], b[None, :, 2:]) - torch.max(a[:, None, :2], b[None, :, :2])).clamp(min=0).prod(2)
    area = [(t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1]) for t in (a, b)]
    return wh / (area[0][:, None] + area[1][None] - wh)


@torch.no_grad()
def inference_on_dataset(model, loader):
    model.eval()
    results = []
    for batch in loader:
        for b, o in zip(batch, model(batch)):
            hit = 0
            if len(o["boxes"]) and len(b["boxes"]):
                same = o["classes"][:, None] == b["classes"][None]
                hit = int(((iou(o["boxes"], b["boxes"]) > 0.5) & same).any(0).sum())
            results.append((b["image_id"], hit, len(b["boxes"]), len(o["boxes"])))
    model.train()
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, results)
    if dist.get_rank() != 0:
        return {}
    rows = {r[0]: r for part in everything for r in part}
    hit, gt, det = (sum(r[k] for r in rows.values()) for k in (1, 2, 3))
    return {"images": len(rows), "recall50": hit / max(gt, 1), "precision50": min(hit / max(det, 1), 1.0)}


class HookBase:
    def before_train(self): pass
    def after_train(self): pass
    def after_step(self): pass


class LRScheduler(HookBase):
    def __init__(self, optimizer, warmup, total):
        self.sched = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min(1.0, (i + 1) / warmup) * (0.1 if i > 0.8 * total else 1.0))

    def after_step(self):
        self.sched.step()


class EvalHook(HookBase):
    def __init__(self, period, fn):
        self.period, self.fn = period, fn

    def after_step(self):
        if (self.trainer.iter + 1) % self.period == 0:
            for k, v in self.fn().items():
                self.trainer.storage[k].append(v)
            dist.barrier()


class PeriodicWriter(HookBase):
    def __init__(self, path, period):
        self.path, self.period = path, period

    def after_step(self):
        if (self.trainer.iter + 1) % self.period == 0:
            row = {k: sum(v[-20:]) / len(v[-20:]) for k, v in self.trainer.storage.items()}
            logger.info("iter %d %s", self.trainer.iter + 1, {k: round(v, 4) for k, v in row.items()})
            with open(self.path, "a") as f:
                f.write(json.dumps({"iteration": self.trainer.iter + 1, **row}) + "\n")


class PeriodicCheckpointer(HookBase):
    def __init__(self, model, optimizer, directory, period):
        self.model, self.optimizer, self.dir, self.period = model, optimizer, directory, period

    def after_step(self):
        if (self.trainer.iter + 1) % self.period == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "iteration": self.trainer.iter}, os.path.join(self.dir, f"model_{self.trainer.iter:07d}.pth"))


class SimpleTrainer:
    def __init__(self, model, loader, optimizer):
        self.model, self.optimizer, self._it = model, optimizer, iter(loader)
        self.hooks, self.storage = [], defaultdict(list)

    def register_hooks(self, hooks):
        for h in hooks:
            h.trainer = weakref.proxy(self)
        self.hooks += hooks

    def train(self, start_iter, max_iter):
        for h in self.hooks:
            h.before_train()
        for self.iter in range(start_iter, max_iter):
            self.run_step()
            for h in self.hooks:
                h.after_step()
        for h in self.hooks:
            h.after_train()

    def run_step(self):
        start = time.perf_counter()
        data = next(self._it)
        data_time = time.perf_counter() - start
        loss_dict = self.model(data)
        losses = sum(loss_dict.values())
        self.optimizer.zero_grad()
        losses.backward()
        metrics = reduce_dict({**loss_dict, "data_time": torch.tensor(data_time)})
        if dist.get_rank() == 0:
            for k, v in metrics.items():
                self.storage[k].append(v)
        self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    torch.manual_seed(31 + rank)
    out, max_iter = "det_out", 240
    os.makedirs(out, exist_ok=True)
    train_set, val_set = Boxes(512, 1), Boxes(75, 2)
    sampler = TrainingSampler(len(train_set), shared_random_seed())
    loader = DataLoader(train_set, batch_sampler=BatchSampler(sampler, 8, drop_last=True), collate_fn=list)
    val_loader = DataLoader(val_set, batch_size=5, sampler=InferenceSampler(len(val_set)), collate_fn=list)
    model = DistributedDataParallel(CenterDetector(), broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    trainer = SimpleTrainer(model, loader, optimizer)
    hooks = [LRScheduler(optimizer, 20, max_iter), EvalHook(80, lambda: inference_on_dataset(model.module, val_loader))]
    if rank == 0:
        hooks += [PeriodicCheckpointer(model.module, optimizer, out, 120),
                  PeriodicWriter(os.path.join(out, "metrics.json"), 40)]
    trainer.register_hooks(hooks)
    trainer.train(0, max_iter)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
