"""A checkpoint manager with rotation."""
import os
import shutil
import tempfile
from collections import deque

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CheckpointManager:
    def __init__(self, folder, keep):
        self.folder, self.keep, self.files = folder, keep, deque()

    def save(self, step, **objects):
        path = os.path.join(self.folder, f"step_{step:05d}.pt")
        torch.save({name: obj.state_dict() for name, obj in objects.items()} | {"step": step}, path)
        self.files.append(path)
        while len(self.files) > self.keep:
            old = self.files.popleft()
            if os.path.exists(old):
                try:
                    os.remove(old)
                except FileNotFoundError:
                    pass

    def latest(self):
        return self.files[-1] if self.files else None


def two_tone(n):
    g = torch.Generator().manual_seed(9)
    f = torch.randint(2, 8, (n, 2), generator=g).float()
    t = torch.linspace(0, 1, 30)
    x = torch.sin(6.2832 * f[:, :1] * t) + torch.sin(6.2832 * f[:, 1:] * t) + 0.1 * torch.randn(n, 30, generator=g)
    return TensorDataset(x, (f[:, 0] + f[:, 1]).unsqueeze(1) / 8)


def shared_folder(rank):
    box = [tempfile.mkdtemp(prefix="ckpt-") if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 15, 0.5)
    folder = shared_folder(rank)
    manager = CheckpointManager(folder, keep=2)
    data = two_tone(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16, sampler=sampler)
    step = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
        manager.save(step, model=net, optimizer=opt, scheduler=sched)
        dist.barrier()
    if rank == 0:
        print("left:", sorted(os.listdir(folder)), "latest:", os.path.basename(manager.latest()))
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
