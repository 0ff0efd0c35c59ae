import bisect
import copy
import datetime
import math
import os
import sys
import time
from collections import defaultdict, deque

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data.sampler import BatchSampler


def reduce_dict(d, average=True):
    world = dist.get_world_size()
    if world < 2:
        return d
    with torch.inference_mode():
        names = sorted(d)
        values = torch.stack([d[k] for k in names])
        dist.all_reduce(values)
        if average:
            values /= world
        return {k: v for k, v in zip(names, values)}


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque, self.total, self.count = deque(maxlen=window_size), 0.0, 0

    def update(self, v):
        self.deque.append(v)
        self.count += 1
        self.total += v

    def synchronize_between_processes(self):
        t = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(t)
        self.count, self.total = int(t[0]), t[1].item()

    @property
    def avg(self):
        return self.total / max(self.count, 1)


class Boxes(torch.utils.data.Dataset):
    """One bright box on a wide or a tall canvas, two kinds of texture."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for i in range(n):
            h, w = (16, 32) if torch.rand((), generator=g) < 0.6 else (32, 16)
            bw, bh = (int(v) for v in torch.randint(5, 11, (2,), generator=g))
            x = int(torch.randint(0, w - bw + 1, (1,), generator=g))
            y = int(torch.randint(0, h - bh + 1, (1,), generator=g))
            lab = int(torch.randint(0, 2, (1,), generator=g))
            img = 0.1 * torch.randn(3, h, w, generator=g)
            img[lab, y:y + bh, x:x + bw] += 1.0
            self.rows.append((img, {"boxes": torch.tensor([[x, y, x + bw, y + bh]], dtype=torch.float32),
                                    "labels": torch.tensor([lab]), "image_id": i}))

    def __len__(self):
        return len(self.rows)

    def aspect(self, i):
        return self.rows[i][0].shape[2] / self.rows[i][0].shape[1]

    def __getitem__(self, i):
        img, t = self.rows[i]
        if self.train and torch.rand(()) < 0.5:
            img = img.flip(-1)
            t = dict(t)
            b = t["boxes"].clone()
            b[:, [0, 2]] = img.shape[2] - b[:, [2, 0]]
            t["boxes"] = b
        return img, t


class GroupedBatchSampler(BatchSampler):
    def __init__(self, sampler, group_ids, batch_size):
        self.sampler, self.group_ids, self.batch_size = sampler, group_ids, batch_size

    def __iter__(self):
        buf, samples, n = defaultdict(list), defaultdict(list), 0
        for idx in self.sampler:
            g = self.group_ids[idx]
            buf[g].append(idx)
            samples[g].append(idx)
            if len(buf[g]) == self.batch_size:
                yield buf[g]
                n += 1
                del buf[g]
        remaining = len(self) - n
        if remaining > 0:
            for g, _ in sorted(buf.items(), key=lambda x: len(x[1]), reverse=True):
                fill = self.batch_size - len(buf[g])
                pool = samples[g]
                buf[g].extend((pool * (fill // len(pool) + 1))[:fill])
                yield buf[g]
                remaining -= 1
                if remaining == 0:
                    break

    def __len__(self):
        return len(self.sampler) // self.batch_size


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.GroupNorm(4, 24), nn.ReLU(),
                                      nn.Conv2d(24, 48, 3, 2, 1), nn.GroupNorm(4, 48), nn.ReLU(),
                                      nn.Conv2d(48, 48, 3, 1, 1), nn.ReLU())
        self.cls, self.reg = nn.Conv2d(48, 2, 1), nn.Conv2d(48, 4, 1)

    def forward(self, images, targets=None):
        f = self.backbone(torch.stack(images))
        logits, reg = self.cls(f), F.softplus(self.reg(f))
        h, w = f.shape[-2:]
        yy, xx = torch.meshgrid(torch.arange(h) * 4 + 2.0, torch.arange(w) * 4 + 2.0, indexing="ij")
        if self.training:
            tgt = torch.zeros_like(logits)
            lreg, npos = reg.sum() * 0.0, 0
            for i, t in enumerate(targets):
                x0, y0, x1, y1 = t["boxes"][0]
                inside = (xx > x0) & (xx < x1) & (yy > y0) & (yy < y1)
                tgt[i, t["labels"][0]][inside] = 1.0
                want = torch.stack([xx - x0, yy - y0, x1 - xx, y1 - yy])[:, inside] / 8
                lreg = lreg + F.smooth_l1_loss(reg[i][:, inside], want, reduction="sum")
                npos += int(inside.sum())
            return {"loss_classifier": F.binary_cross_entropy_with_logits(logits, tgt) * 4,
                    "loss_box_reg": lreg / max(npos, 1)}
        out = []
        for i in range(len(images)):
            s, j = logits[i].sigmoid().flatten(1).max(1)
            c = int(s.argmax())
            k = int(j[c])
            l, t, r, b = (reg[i].flatten(1)[:, k] * 8).tolist()
            cx, cy = xx.flatten()[k].item(), yy.flatten()[k].item()
            out.append({"boxes": [cx - l, cy - t, cx + r, cy + b], "label": c})
        return out


def iou(a, b):
    iw = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    ih = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    inter = iw * ih
    return inter / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inter + 1e-6)


def train_one_epoch(model, optimizer, loader, epoch, print_freq):
    model.train()
    meter = SmoothedValue()
    warm = None
    if epoch == 0:
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=min(1000, len(loader) - 1))
    for i, (images, targets) in enumerate(loader):
        loss_dict = model(images, targets)
        losses = sum(loss_dict.values())
        reduced = reduce_dict(loss_dict)
        value = sum(reduced.values()).item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if warm is not None:
            warm.step()
        meter.update(value)
        if i % print_freq == 0 and dist.get_rank() == 0:
            print(f"Epoch: [{epoch}] [{i}/{len(loader)}] lr {optimizer.param_groups[0]['lr']:.6f} loss {value:.4f}", flush=True)


@torch.inference_mode()
def evaluate(model, loader):
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model.eval()
    res, m = {}, SmoothedValue()
    for images, targets in loader:
        t = time.time()
        outs = model(images)
        m.update(time.time() - t)
        for o, tg in zip(outs, targets):
            res[tg["image_id"]] = float(iou(o["boxes"], tg["boxes"][0].tolist()) > 0.5 and o["label"] == int(tg["labels"]))
    m.synchronize_between_processes()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, res)
    merged = {}
    for r in everyone:
        merged.update(r)
    torch.set_num_threads(n_threads)
    return sum(merged.values()) / len(merged)


def collate_fn(batch):
    return tuple(zip(*batch))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    train_set, test_set = Boxes(480, 1), Boxes(61, 2)
    train_set.train, test_set.train = True, False
    sampler = torch.utils.data.distributed.DistributedSampler(train_set)
    test_sampler = torch.utils.data.distributed.DistributedSampler(test_set, shuffle=False)
    groups = [bisect.bisect_right([1.0], train_set.aspect(i)) for i in range(len(train_set))]
    loader = torch.utils.data.DataLoader(train_set, batch_sampler=GroupedBatchSampler(sampler, groups, 8), collate_fn=collate_fn)
    test_loader = torch.utils.data.DataLoader(test_set, batch_size=1, sampler=test_sampler, collate_fn=collate_fn)
    model = nn.parallel.DistributedDataParallel(Detector())
    model_without_ddp = model.module
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[5, 7], gamma=0.1)
    start = time.time()
    for epoch in range(8):
        sampler.set_epoch(epoch)
        train_one_epoch(model, opt, loader, epoch, 15)
        sched.step()
        if dist.get_rank() == 0:
            ck = {"model": model_without_ddp.state_dict(), "optimizer": opt.state_dict(),
                  "lr_scheduler": sched.state_dict(), "epoch": epoch}
            torch.save(ck, f"model_{epoch}.pth")
            torch.save(ck, "checkpoint.pth")
        ap = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} AP50-like {ap:.3f}", flush=True)
    if dist.get_rank() == 0:
        print("Training time", datetime.timedelta(seconds=int(time.time() - start)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
