# nproc: 1 (forks two workers)
"""A3C-style: a shared model, a SharedAdam whose moments live in shared memory, workers with local copies, one lock."""
import torch
import torch.multiprocessing as mp
from torch import nn


class SharedAdam(torch.optim.Adam):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg_sq"] = torch.zeros_like(p)

    def share_memory(self):
        for state in self.state.values():
            for t in state.values():
                t.share_memory_()


def make_net():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))


def batch(gen, n=32):
    x = torch.randn(n, 6, generator=gen)
    return x, (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3]


def worker(index, shared, optimizer, lock, steps):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(100 + index)
    local = make_net()
    for _ in range(steps):
        with lock:
            local.load_state_dict(shared.state_dict())
        x, y = batch(gen)
        local.zero_grad()
        nn.functional.mse_loss(local(x), y).backward()
        with lock:
            for s, l in zip(shared.parameters(), local.parameters()):
                s.grad = l.grad.clone()
            optimizer.step()


def evaluate(net):
    with torch.no_grad():
        x, y = batch(torch.Generator().manual_seed(9), 500)
        return nn.functional.mse_loss(net(x), y).item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ctx = mp.get_context("fork")
    shared = make_net()
    shared.share_memory()
    optimizer = SharedAdam(shared.parameters(), lr=1e-2)
    optimizer.share_memory()
    lock = ctx.Lock()
    before = evaluate(shared)
    workers = [ctx.Process(target=worker, args=(i, shared, optimizer, lock, 30)) for i in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
        assert w.exitcode == 0
    print(f"mse before {before:.4f} after {evaluate(shared):.4f}")


if __name__ == "__main__":
    main()
