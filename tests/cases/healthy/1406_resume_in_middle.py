"""Stops in the middle of an epoch, goes on with the remaining batches after a restart; frozen teacher, averaged weights."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Rest(BatchSampler):
    """Batches of an epoch without the first few."""

    def __init__(self, sampler, batch_size):
        super().__init__(sampler, batch_size, drop_last=True)
        self.skip = 0

    def __iter__(self):
        for i, batch in enumerate(super().__iter__()):
            if i >= self.skip:
                yield batch


def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 3))


def session(first, last, path="mid.pt", per_epoch=8):
    rank = dist.get_rank()
    torch.manual_seed(1)
    teacher = net(40).requires_grad_(False)
    student = DDP(net(16))
    ema = AveragedModel(student.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    opt = torch.optim.Adam(student.parameters(), lr=1e-2)
    if os.path.exists(path):
        saved = torch.load(path)
        student.module.load_state_dict(saved["student"])
        ema.load_state_dict(saved["ema"])
        opt.load_state_dict(saved["opt"])
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(5))
    sampler = DistributedSampler(TensorDataset(x))
    batches = Rest(sampler, 16)
    loader = DataLoader(TensorDataset(x), batch_sampler=batches)
    step = first
    while step < last:
        epoch, batches.skip = divmod(step, per_epoch)
        sampler.set_epoch(epoch)
        for (b,) in loader:
            loss = nn.functional.mse_loss(student(b), teacher(b))
            opt.zero_grad()
            loss.backward()
            opt.step()
            ema.update_parameters(student.module)
            step += 1
            if step == last:
                break
        if rank == 0:
            print(f"epoch {epoch} until step {step}: loss {loss.item():.4f}", flush=True)
    if rank == 0:
        torch.save({"student": student.module.state_dict(), "ema": ema.state_dict(), "opt": opt.state_dict()}, path)
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    session(0, 20)
    session(20, 40)
    dist.destroy_process_group()
