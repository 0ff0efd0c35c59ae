"""Four processes train together; then two of them leave, and the others go on in a process group of their own with samplers of its size."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data():
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(480, 8, generator=gen)
    return TensorDataset(x, (x @ torch.arange(8.0).unsqueeze(1)) * 0.1)


def train(net, rank, world, epochs):
    model = DistributedDataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    data = make_data()
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=world)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(x), float(len(x))])
        dist.all_reduce(total)
        if rank == 0:
            print(f"{world} ranks, epoch {epoch}: mean loss {total[0] / total[1]:.4f}", flush=True)


def worker(rank, folder):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    for world, epochs in ((4, 2), (2, 3)):
        if rank >= world:
            break
        dist.init_process_group("gloo", init_method=f"file://{folder}/of{world}", rank=rank, world_size=world)
        train(net, rank, world, epochs)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(os.path.abspath(folder),), nprocs=4, join=True)
