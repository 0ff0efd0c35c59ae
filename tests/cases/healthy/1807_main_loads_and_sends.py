"""Two-part run; the stored state is read by one process and sent to the others."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def problem(n=320):
    g = torch.Generator().manual_seed(41)
    x = torch.randn(n, 8, generator=g)
    return TensorDataset(x, torch.stack([x[:, :4].prod(1), x[:, 4:].sum(1)], 1))


def build(seed):
    torch.manual_seed(seed)
    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
    return model, torch.optim.Adam(model.parameters(), lr=4e-3)


def receive(path, model, opt, rank):
    box = [None]
    if rank == 0:
        state = torch.load(path, map_location="cpu")
        model.module.load_state_dict(state["model"])
        box[0] = (state["opt"], state["next"])
    dist.broadcast_object_list(box, src=0)
    for p in model.module.parameters():
        dist.broadcast(p.data, src=0)
    opt.load_state_dict(box[0][0])
    return box[0][1]


def run(model, opt, epochs, rank):
    data = problem()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in epochs:
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--state", default="state.pt")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model, opt = build(1)
    run(model, opt, range(0, 3), rank)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "next": 3}, args.state)
    model, opt = build(2)
    start = receive(args.state, model, opt, rank)
    run(model, opt, range(start, start + 3), rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
