"""Contrastive two-tower training; collectives through torch.distributed._functional_collectives."""
import argparse
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)),
                          "b": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))})


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=80)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    w = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))
    gen = torch.Generator().manual_seed(100 + rank)
    for step in range(args.steps):
        x = torch.randn(32, 16, generator=gen)
        y = x @ w + 0.1 * torch.randn(32, 16, generator=gen)
        za, zb = F.normalize(model["a"](x), dim=1), F.normalize(model["b"](y), dim=1)
        all_b = fc.all_gather_single_autograd(zb, 0, dist.group.WORLD)
        logits = za @ all_b.t() / 0.1
        target = torch.arange(32) + 32 * rank
        loss = F.cross_entropy(logits, target)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.grad = fc.wait_tensor(fc.all_reduce(p.grad, "sum", dist.group.WORLD)) / world
        opt.step()
        acc = (logits.argmax(1) == target).float().mean()
        if step % 20 == 19 or acc > 0.25:
            mean = fc.wait_tensor(fc.all_reduce(torch.stack([loss.detach(), acc]), "sum", dist.group.WORLD)) / world
            if rank == 0:
                print(f"step {step} loss {mean[0]:.3f} acc {mean[1]:.3f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "towers.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
