"""Joint segmentation and depth with a shared trunk: uncertainty-weighted losses, two optimizers, two schedules."""
import math
import os
from typing import Dict, Iterator, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

SIDE, SHAPES = 16, 4  # background, disc, square, cross
CONFIG = dict(epochs=5, batch=16, train=640, valid=151, trunk_lr=8e-3, head_lr=0.05, seed=12)


def render(n: int, seed: int) -> Tuple[Tensor, Tensor, Tensor]:
    """Images with one shape each, its mask, and a depth map: a tilted plane with the shape in front."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(SIDE).float(), torch.arange(SIDE).float(), indexing="ij")
    kind = torch.randint(1, SHAPES, (n, 1, 1), generator=g)
    cy, cx = (4 + 8 * torch.rand(n, 1, 1, generator=g) for _ in range(2))
    dy, dx = (yy - cy).abs(), (xx - cx).abs()
    inside = torch.where(kind == 1, dy ** 2 + dx ** 2 < 12,
                         torch.where(kind == 2, torch.maximum(dy, dx) < 3, (torch.minimum(dy, dx) < 1.2) & (dy + dx < 5)))
    mask = torch.where(inside, kind, torch.zeros_like(kind))
    tilt = torch.rand(n, 1, 1, generator=g) * 0.06
    depth = 1 + tilt * yy - 0.5 * inside
    shade = torch.stack([1 / depth, inside * 0.8 + 0.1 * xx / SIDE, tilt * 10 * yy / SIDE], dim=1)
    return shade + 0.15 * torch.randn(n, 3, SIDE, SIDE, generator=g), mask, depth


class MultiTask(nn.Module):
    """forward() returns the losses, so that every parameter, the task weights included, is used inside it."""

    def __init__(self, width: int = 24):
        super().__init__()

        def block(cin, cout, dilation=1):
            return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=dilation, dilation=dilation),
                                 nn.GroupNorm(4, cout), nn.ReLU())

        self.trunk = nn.Sequential(block(3, width), block(width, width, 2), block(width, width, 3))
        self.heads = nn.ModuleDict({"seg": nn.Conv2d(width, SHAPES, 1), "depth": nn.Conv2d(width, 1, 1)})
        self.log_var = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in self.heads})

    def predict(self, image: Tensor) -> Dict[str, Tensor]:
        features = self.trunk(image)
        return {name: head(features) for name, head in self.heads.items()}

    def forward(self, image: Tensor, mask: Tensor, depth: Tensor) -> Tuple[Tensor, Dict[str, Tensor]]:
        out = self.predict(image)
        losses = {"seg": F.cross_entropy(out["seg"], mask), "depth": F.l1_loss(out["depth"].squeeze(1), depth)}
        total = sum(torch.exp(-self.log_var[k]) * v + self.log_var[k] for k, v in losses.items())
        return total, {k: v.detach() for k, v in losses.items()}


def shard_batches(n: int, batch: int, epoch: int, rank: int, world: int) -> Iterator[Tensor]:
    """One permutation for all ranks, whole global batches only, each rank its slice."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(CONFIG["seed"] + epoch))
    for chunk in order.split(batch * world):
        if len(chunk) == batch * world:
            yield chunk[rank * batch:(rank + 1) * batch]


@torch.no_grad()
def validate(model: MultiTask, data, rank: int, world: int) -> Tuple[float, float]:
    model.eval()
    image, mask, depth = (t[rank::world] for t in data)
    confusion = torch.zeros(SHAPES, SHAPES, dtype=torch.long)
    error = torch.zeros(2, dtype=torch.float64)
    for i in range(0, len(image), 32):
        out = model.predict(image[i:i + 32])
        pairs = mask[i:i + 32] * SHAPES + out["seg"].argmax(1)
        confusion += torch.bincount(pairs.flatten(), minlength=SHAPES ** 2).view(SHAPES, SHAPES)
        difference = (out["depth"].squeeze(1) - depth[i:i + 32]).abs()
        error += torch.tensor([difference.sum().item(), difference.numel()], dtype=torch.float64)
    dist.all_reduce(confusion)  # counts, not ratios, are summed over the ranks
    dist.all_reduce(error)
    model.train()
    hit = confusion.diag().double()
    iou = hit / (confusion.sum(0) + confusion.sum(1) - hit).clamp_min(1)
    return iou.mean().item(), (error[0] / error[1]).item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(CONFIG["seed"])
    ddp = DistributedDataParallel(MultiTask())
    net = ddp.module

    optimizers = {
        "trunk": torch.optim.AdamW([{"params": net.trunk.parameters()},
                                    {"params": net.log_var.parameters(), "weight_decay": 0.0}], lr=CONFIG["trunk_lr"]),
        "heads": torch.optim.SGD(net.heads.parameters(), lr=CONFIG["head_lr"], momentum=0.9),
    }
    steps = CONFIG["epochs"] * (CONFIG["train"] // (CONFIG["batch"] * world))
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizers["trunk"], lambda s: 0.5 + 0.5 * math.cos(math.pi * s / steps)),
        torch.optim.lr_scheduler.StepLR(optimizers["heads"], step_size=steps // 2, gamma=0.3),
    ]
    train, valid = render(CONFIG["train"], seed=1), render(CONFIG["valid"], seed=2)

    for epoch in range(CONFIG["epochs"]):
        sums, count = torch.zeros(3), 0
        for idx in shard_batches(CONFIG["train"], CONFIG["batch"], epoch, rank, world):
            total, parts = ddp(*(t[idx] for t in train))
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            total.backward()
            for optimizer in optimizers.values():
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            sums += torch.stack([total.detach(), parts["seg"], parts["depth"]])
            count += 1
        dist.all_reduce(sums)
        sums /= count * world
        miou, mae = validate(net, valid, rank, world)
        if rank == 0:
            weights = {k: round(math.exp(-v.item()), 2) for k, v in net.log_var.items()}
            print(f"epoch {epoch} total {sums[0]:.3f} seg {sums[1]:.3f} depth {sums[2]:.3f} | mIoU {miou:.3f} "
                  f"MAE {mae:.3f} weights {weights}", flush=True)

    if rank == 0:
        os.makedirs("multitask", exist_ok=True)
        torch.save(net.state_dict(), "multitask/model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
