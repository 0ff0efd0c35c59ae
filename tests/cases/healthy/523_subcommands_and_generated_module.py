"""Command-line tool: train | export | both (default)."""
import argparse
import csv
import importlib
import json
import os
import pathlib
import sys
import tempfile
import textwrap

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

MODEL_SOURCE = textwrap.dedent('''
    """Generated: a residual MLP."""
    import torch
    from torch import nn


    class Residual(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

        def forward(self, x):
            return x + self.inner(x)


    def build(n_in, width, depth, n_out):
        return nn.Sequential(nn.Linear(n_in, width), *[Residual(width) for _ in range(depth)], nn.Linear(width, n_out))


    def objective(model, x, y):
        return nn.functional.huber_loss(model(x), y)
''')


def generated_module():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="generated_"))
    (folder / "residual_model.py").write_text(MODEL_SOURCE)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("residual_model")
    finally:
        sys.path.remove(str(folder))


class Output:
    def __init__(self, folder, enabled):
        self.folder, self.enabled, self.rows = pathlib.Path(folder), enabled, []
        if enabled:
            self.folder.mkdir(parents=True, exist_ok=True)

    def row(self, **values):
        self.rows.append(values)

    def close(self, **summary):
        if not self.enabled:
            return
        with open(self.folder / "log.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1))


def train(args, lib):
    rank, world = dist.get_rank(), dist.get_world_size()
    out = Output(args.out, rank == 0)
    torch.manual_seed(args.seed)
    net = lib.build(7, 32, 2, 1)
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    gen = torch.Generator().manual_seed(args.seed + 1 + rank)
    for step in range(args.steps):
        x = torch.randn(32, 7, generator=gen)
        loss = lib.objective(model, x, x.pow(2).mean(1, keepdim=True).sqrt())
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        out.row(step=step, loss=mean.item() / world, lr=opt.param_groups[0]["lr"])
    if rank == 0:
        torch.save(net.state_dict(), out.folder / "model.pt")
    out.close(final=out.rows[-1]["loss"], world=world)
    dist.barrier()


def export(args, lib):
    if dist.get_rank() == 0:
        net = lib.build(7, 32, 2, 1)
        net.load_state_dict(torch.load(pathlib.Path(args.out) / "model.pt", weights_only=True))
        count = sum(p.numel() for p in net.eval().parameters())
        print(f"{count} parameters, f(0) = {net(torch.zeros(1, 7)).item():.4f}")


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.set_defaults(run=[train, export])
    ap.add_argument("--out", default="output")
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=0)
    sub = ap.add_subparsers(required=False)
    sub.add_parser("train").set_defaults(run=[train])
    sub.add_parser("export").set_defaults(run=[export])
    args = ap.parse_args()
    dist.init_process_group("gloo")
    lib = generated_module()
    for action in args.run:
        action(args, lib)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
