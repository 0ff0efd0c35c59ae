import datetime
import math
import os
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler
from torchvision.ops import box_iou, nms, sigmoid_focal_loss


class Boxes(Dataset):
    """Grey images of two shapes of canvas with up to three bright rectangles of two classes."""

    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def wide(self, i):
        return i % 3 == 0

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100_000 + i)
        h, w = (32, 48) if self.wide(i) else (32, 32)
        img = 0.1 * torch.randn(1, h, w, generator=g)
        k = int(torch.randint(0, 4, (), generator=g))
        boxes, labels = [], []
        for _ in range(k):
            c = int(torch.randint(2, (), generator=g))
            bw, bh = (10, 6) if c == 0 else (6, 10)
            x, y = int(torch.randint(w - bw, (), generator=g)), int(torch.randint(h - bh, (), generator=g))
            img[:, y:y + bh, x:x + bw] += 1.0
            boxes.append([x, y, x + bw, y + bh])
            labels.append(c)
        return img, {"boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
                     "labels": torch.tensor(labels, dtype=torch.long), "image_id": i}


class GroupedBatchSampler(BatchSampler):
    def __init__(self, sampler, group_ids, batch_size):
        self.sampler, self.group_ids, self.batch_size = sampler, group_ids, batch_size

    def __iter__(self):
        buf, seen, n = defaultdict(list), defaultdict(list), 0
        for i in self.sampler:
            g = self.group_ids[i]
            buf[g].append(i)
            seen[g].append(i)
            if len(buf[g]) == self.batch_size:
                yield buf.pop(g)
                n += 1
        remaining = len(self) - n
        for g, items in sorted(buf.items(), key=lambda kv: -len(kv[1])):
            if remaining <= 0:
                break
            fill = (items + seen[g] * self.batch_size)[:self.batch_size]
            yield fill
            remaining -= 1

    def __len__(self):
        return len(self.sampler) // self.batch_size


class Detector(nn.Module):
    def __init__(self, stride=4):
        super().__init__()
        self.stride = stride
        self.body = nn.Sequential(nn.Conv2d(1, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 40, 3, 2, 1), nn.ReLU(),
                                  nn.Conv2d(40, 40, 3, 1, 1), nn.ReLU())
        self.cls, self.reg = nn.Conv2d(40, 2, 3, 1, 1), nn.Conv2d(40, 4, 3, 1, 1)
        nn.init.constant_(self.cls.bias, -3.0)

    def forward(self, images, targets=None):
        f = self.body(torch.stack(images))
        c, r = self.cls(f), F.softplus(self.reg(f)) * self.stride
        H, W = c.shape[-2:]
        yy, xx = torch.meshgrid(torch.arange(H) * self.stride + 2.0, torch.arange(W) * self.stride + 2.0, indexing="ij")
        pts = torch.stack([xx, yy], -1).view(-1, 2)
        c, r = c.flatten(2).transpose(1, 2), r.flatten(2).transpose(1, 2)
        boxes = torch.cat([pts - r[..., :2], pts + r[..., 2:]], -1)
        if targets is None:
            return self.post(c.sigmoid(), boxes)
        tc, tb, pos = torch.zeros_like(c), torch.zeros_like(boxes), torch.zeros(c.shape[:2], dtype=torch.bool)
        for b, t in enumerate(targets):
            for bx, lab in zip(t["boxes"], t["labels"]):
                inside = ((pts - (bx[:2] + bx[2:]) / 2).abs() <= 3.0).all(1)
                tc[b, inside] = F.one_hot(lab, 2).float()
                tb[b, inside] = bx
                pos[b] |= inside
        n = pos.sum().clamp(min=1)
        return {"classification": sigmoid_focal_loss(c, tc, reduction="sum") / n,
                "bbox_regression": (F.smooth_l1_loss(boxes, tb, reduction="none").sum(-1) * pos).sum() / n / 8}

    def post(self, score, boxes):
        out = []
        for s, b in zip(score, boxes):
            s, lab = s.max(-1)
            keep = s > 0.3
            s, lab, b = s[keep], lab[keep], b[keep]
            k = nms(b, s, 0.4)
            out.append({"boxes": b[k], "scores": s[k], "labels": lab[k]})
        return out


def reduce_dict(d):
    with torch.no_grad():
        names = sorted(d)
        v = torch.stack([d[k] for k in names])
        dist.all_reduce(v)
        v /= dist.get_world_size()
        return dict(zip(names, v))


def train_one_epoch(model, opt, loader, epoch, meter):
    model.train()
    warm = None
    if epoch == 0:
        warm = torch.optim.lr_scheduler.LinearLR(opt, start_factor=0.01, total_iters=min(20, len(loader) - 1))
    for images, targets in loader:
        loss_dict = model(list(images), list(targets))
        losses = sum(loss_dict.values())
        reduced = reduce_dict(loss_dict)
        value = sum(reduced.values()).item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training", reduced)
            sys.exit(1)
        opt.zero_grad()
        losses.backward()
        opt.step()
        if warm is not None:
            warm.step()
        meter.append(value)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    res = {}
    for images, targets in loader:
        for o, t in zip(model(list(images)), targets):
            iou = box_iou(t["boxes"], o["boxes"]) * (t["labels"][:, None] == o["labels"][None])
            hit = int((iou.amax(1) > 0.5).sum()) if iou.numel() else 0
            res[t["image_id"]] = (hit, len(t["boxes"]), len(o["boxes"]))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, res)
    merged = {}
    for r in gathered:
        merged.update(r)
    h, n, p = (sum(v[k] for v in merged.values()) for k in range(3))
    return h / n, h / max(p, 1), len(merged)


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
    rank = dist.get_rank()
    torch.manual_seed(7 + rank)
    train, test = Boxes(900, 1), Boxes(150, 2)
    sampler = DistributedSampler(train)
    groups = [int(train.wide(i)) for i in range(len(train))]
    collate = lambda b: tuple(zip(*b))
    loader = DataLoader(train, batch_sampler=GroupedBatchSampler(sampler, groups, 8), collate_fn=collate)
    tloader = DataLoader(test, batch_size=1, sampler=DistributedSampler(test, shuffle=False), collate_fn=collate)
    model = Detector()
    ddp = nn.parallel.DistributedDataParallel(model)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, milestones=[3], gamma=0.2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        meter = []
        train_one_epoch(ddp, opt, loader, epoch, meter)
        sched.step()
        if rank == 0:
            os.makedirs("det", exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "lr_scheduler": sched.state_dict(),
                        "epoch": epoch}, "det/checkpoint.pth")
        rec, prec, n = evaluate(model, tloader)
        if rank == 0:
            print(f"Epoch [{epoch}] loss {sum(meter) / len(meter):.4f} recall {rec:.3f} precision {prec:.3f} on {n} images")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
