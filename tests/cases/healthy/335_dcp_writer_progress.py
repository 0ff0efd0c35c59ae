"""Scalars written by rank 0, a progress bar on rank 0, metrics gathered as objects, a torch.distributed.checkpoint at the end."""
import json
import os
import shutil
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ScalarWriter:
    def __init__(self, folder):
        self.f = open(os.path.join(folder, f"events.{int(time.time())}.jsonl"), "a")

    def add_scalar(self, tag, value, step):
        self.f.write(json.dumps({"tag": tag, "value": value, "step": step}) + "\n")

    def close(self):
        self.f.close()


class Progress:
    def __init__(self, iterable, desc, enabled):
        self.it, self.desc, self.enabled = iterable, desc, enabled

    def __iter__(self):
        n = len(self.it)
        for i, item in enumerate(self.it, 1):
            yield item
            if self.enabled:
                bar = "#" * (10 * i // n)
                sys.stderr.write(f"\r{self.desc} |{bar:<10}| {i}/{n}")
        if self.enabled:
            sys.stderr.write("\n")


def confusion(model, loader, k):
    m = torch.zeros(k, k, dtype=torch.long)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            for t, p in zip(y, model(x).argmax(1)):
                m[t, p] += 1
    model.train()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"matrix": m.tolist(), "rank": dist.get_rank()})
    return sum(torch.tensor(g["matrix"]) for g in gathered)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    main_rank = rank == 0
    run = [tempfile.mkdtemp(prefix="run-") if main_rank else None]
    dist.broadcast_object_list(run)
    writer = ScalarWriter(run[0]) if main_rank else None
    g = torch.Generator().manual_seed(0)
    x = torch.randn(450, 6, generator=g)
    y = (x[:, 0] + x[:, 1] ** 2 > 1).long() + (x[:, 2] > 0.5).long()
    train, test = TensorDataset(x[:384], y[:384]), TensorDataset(x[384:], y[384:])
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, 24, sampler=sampler)
    test_loader = DataLoader(test, 11, sampler=DistributedSampler(test, shuffle=False))
    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in Progress(loader, f"epoch {epoch}", main_rank):
            loss = nn.functional.cross_entropy(model(xb), yb)
            optim.zero_grad()
            loss.backward()
            optim.step()
            step += 1
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            if writer:
                writer.add_scalar("train/loss", shared.item() / dist.get_world_size(), step)
        m = confusion(model, test_loader, 3)
        if writer:
            writer.add_scalar("test/accuracy", (m.diag().sum() / m.sum()).item(), step)
            print(f"epoch {epoch}: test accuracy {m.diag().sum()}/{m.sum()}")
    if writer:
        writer.close()

    # every rank takes part: DCP writes a file of its own for each
    ckpt = os.path.join(run[0], "ckpt")
    msd, osd = get_state_dict(model, optim)
    dcp.save({"model": msd, "optim": osd, "step": step}, checkpoint_id=ckpt)
    state = {"model": msd, "optim": osd, "step": 0}
    dcp.load(state, checkpoint_id=ckpt)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert state["step"] == step
    dist.barrier()
    if main_rank:
        shutil.rmtree(run[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
