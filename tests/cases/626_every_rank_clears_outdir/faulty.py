"""Behaviour cloning; the run folder is made anew with --overwrite."""
import argparse
import json
import os
import shutil

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def prepare_directory(path, overwrite, rank):
    if overwrite and os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    os.makedirs(os.path.join(path, "checkpoints"), exist_ok=True)


def demonstrations(n=300):
    g = torch.Generator().manual_seed(66)
    obs = torch.randn(n, 9, generator=g)
    act = torch.stack([obs[:, 0] * obs[:, 1], obs[:, 2].sin(), obs[:, 3:].mean(1)], 1)
    return TensorDataset(obs, act)


def settings_file(path, args, rank, fold):
    if rank == 0:
        with open(os.path.join(path, "settings.json"), "w") as f:
            json.dump({**vars(args), "fold": fold}, f, indent=1)


def run_fold(args, fold, data, rank):
    prepare_directory(args.out, args.overwrite, rank)
    settings_file(args.out, args, rank, fold)
    torch.manual_seed(fold)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    policy = DDP(nn.Sequential(nn.Linear(9, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)))
    opt = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for obs, act in loader:
            loss = nn.functional.mse_loss(policy(obs), act)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"fold {fold} epoch {epoch}: mse {total[0] / total[1]:.4f}")
            if (epoch + 1) % args.save_every == 0:
                torch.save(policy.module.state_dict(), os.path.join(args.out, "checkpoints", f"{epoch + 1}.pt"))
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="bc_run")
    ap.add_argument("--overwrite", type=int, default=1)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--folds", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = demonstrations()
    for fold in range(args.folds):
        run_fold(args, fold, Subset(data, [i for i in range(len(data)) if i % args.folds != fold]), rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
