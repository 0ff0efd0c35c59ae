"""Detection-like loss: box error is summed over all objects and normalised by the batch, as in the reference code."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Hyper:
    images_per_batch: int = 24
    epochs: int = 4
    lr: float = 0.04
    box_weight: float = 2.0
    slots: int = 3

    def per_process(self):
        return self.images_per_batch // dist.get_world_size()


class BoxNet(nn.Module):
    def __init__(self, slots):
        super().__init__()
        self.slots = slots
        self.body = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.out = nn.Linear(64, slots * 5)

    def forward(self, x):
        out = self.out(self.body(x)).view(-1, self.slots, 5)
        return out[..., :4], out[..., 4]


class SetLoss:
    def __init__(self, hyper):
        self.hyper = hyper
        self.norm = hyper.images_per_batch

    def boxes(self, pred, target, present):
        err = F.smooth_l1_loss(pred, target, reduction="none").sum(-1)
        return (err * present).sum() / self.norm

    def objectness(self, score, present):
        return F.binary_cross_entropy_with_logits(score, present, reduction="sum") / self.norm

    def __call__(self, out, target, present):
        pred, score = out
        return self.hyper.box_weight * self.boxes(pred, target, present) + self.objectness(score, present)


def scenes(slots, n=360):
    gen = torch.Generator().manual_seed(29)
    present = (torch.rand(n, slots, generator=gen) < 0.6).float()
    boxes = torch.rand(n, slots, 4, generator=gen)
    code = torch.randn(slots * 5, 30, generator=gen) / 3
    x = torch.cat([boxes * present[..., None], present[..., None]], -1).flatten(1) @ code
    return TensorDataset(x, boxes, present)


def main():
    hyper = Hyper()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(BoxNet(hyper.slots))
    loss_fn = SetLoss(hyper)
    optimizer = torch.optim.SGD(model.parameters(), lr=hyper.lr, momentum=0.9)
    data = scenes(hyper.slots)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=hyper.per_process(), sampler=sampler)
    for epoch in range(hyper.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for x, boxes, present in loader:
            loss = loss_fn(model(x), boxes, present)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meter += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}: loss per image {(meter[0] / meter[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
