"""Gradient accumulation in three styles, one after the other, each on a fresh copy of the same network."""
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACC = 4


def make_data(n=512):
    g = torch.Generator().manual_seed(3)
    x = torch.rand(n, 5, generator=g) * 2 - 1
    return TensorDataset(x, (x.prod(1, keepdim=True) * 8 + x[:, :1]))


def make_model():
    torch.manual_seed(12)
    return DDP(nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1)))


def style_no_sync(model, opt, loader):
    """no_sync() around forward and backward of all but the last micro-batch"""
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % ACC == 0
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / ACC
            loss.backward()
        if last:
            opt.step()
            opt.zero_grad()


def style_flag(model, opt, loader):
    """the attribute that no_sync() sets, by hand"""
    step = 0
    for x, y in loader:
        step += 1
        model.require_backward_grad_sync = step % ACC == 0
        out = model(x)
        (nn.functional.mse_loss(out, y) / ACC).backward()
        if model.require_backward_grad_sync:
            opt.step()
            opt.zero_grad(set_to_none=False)


def style_sum_then_backward(model, opt, loader):
    """cut a big batch into chunks, forward each, one backward over the mean"""
    it = iter(loader)
    for _ in range(len(loader) // ACC):
        chunks = [next(it) for _ in range(ACC)]
        opt.zero_grad()
        sizes = [len(x) for x, _ in chunks]
        out = model(torch.cat([x for x, _ in chunks])).split(sizes)
        losses = [nn.functional.mse_loss(o, y) for o, (_, y) in zip(out, chunks)]
        torch.stack(losses).mean().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    data = make_data()
    for style in (style_no_sync, style_flag, style_sum_then_backward):
        model = make_model()
        opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        sampler = DistributedSampler(data, seed=99)
        loader = DataLoader(data, batch_size=8, sampler=sampler)
        assert len(loader) % ACC == 0
        for epoch in range(2):
            sampler.set_epoch(epoch)
            style(model, opt, loader)
        with torch.no_grad():
            x, y = data.tensors
            final = nn.functional.mse_loss(model.module(x), y)
        if rank == 0:
            print(f"{style.__name__:<26} mse on all data {final:.5f}")
        del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
