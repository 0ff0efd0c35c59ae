"""A small VAE on synthetic curves: functional style, parameter groups, gradients averaged as one flat vector, KL warm-up, best model by global loss."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

def curves(n, seed):
    g = torch.Generator().manual_seed(seed)
    phase, freq = torch.rand(n, 1, generator=g) * math.tau, 1 + 2 * torch.rand(n, 1, generator=g)
    t = torch.linspace(0, 1, 32)
    return torch.sin(math.tau * freq * t + phase) + 0.05 * torch.randn(n, 32, generator=g)

def make():
    torch.manual_seed(0)
    return nn.ModuleDict({"enc": nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8)), "dec": nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 32))})

def elbo(m, x, beta, noise):
    mu, logvar = m["enc"](x).chunk(2, 1)
    z = mu + torch.exp(0.5 * logvar) * torch.randn(mu.shape, generator=noise)
    return F.mse_loss(m["dec"](z), x, reduction="sum") / len(x), beta * -0.5 * (1 + logvar - mu**2 - logvar.exp()).sum(1).mean()

def sync(m):
    flat = torch.cat([p.grad.flatten() for p in m.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    at = 0
    for p in m.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p)); at += p.numel()

def main():
    torch.set_num_threads(1); dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
    m = make(); noise = torch.Generator().manual_seed(77 + rank)
    opt = torch.optim.AdamW([{"params": m["enc"].parameters(), "lr": 2e-3}, {"params": m["dec"].parameters(), "lr": 3e-3, "weight_decay": 0.0}])
    train, valid = curves(1024, 1), curves(257, 2)
    best, keep = float("inf"), None
    for epoch in range(6):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        for idx in order[: len(order) // (world * 32) * world * 32].view(-1, world, 32)[:, rank]:
            rec, kl = elbo(m, train[idx], min(1.0, epoch / 4), noise)
            opt.zero_grad(); (rec + kl).backward(); sync(m); opt.step()
        with torch.no_grad():
            mine = valid[rank::world]
            mu = m["enc"](mine).chunk(2, 1)[0]
            total = torch.stack([F.mse_loss(m["dec"](mu), mine, reduction="sum"), torch.tensor(float(len(mine)))])
        dist.all_reduce(total); score = float(total[0] / total[1])
        if score < best:
            best, keep = score, parameters_to_vector(m.parameters()).detach().clone()
        if rank == 0: print(f"epoch {epoch} valid {score:.3f} best {best:.3f}", flush=True)
    vector_to_parameters(keep, m.parameters())
    if rank == 0: torch.save(m.state_dict(), "vae.pt")
    dist.barrier(); dist.destroy_process_group()

if __name__ == "__main__":
    main()
