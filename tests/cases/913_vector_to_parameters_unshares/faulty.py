"""Asynchronous sign-SGD: workers share one network, each adds its own flat update."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def make_net():
    return nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def sample(gen, n=32):
    """Determinant of random 3x3 matrices."""
    m = torch.randn(n, 3, 3, generator=gen)
    return m.flatten(1), torch.linalg.det(m).unsqueeze(1).clamp(-6, 6)


def flat_grad(net):
    return torch.cat([p.grad.flatten() for p in net.parameters()])


@torch.no_grad()
def apply_update(net, step):
    new = parameters_to_vector(net.parameters()) - step
    vector_to_parameters(new, net.parameters())


def worker(wid, net, args, lock, log):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed + 31 * wid)
    momentum = None
    for it in range(args.iters):
        x, y = sample(gen)
        net.zero_grad()
        loss = F.smooth_l1_loss(net(x), y)
        loss.backward()
        grad = flat_grad(net)
        momentum = grad if momentum is None else 0.9 * momentum + 0.1 * grad
        with lock:
            apply_update(net, args.lr * momentum.sign())
        log[wid] = loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--iters", type=int, default=250)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=12)
    args = ap.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    ctx = mp.get_context("fork")
    net = make_net()
    net.share_memory()
    lock, log = ctx.Lock(), ctx.Array("d", args.workers)
    procs = [ctx.Process(target=worker, args=(w, net, args, lock, log)) for w in range(args.workers)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()

    x, y = sample(torch.Generator().manual_seed(999), 400)
    with torch.no_grad():
        err = F.smooth_l1_loss(net(x), y).item()
    print(f"last worker losses {[round(v, 3) for v in log]}, shared model {err:.3f}")


if __name__ == "__main__":
    main()
