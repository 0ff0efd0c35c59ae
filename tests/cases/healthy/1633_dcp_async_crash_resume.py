"""Asynchronous distributed checkpoints and an in-process restart after a (planned) failure.

The first attempt dies in the third epoch; the second one builds all objects anew (with another seed),
loads the last complete checkpoint and repeats only the epochs behind it. The saver has a process group of
its own so that its collectives cannot mix with those of training.
"""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, ROOT = 6, "dcp_out"


class NodeFailure(RuntimeError):
    pass


class TrainState(Stateful):
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched, self.epoch = model, opt, sched, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "optim": o, "sched": self.sched.state_dict(), "epoch": self.epoch}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.sched.load_state_dict(sd["sched"])
        self.epoch = sd["epoch"]


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    y = ((x[:, :5] * x[:, 5:]).sum(1) > 0).long() + 2 * (x[:, 0] > 0.3).long()
    return x, y


def attempt(number, rank, world, saver_group):
    torch.manual_seed(1 + number)
    net = nn.Sequential(nn.Linear(10, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 4))
    ddp = DDP(net)
    opt = torch.optim.AdamW(ddp.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.2)
    state = TrainState(ddp, opt, sched)
    done = sorted(d for d in os.listdir(ROOT) if os.path.exists(f"{ROOT}/{d}/.metadata"))
    if done:
        dcp.load({"app": state}, checkpoint_id=f"{ROOT}/{done[-1]}")
        if rank == 0:
            print(f"resumed from {done[-1]}, next epoch {state.epoch}", flush=True)
    ds = TensorDataset(*data(2400, 0))
    sampler = DistributedSampler(ds, seed=5)
    loader = DataLoader(ds, batch_size=40, sampler=sampler)
    pending = None
    for epoch in range(state.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        tot = torch.zeros(2)
        for i, (x, y) in enumerate(loader):
            opt.zero_grad()
            loss = F.cross_entropy(ddp(x), y)
            loss.backward()
            opt.step()
            tot += torch.tensor([loss.item() * len(y), float(len(y))])
            if number == 0 and epoch == 2 and i == 10:
                if pending is not None:
                    pending.result()
                raise NodeFailure("planned")
        sched.step()
        dist.all_reduce(tot)
        if rank == 0:
            print(f"attempt {number} epoch {epoch} loss {tot[0] / tot[1]:.4f}", flush=True)
        if pending is not None:
            pending.result()
        state.epoch = epoch + 1
        pending = dcp.async_save({"app": state}, checkpoint_id=f"{ROOT}/epoch{epoch:03d}",
                                 process_group=saver_group)
    pending.result()
    return net


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    saver_group = dist.new_group(backend="gloo")
    if rank == 0:
        os.makedirs(ROOT, exist_ok=True)
    dist.barrier()
    net = None
    for number in range(2):
        try:
            net = attempt(number, rank, world, saver_group)
            break
        except NodeFailure as err:
            if rank == 0:
                print(f"attempt {number} failed: {err}; restarting", flush=True)
            dist.barrier()
    net.eval()
    x, y = data(500, 1)
    good = torch.zeros(1)
    with torch.no_grad():
        good += (net(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(good)
    if rank == 0:
        print(f"test accuracy {good.item() / 500:.3f}")
    assert good.item() / 500 > 0.65
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
