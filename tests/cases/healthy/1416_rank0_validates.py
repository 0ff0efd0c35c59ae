"""Distillation; rank 0 alone validates on the plain module and tells the others whether to stop."""
import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def task(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, (x[:, :5].argmax(1) + (x[:, 5] > 0).long()) % 5)


def network(width):
    return nn.Sequential(nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 5))


def fit(model, loader, sampler, loss_fn, epochs, lr, after_epoch=None):
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for epoch in range(epochs):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_fn(model(x), x, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if after_epoch is not None and after_epoch(epoch):
            break
    return model


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--patience", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    train_set, val_set = task(480, 1), task(200, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=20, sampler=sampler)

    teacher = fit(DDP(network(128)), loader, sampler, lambda out, x, y: F.cross_entropy(out, y), 4, 5e-3).module
    for tensor in teacher.state_dict().values():
        dist.broadcast(tensor, src=0)
    teacher.eval().requires_grad_(False)

    student = DDP(network(32))
    state = {"best": float("inf"), "bad": 0, "weights": None}

    def distil(out, x, y):
        soft = F.softmax(teacher(x) / 2, dim=1)
        return F.cross_entropy(out, y) + F.kl_div(F.log_softmax(out / 2, dim=1), soft, reduction="batchmean")

    def decide(epoch):
        stop = torch.zeros(1)
        if rank == 0:
            net = student.module.eval()
            with torch.no_grad():
                val = F.cross_entropy(net(val_set.tensors[0]), val_set.tensors[1]).item()
            if val < state["best"]:
                state.update(best=val, bad=0, weights=copy.deepcopy(net.state_dict()))
            else:
                state["bad"] += 1
            stop += float(state["bad"] >= args.patience)
            print(f"epoch {epoch}: validation loss {val:.4f}", flush=True)
        dist.broadcast(stop, src=0)
        return bool(stop.item())

    fit(student, loader, sampler, distil, args.epochs, 4e-3, decide)
    if rank == 0:
        torch.save(state["weights"], "student.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
