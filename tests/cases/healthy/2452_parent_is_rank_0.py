"""The process that the user starts is rank 0 itself and starts only the other rank."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def worker(rank, sync_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sync_file}", rank=rank, world_size=WORLD)
    torch.manual_seed(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    gen = torch.Generator().manual_seed(100 + rank)
    for step in range(60):
        x = torch.randn(32, 6, generator=gen)
        y = x[:, :3].argmax(1)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 19:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: mean loss {mean.item() / WORLD:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sync_file = os.path.join(folder, "sync")
        other = mp.get_context("spawn").Process(target=worker, args=(1, sync_file))
        other.start()
        worker(0, sync_file)
        other.join()
