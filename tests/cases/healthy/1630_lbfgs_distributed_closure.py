"""Full-batch LBFGS with strong-Wolfe line search; the closure all-reduces the loss and the gradient.

As each rank sees the same global loss and gradient, all line searches make the same decisions. The
shards are not equally long, so sums are reduced and divided by the global count. Double precision.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def poly_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=g, dtype=torch.float64) * 2 - 1
    y = torch.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2] ** 3 + 0.05 * torch.randn(n, generator=g, dtype=torch.float64)
    return x, y.unsqueeze(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = poly_data(1501, 3)
    xv, yv = poly_data(301, 4)
    x, y = x[rank::world], y[rank::world]  # 751 and 750
    count = torch.tensor(float(len(x)), dtype=torch.float64)
    dist.all_reduce(count)
    torch.manual_seed(10)
    net = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    params = list(net.parameters())
    opt = torch.optim.LBFGS(params, lr=1.0, max_iter=6, history_size=12, line_search_fn="strong_wolfe")
    l2 = 1e-5
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        part = F.mse_loss(net(x), y, reduction="sum") / count
        part.backward()
        pack = torch.cat([p.grad.flatten() for p in params] + [part.detach().view(1)])
        dist.all_reduce(pack)
        at = 0
        loss = pack[-1].clone()
        with torch.no_grad():
            for p in params:
                p.grad.copy_(pack[at:at + p.numel()].view_as(p) + 2 * l2 * p)
                at += p.numel()
                loss += l2 * p.pow(2).sum()
        return loss

    first = last = None
    for step in range(30):
        value = opt.step(closure).item()
        first = value if first is None else first
        last = value
        if rank == 0 and step % 6 == 5:
            print(f"step {step} objective {value:.6f} ({calls} evaluations)", flush=True)

    net.eval()
    err = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        mine = slice(rank, None, world)
        err += torch.tensor([F.mse_loss(net(xv[mine]), yv[mine], reduction="sum").item(),
                             float(len(xv[mine]))], dtype=torch.float64)
    dist.all_reduce(err)
    mse = (err[0] / err[1]).item()
    if rank == 0:
        print(f"objective {first:.4f} -> {last:.5f}, test mse {mse:.5f}")
        torch.save(net.state_dict(), "lbfgs.pt")
    assert mse < 0.02
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
