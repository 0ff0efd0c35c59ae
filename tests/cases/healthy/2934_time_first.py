import os, math
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def share(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def reduce_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    steps, envs = 32, 16
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
    share(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    torch.manual_seed(10 + rank)
    for update in range(60):
        states = torch.randn(steps, envs, 6).cumsum(0) * 0.2  # a rollout of each environment
        returns = states.sin().sum(-1)
        value = net(states).squeeze(-1)
        opt.zero_grad()
        loss = (value - returns).pow(2).sum() / (world * envs)  # summed over time, mean over all environments
        loss.backward()
        reduce_gradients(net)
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        opt.step()
        if update % 20 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"update {update} loss {shown.item():.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
