"""Centre-point detector trained on crops; mAP over whole images by sliding windows, on rank 0 alone."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.ops import batched_nms, box_iou

CROP, STRIDE, CLASSES = 32, 4, 2


def scene(seed, size=64, objects=4):
    g = torch.Generator().manual_seed(seed)
    img = 0.2 * torch.randn(1, size, size, generator=g)
    boxes, labels = [], []
    for _ in range(objects):
        w = int(torch.randint(7, 12, (), generator=g))
        x, y = torch.randint(0, size - w, (2,), generator=g).tolist()
        k = int(torch.randint(0, CLASSES, (), generator=g))
        patch = torch.ones(w, w)
        if k == 1:
            patch[2:-2, 2:-2] = -1
        box = torch.tensor([[x, y, x + w, y + w]]).float()
        if boxes and box_iou(box, torch.stack(boxes)).max() > 0:
            continue
        img[0, y:y + w, x:x + w] += patch
        boxes.append(box[0])
        labels.append(k)
    return img, torch.stack(boxes), torch.tensor(labels)


class Crops(Dataset):
    def __init__(self, n):
        self.n, self.kept = n, {}

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i not in self.kept:
            self.kept[i] = scene(i)
        img, boxes, labels = self.kept[i]
        oy, ox = torch.randint(0, img.shape[-1] - CROP + 1, (2,)).tolist()
        crop = img[:, oy:oy + CROP, ox:ox + CROP]
        n = CROP // STRIDE
        heat, size, mask = torch.zeros(CLASSES, n, n), torch.zeros(3, n, n), torch.zeros(n, n)
        for b, k in zip(boxes.tolist(), labels.tolist()):
            cx, cy = (b[0] + b[2]) / 2 - ox, (b[1] + b[3]) / 2 - oy
            if 0 <= cx < CROP and 0 <= cy < CROP:
                j, i2 = int(cx // STRIDE), int(cy // STRIDE)
                heat[k, i2, j] = 1
                size[:, i2, j] = torch.tensor([cx / STRIDE - j, cy / STRIDE - i2, math.log((b[2] - b[0]) / 8)])
                mask[i2, j] = 1
        return crop, heat, size, mask


class Detector(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        def conv(a, b, s):
            return nn.Sequential(nn.Conv2d(a, b, 3, s, 1), nn.GroupNorm(4, b), nn.SiLU())
        self.body = nn.Sequential(conv(1, ch, 2), conv(ch, ch, 2), conv(ch, ch, 1), conv(ch, ch, 1))
        self.heat = nn.Conv2d(ch, CLASSES, 1)
        self.size = nn.Conv2d(ch, 3, 1)
        nn.init.constant_(self.heat.bias, -3.0)

    def forward(self, x):
        h = self.body(x)
        return self.heat(h), self.size(h)


def detect(net, img, step=16):
    """Windows over the image; detections near an inner border of a window are left to its neighbour."""
    out, side = [], img.shape[-1]
    for oy in range(0, side - CROP + 1, step):
        for ox in range(0, side - CROP + 1, step):
            heat, size = net(img[None, :, oy:oy + CROP, ox:ox + CROP])
            p = heat[0].sigmoid()
            peak = (p == F.max_pool2d(p, 3, 1, 1)) & (p > 0.05)
            for k, i, j in peak.nonzero().tolist():
                dx, dy, s = size[0, :, i, j].tolist()
                cx, cy, half = (j + dx) * STRIDE + ox, (i + dy) * STRIDE + oy, 4 * math.exp(s)
                out.append([cx - half, cy - half, cx + half, cy + half, p[k, i, j].item(), k])
    t = torch.tensor(out).view(-1, 6)
    return t[batched_nms(t[:, :4], t[:, 4], t[:, 5].long(), 0.3)]


def average_precision(found, truth):
    """found: (image, score, box) rows of one class; truth: {image: boxes}; IoU 0.5."""
    total = sum(len(b) for b in truth.values())
    used, tp = {i: torch.zeros(len(b), dtype=torch.bool) for i, b in truth.items()}, []
    for i, _, box in sorted(found, key=lambda r: -r[1]):
        hit = False
        if len(truth[i]):
            iou, m = box_iou(box[None], truth[i])[0].max(0)
            if iou > 0.5 and not used[i][m]:
                used[i][m] = hit = True
        tp.append(hit)
    tp = torch.tensor(tp, dtype=torch.float64)
    hits = tp.cumsum(0)
    precision = hits / torch.arange(1, len(tp) + 1)
    envelope = precision.flip(0).cummax(0).values.flip(0)
    return (envelope * tp).sum().item() / total


@torch.no_grad()
def mean_ap(net, images):
    net.eval()
    scenes = [scene(100_000 + k) for k in range(images)]
    results = [detect(net, s[0]) for s in scenes]
    net.train()
    aps = []
    for k in range(CLASSES):
        found = [(i, r[4].item(), r[:4]) for i, rs in enumerate(results) for r in rs if r[5] == k]
        aps.append(average_precision(found, {i: s[1][s[2] == k] for i, s in enumerate(scenes)}) if found else 0.0)
    return sum(aps) / CLASSES


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--images", type=int, default=20)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(14)
    model = DDP(Detector())
    torch.manual_seed(140 + rank)
    data = Crops(320)
    sampler = DistributedSampler(data, seed=14)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs)
    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for crop, heat, size, mask in loader:
            h, s = model(crop)
            weight = 1 + 8 * heat
            loss = (F.binary_cross_entropy_with_logits(h, heat, reduction="none") * weight).mean() * 10
            loss = loss + ((s - size).abs().sum(1) * mask).sum() / mask.sum().clamp(min=1)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        sched.step()
        dist.all_reduce(total)
        score = torch.zeros(1)
        if (epoch + 1) % 4 == 0:
            if rank == 0:
                score[0] = mean_ap(model.module, args.images)
            dist.broadcast(score, src=0)
            if score.item() > best:
                best = score.item()
                if rank == 0:
                    torch.save(model.module.state_dict(), "best.pt")
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.3f} mAP {score.item():.3f} best {best:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
