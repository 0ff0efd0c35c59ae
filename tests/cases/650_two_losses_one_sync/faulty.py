"""Multi-task tabular model, two backward passes, flattened manual averaging."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.price = nn.Linear(24, 1)
        self.group = nn.Linear(24, 4)


def sync(model):
    params = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([p.grad.view(-1) for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    start = 0
    for p in params:
        p.grad.copy_(flat[start : start + p.numel()].view_as(p))
        start += p.numel()


def table(n=360):
    g = torch.Generator().manual_seed(33)
    x = torch.randn(n, 9, generator=g)
    return x, x[:, :3].sum(1) + x[:, 3].pow(2), (x[:, 4:8]).argmax(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=18)
    ap.add_argument("--aux", type=float, default=0.3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = MultiTask()
    vec = parameters_to_vector(model.parameters()).detach().clone()
    dist.broadcast(vec, src=0)
    vector_to_parameters(vec, model.parameters())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, price, group = table()
    for epoch in range(args.epochs):
        mine = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::world]
        s = torch.zeros(3)
        for idx in mine.split(args.batch_size):
            opt.zero_grad()
            h = model.trunk(x[idx])
            main_loss = nn.functional.smooth_l1_loss(model.price(h).squeeze(1), price[idx])
            main_loss.backward(retain_graph=True)
            sync(model)
            aux_loss = nn.functional.cross_entropy(model.group(h), group[idx])
            (args.aux * aux_loss).backward()
            opt.step()
            s += torch.tensor([main_loss.item(), aux_loss.item(), 1.0])
        dist.all_reduce(s)
        if rank == 0:
            print(f"epoch {epoch}: price {s[0] / s[2]:.4f} group {s[1] / s[2]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
