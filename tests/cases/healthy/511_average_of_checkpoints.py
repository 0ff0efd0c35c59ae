"""Average the last checkpoints (as for translation models) and fine-tune briefly from it."""
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FOLDER = pathlib.Path("ckpt")


def average_checkpoints(paths):
    total = None
    for path in paths:
        state = torch.load(path, map_location="cpu", weights_only=True)["model"]
        if total is None:
            total = {k: v.double().clone() for k, v in state.items()}
        else:
            for k, v in state.items():
                total[k] += v.double()
    return {k: (v / len(paths)).float() for k, v in total.items()}


def reversal(rank, batch=32, length=5, symbols=8):
    g = torch.Generator().manual_seed(rank)
    while True:
        x = torch.randint(0, symbols, (batch, length), generator=g)
        yield x, x.flip(1)


class Permuter(nn.Module):
    def __init__(self, symbols=8, length=5, dim=20):
        super().__init__()
        self.emb, self.move, self.out = nn.Embedding(symbols, dim), nn.Linear(length, length), nn.Linear(dim, symbols)

    def forward(self, x):
        return self.out(torch.tanh(self.move(self.emb(x).transpose(1, 2))).transpose(1, 2))


def run(model, opt, batches, steps, save_every=None):
    rank, total = dist.get_rank(), torch.zeros(2)
    for step, (x, y) in zip(range(1, steps + 1), batches):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += torch.tensor([loss.item(), 1.0])
        if save_every and step % save_every == 0:
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "step": step}, FOLDER / f"{step:04d}.pt")
            dist.barrier()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    if rank == 0:
        FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = DDP(Permuter())
    first = run(model, torch.optim.Adam(model.parameters(), lr=2e-2), reversal(rank), 50, save_every=10)
    if rank == 0:
        last = sorted(FOLDER.glob("[0-9]*.pt"))[-3:]
        torch.save(average_checkpoints(last), FOLDER / "average.pt")
    dist.barrier()
    model.module.load_state_dict(torch.load(FOLDER / "average.pt", weights_only=True))
    second = run(model, torch.optim.SGD(model.parameters(), lr=0.02), reversal(100 + rank), 10)
    if rank == 0:
        print(f"training {first:.4f}, after averaging {second:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
