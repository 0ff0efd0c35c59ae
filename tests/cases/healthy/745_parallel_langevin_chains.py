"""Bayesian network by SGLD: every process runs its own chain from its own start; samples are pooled, R-hat is computed across chains."""
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


def data():
    g = torch.Generator().manual_seed(2)
    x = torch.rand(300, 1, generator=g) * 4 - 2
    return x, torch.sin(2 * x) + 0.2 * torch.randn(300, 1, generator=g)


def main(burn=150, keep=150, thin=5, noise=0.2, eps=2e-4):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data()
    grid = torch.linspace(-2, 2, 9)[:, None]
    torch.manual_seed(100 + rank)
    net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
    draws = []
    for it in range(burn + keep):
        idx = torch.randint(0, len(x), (60,))
        nll = 0.5 / noise**2 * (net(x[idx]) - y[idx]).pow(2).sum() * len(x) / 60
        prior = 0.5 * sum(p.pow(2).sum() for p in net.parameters())
        net.zero_grad()
        (nll + prior).backward()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(-0.5 * eps * p.grad.clamp(-200, 200)).add_(torch.randn_like(p), alpha=eps**0.5)
        if it >= burn and it % thin == 0:
            draws.append({k: v.detach().clone() for k, v in net.named_parameters()})
        if it % 75 == 0:
            print(f"chain {rank} iteration {it}: potential {(nll + prior).item():.1f}", flush=True)
    with torch.no_grad():
        f = torch.stack([functional_call(net, d, (grid,)).squeeze(1) for d in draws])
    chains = [torch.empty_like(f) for _ in range(world)]
    dist.all_gather(chains, f)
    allf = torch.stack(chains)
    within, between = allf.var(1).mean(0), allf.mean(1).var(0)
    if rank == 0:
        print("R-hat", ((within + between) / within).sqrt().numpy().round(2), "mean", allf.mean((0, 1)).numpy().round(2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
