import itertools
import logging
import os
import sys
from typing import Optional

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.sampler import Sampler

# detectron2-like: an endless sampler with a common seed, striped over the ranks; "iterations" instead of epochs; logger per rank


def setup_logger(rank):
    lg = logging.getLogger("det")
    lg.setLevel(logging.INFO)
    lg.propagate = False
    h = logging.StreamHandler(sys.stdout) if rank == 0 else logging.NullHandler()
    h.setFormatter(logging.Formatter("[%(asctime)s %(name)s]: %(message)s", "%H:%M:%S"))
    lg.addHandler(h)
    return lg


def shared_random_seed():
    box = [int.from_bytes(os.urandom(4), "little")]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class TrainingSampler(Sampler):
    def __init__(self, size: int, seed: Optional[int] = None):
        self._size = size
        self._seed = shared_random_seed() if seed is None else seed
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        yield from itertools.islice(self._infinite(), self._rank, None, self._world)

    def _infinite(self):
        g = torch.Generator()
        g.manual_seed(self._seed)
        while True:
            yield from torch.randperm(self._size, generator=g).tolist()


class Boxes(Dataset):
    def __init__(self, n=300):
        g = torch.Generator().manual_seed(1)
        self.box = torch.rand(n, 4, generator=g) * 0.5 + 0.25
        self.cls = torch.randint(0, 3, (n,), generator=g)
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        img = torch.zeros(3, 16, 16)
        cx, cy, w, h = (self.box[i] * 15).round().int().tolist()
        img[self.cls[i], max(cy - h // 4, 0): cy + h // 4 + 1, max(cx - w // 4, 0): cx + w // 4 + 1] = 1.0
        return img, self.box[i], self.cls[i]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.cls_score = nn.Linear(512, 3)
        self.bbox_pred = nn.Linear(512, 4)

    def forward(self, images, boxes=None, classes=None):
        f = self.conv(images)
        logits, deltas = self.cls_score(f), self.bbox_pred(f)
        if not self.training:
            return logits.argmax(1), deltas
        return {"loss_cls": F.cross_entropy(logits, classes), "loss_box_reg": 5 * F.smooth_l1_loss(deltas, boxes, beta=0.1)}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    log = setup_logger(rank)
    torch.manual_seed(shared_random_seed() % 1000 + rank)
    model = DistributedDataParallel(Detector(), broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 10) * (0.1 if i > 60 else 1.0))
    it = iter(DataLoader(Boxes(), batch_size=12, sampler=TrainingSampler(300), drop_last=True))
    for i in range(80):
        img, box, cls = next(it)
        loss_dict = model(img, box, cls)
        losses = sum(loss_dict.values())
        opt.zero_grad()
        losses.backward()
        opt.step()
        warm.step()
        if (i + 1) % 20 == 0:
            keys = sorted(loss_dict)
            v = torch.stack([loss_dict[k].detach() for k in keys])
            dist.reduce(v, dst=0)
            if rank == 0:
                v /= world
                log.info("iter %d %s lr %.4f", i + 1, " ".join(f"{k}: {x:.3f}" for k, x in zip(keys, v.tolist())), opt.param_groups[0]["lr"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
