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
        p.grad /= dist.get_world_size()


def main():
    """Federated, personal heads: first one model for all clients, then each client (a rank) fits a head to its own labels; the body goes on being shared."""
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(512, 8, generator=g)
    y = x @ torch.randn(8, 3, generator=torch.Generator().manual_seed(1)) + 0.5 * rank
    data = TensorDataset(x, y)  # a client's own
    torch.manual_seed(0)
    body, top = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 3)
    share(body)
    share(top)
    opt = torch.optim.SGD([*body.parameters(), *top.parameters()], lr=0.05)
    torch.manual_seed(10 + rank)
    loader = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    for epoch in range(4):
        personal = epoch >= 2
        for x, y in loader:
            opt.zero_grad()
            loss = F.mse_loss(top(body(x)), y)
            loss.backward()
            reduce_gradients(body)
            if not personal:
                reduce_gradients(top)
            opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item() / world:.4f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
