"""torchvision references/detection engine.py: list targets, a dict of losses reduced for the log, warm-up in the first epoch only, exit on a bad loss."""
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler


class Boxes(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 10_000 + i)
        img = 0.1 * torch.randn(1, 16, 16, generator=g)
        k = int(torch.randint(1, 3, (1,), generator=g))
        boxes, labels = [], []
        for _ in range(k):
            x, y = torch.randint(0, 10, (2,), generator=g).tolist()
            c = int(torch.randint(0, 2, (1,), generator=g))
            s = 4 + 2 * c
            img[0, y : y + s, x : x + s] += 1 if c else -1
            boxes.append([x, y, x + s, y + s])
            labels.append(c)
        return img, {"boxes": torch.tensor(boxes).float(), "labels": torch.tensor(labels), "image_id": i}


def collate_fn(batch):
    return tuple(zip(*batch))


class TinyDetector(nn.Module):
    """A grid of 4x4 cells; each cell says whether an object's centre is in it, where and which."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
        self.obj, self.box, self.cls = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 4, 1), nn.Conv2d(32, 2, 1)

    def forward(self, images, targets=None):
        f = self.body(torch.stack(images))
        obj, box, cls = self.obj(f)[:, 0], self.box(f), self.cls(f)
        if not self.training:
            return [{"scores": o.sigmoid().flatten(), "labels": c.argmax(0).flatten()} for o, c in zip(obj, cls)]
        t_obj = torch.zeros_like(obj)
        bi, yi, xi, tb, tc = [], [], [], [], []
        for b, t in enumerate(targets):
            ctr = (t["boxes"][:, :2] + t["boxes"][:, 2:]) / 2
            for k, (cx, cy) in enumerate(ctr.tolist()):
                x, y = min(int(cx // 4), 3), min(int(cy // 4), 3)
                t_obj[b, y, x] = 1
                bi.append(b), yi.append(y), xi.append(x), tb.append(t["boxes"][k] / 16), tc.append(t["labels"][k])
        pos = (torch.tensor(bi), torch.tensor(yi), torch.tensor(xi))
        return {"loss_objectness": F.binary_cross_entropy_with_logits(obj, t_obj),
                "loss_box_reg": F.smooth_l1_loss(box.permute(0, 2, 3, 1)[pos], torch.stack(tb)),
                "loss_classifier": F.cross_entropy(cls.permute(0, 2, 3, 1)[pos], torch.stack(tc))}


def reduce_dict(input_dict, average=True):
    world = dist.get_world_size()
    if world < 2:
        return input_dict
    with torch.inference_mode():
        names = sorted(input_dict)
        values = torch.stack([input_dict[k] for k in names])
        dist.all_reduce(values)
        if average:
            values /= world
        return dict(zip(names, values))


def train_one_epoch(model, optimizer, loader, epoch, print_freq):
    model.train()
    lr_scheduler = None
    if epoch == 0:
        warmup_iters = min(1000, len(loader) - 1)
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0 / 100, total_iters=warmup_iters)
    for i, (images, targets) in enumerate(loader):
        loss_dict = model(list(images), [dict(t) for t in targets])
        losses = sum(loss for loss in loss_dict.values())
        reduced = reduce_dict(loss_dict)
        loss_value = sum(reduced.values()).item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        if i % print_freq == 0 and dist.get_rank() == 0:
            print(f"Epoch: [{epoch}] [{i}/{len(loader)}] lr: {optimizer.param_groups[0]['lr']:.5f} loss: {loss_value:.4f} " + " ".join(f"{k}: {v:.3f}" for k, v in reduced.items()))


@torch.inference_mode()
def evaluate(model, loader):
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model.eval()
    results = {}
    for images, targets in loader:
        for out, t in zip(model(list(images)), targets):
            results[t["image_id"]] = float((out["scores"] > 0.5).sum() == len(t["boxes"]))
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, results)
    merged = {}
    for p in parts:
        merged.update(p)
    if dist.get_rank() == 0:
        print(f"count accuracy over {len(merged)} images: {sum(merged.values()) / len(merged):.3f}")
    torch.set_num_threads(n_threads)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    train, test = Boxes(200, 1), Boxes(41, 2)
    train_sampler = DistributedSampler(train)
    test_sampler = DistributedSampler(test, shuffle=False)
    loader = DataLoader(train, batch_sampler=BatchSampler(train_sampler, 10, drop_last=True), collate_fn=collate_fn)
    test_loader = DataLoader(test, batch_size=7, sampler=test_sampler, collate_fn=collate_fn)
    model = nn.parallel.DistributedDataParallel(TinyDetector())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3], gamma=0.1)
    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, optimizer, loader, epoch, 5)
        lr_scheduler.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": lr_scheduler.state_dict(), "epoch": epoch}, f"/tmp/det_{os.getpid()}.pth")
        evaluate(model, test_loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
