"""CLIP-style contrastive training with a gather that lets gradients through, a straight-through code book, learned temperature, bf16 autocast."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class SignST(torch.autograd.Function):
    """sign forward, identity backward where |x| < 1"""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class Dual(nn.Module):
    def __init__(self, bits=32):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, bits))
        self.text = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, bits))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.1)))

    def forward(self, image, text):
        a, b = SignST.apply(torch.tanh(self.image(image))), torch.tanh(self.text(text))
        return F.normalize(a.float(), dim=1), F.normalize(b.float(), dim=1), self.logit_scale.exp()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = Dual()
    model = DDP(net)
    g = torch.Generator().manual_seed(0)
    latent = torch.randn(384, 6, generator=g)
    image = latent @ torch.randn(6, 40, generator=g) + 0.1 * torch.randn(384, 40, generator=g)
    text = latent @ torch.randn(6, 12, generator=g)
    data = TensorDataset(image, text)
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for im, tx in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                a, b, scale = model(im, tx)
            all_a, all_b = GatherWithGrad.apply(a), GatherWithGrad.apply(b)
            target = torch.arange(len(a)) + rank * len(a)
            logits_a, logits_b = scale * a @ all_b.T, scale * b @ all_a.T
            # each rank scores its own rows against everybody's columns; DDP's mean of these means is the global loss
            loss = (F.cross_entropy(logits_a, target) + F.cross_entropy(logits_b, target)) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                net.logit_scale.clamp_(0, math.log(100))
            meter += torch.stack([loss.detach(), (logits_a.argmax(1) == target).float().mean()])
        dist.all_reduce(meter)
        meter /= world * len(loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {meter[0]:.4f} retrieval {meter[1]:.3f} scale {net.logit_scale.exp().item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
