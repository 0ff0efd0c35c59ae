"""Binary event writer in the manner of TensorBoard, used from a callback."""
import datetime
import json
import os
import pathlib
import struct
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EventWriter:
    def __init__(self, root="runs", comment=""):
        stamp = datetime.datetime.now().strftime("%b%d_%H-%M-%S.%f")
        self.log_dir = pathlib.Path(root) / f"{stamp}{comment}"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.file = open(self.log_dir / f"events.out.{os.getpid()}", "wb")

    def add_scalar(self, tag, value, step):
        body = json.dumps({"tag": tag, "value": float(value), "step": step}).encode()
        self.file.write(struct.pack("<QI", len(body), zlib.crc32(body)) + body)

    def close(self):
        self.file.close()


class LogMetrics:
    def __init__(self, every=5):
        self.writer, self.every = EventWriter(comment="_mlp"), every

    def after_step(self, state):
        if state["step"] % self.every == 0:
            self.writer.add_scalar("train/loss", state["loss"], state["step"])
            self.writer.add_scalar("train/lr", state["lr"], state["step"])

    def after_epoch(self, state):
        self.writer.add_scalar("epoch/accuracy", state["accuracy"], state["step"])
        self.writer.file.flush()

    def finish(self):
        self.writer.close()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 14, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, x[:, :7].sum(1).gt(x[:, 7:].sum(1)).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(14, 20), nn.ReLU(), nn.Linear(20, 2)))
    opt = torch.optim.SGD(model.parameters(), lr=0.2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5 * len(loader))
    callback = LogMetrics()
    state = {"step": 0}
    for epoch in range(5):
        sampler.set_epoch(epoch)
        counts = torch.zeros(2)
        for xb, yb in loader:
            out = model(xb)
            loss = nn.functional.cross_entropy(out, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            counts += torch.tensor([(out.argmax(1) == yb).sum().item(), len(yb)])
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            state.update(step=state["step"] + 1, loss=mean.item(), lr=sched.get_last_lr()[0])
            callback.after_step(state)
        dist.all_reduce(counts)
        state["accuracy"] = (counts[0] / counts[1]).item()
        callback.after_epoch(state)
    callback.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        print("event folders:", len(list(pathlib.Path("runs").iterdir())), "accuracy", state["accuracy"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
