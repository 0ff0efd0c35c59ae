"""Lock-free least squares: several processes update one shared model, in double precision if asked."""
import argparse
import multiprocessing

import torch
from torch import nn


class Quadratic(nn.Module):
    """Linear plus pairwise terms of the inputs."""

    def __init__(self, inputs=10):
        super().__init__()
        self.linear = nn.Linear(inputs, 1)
        self.pair = nn.Parameter(torch.zeros(inputs, inputs))

    def forward(self, x):
        return self.linear(x).squeeze(1) + torch.einsum("bi,ij,bj->b", x, self.pair, x)


def truth(x):
    return 1.5 * x[:, 0] - x[:, 3] + 2 * x[:, 1] * x[:, 2] - x[:, 5] * x[:, 5] + 0.5


def sample(n, gen, dtype):
    x = torch.randn(n, 10, generator=gen, dtype=dtype)
    return x, truth(x)


class Worker:
    def __init__(self, number, model, args, dtype, results):
        self.number, self.model, self.args, self.dtype, self.results = number, model, args, dtype, results

    def __call__(self):
        torch.set_num_threads(1)
        gen = torch.Generator().manual_seed(10 * self.args.seed + self.number)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.lr)
        first = last = None
        for _ in range(self.args.updates):
            x, y = sample(self.args.batch, gen, self.dtype)
            loss = nn.functional.mse_loss(self.model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last = loss.item()
            first = last if first is None else first
        self.results.put((self.number, first, last))


@torch.no_grad()
def test_error(model, dtype):
    x, y = sample(4000, torch.Generator().manual_seed(999), dtype)
    return nn.functional.mse_loss(model(x), y).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--processes", type=int, default=2)
    ap.add_argument("--updates", type=int, default=600)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    model = Quadratic()
    model.to(dtype)
    model.share_memory()
    before = test_error(model, dtype)

    ctx = multiprocessing.get_context("fork")
    results = ctx.SimpleQueue()
    crew = [ctx.Process(target=Worker(n, model, args, dtype, results)) for n in range(args.processes)]
    for p in crew:
        p.start()
    for p in crew:
        p.join()
        if p.exitcode:
            raise SystemExit(f"worker ended with {p.exitcode}")
    for _ in crew:
        number, first, last = results.get()
        print(f"worker {number}: loss {first:.3f} -> {last:.3f}")
    print(f"test error {before:.3f} -> {test_error(model, dtype):.3f}")
    torch.save(model.state_dict(), "quadratic.pt")


if __name__ == "__main__":
    main()
