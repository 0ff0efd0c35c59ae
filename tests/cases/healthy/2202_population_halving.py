"""Successive halving: every rank trains its own trials with its own settings; the worse half of the population stops."""
import json
import math

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn

TRIALS, RUNGS, STEPS, BATCH = 8, 4, 50, 48
DIM, CLASSES = 14, 4


def dataset():
    gen = torch.Generator().manual_seed(9)
    x = torch.randn(1500, DIM, generator=gen)
    hidden = torch.tanh(x @ torch.randn(DIM, 10, generator=gen))
    y = (hidden @ torch.randn(10, CLASSES, generator=gen)).argmax(-1)
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def sample_settings(index):
    gen = torch.Generator().manual_seed(600 + index)
    u = torch.rand(3, generator=gen).tolist()
    return dict(lr=10 ** (-3.5 + 3 * u[0]), width=int(2 ** (3 + 3 * u[1])), dropout=0.3 * u[2],
                optimizer="adam" if index % 2 else "sgd")


class Trial:
    def __init__(self, index):
        self.index, self.settings = index, sample_settings(index)
        torch.manual_seed(index)
        s = self.settings
        self.model = nn.Sequential(nn.Linear(DIM, s["width"]), nn.ReLU(), nn.Dropout(s["dropout"]),
                                   nn.Linear(s["width"], CLASSES))
        kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[s["optimizer"]]
        self.optimizer = kind(self.model.parameters(), lr=s["lr"])
        self.draw = torch.Generator().manual_seed(index)

    def advance(self, x, y, steps):
        self.model.train()
        for _ in range(steps):
            pick = torch.randint(len(x), (BATCH,), generator=self.draw)
            loss = F.cross_entropy(self.model(x[pick]), y[pick])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self, x, y):
        self.model.eval()
        value = F.cross_entropy(self.model(x), y).item()
        return value if math.isfinite(value) else float("inf")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = dataset()
    alive = {i: Trial(i) for i in range(rank, TRIALS, world)}

    leader = None
    for rung in range(RUNGS):
        mine = []
        for trial in alive.values():
            trial.advance(*train, steps=STEPS * 2 ** rung // 2)
            mine.append((trial.validate(*valid), trial.index))
        # a rank whose trials are all stopped still takes part here, with an empty list
        boards = [None] * world
        dist.all_gather_object(boards, mine)
        ranking = sorted(entry for board in boards for entry in board)
        leader = ranking[0]
        keep = {index for _, index in ranking[:max(1, len(ranking) // 2)]}
        alive = {i: t for i, t in alive.items() if i in keep}
        if rank == 0:
            table = " ".join(f"{index}:{loss:.3f}" for loss, index in ranking)
            print(f"rung {rung}: {table}", flush=True)

    loss, winner = leader
    if winner in alive:  # exactly one rank holds it, and that need not be rank 0
        torch.save(alive[winner].model.state_dict(), "best_trial.pt")
        with open("best_trial.json", "w") as f:
            json.dump(dict(trial=winner, valid_loss=loss, trained_on_rank=rank, **alive[winner].settings), f, indent=1)
    dist.barrier()
    if rank == 0:
        with open("best_trial.json") as f:
            print("best:", json.load(f), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
