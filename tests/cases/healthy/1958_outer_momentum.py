"""Local training with an outer optimizer: processes meet only every few steps and average what they have learnt."""
import json
import os
import sys
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@dataclass
class Settings:
    world: int = 2
    rounds: int = 12
    inner_steps: int = 15
    batch: int = 64
    inner_lr: float = 3e-3
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    seed: int = 0


def network():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def batch(settings, gen):
    x = 2 * torch.rand(settings.batch, 8, generator=gen) - 1
    return x, (torch.sin(3 * x[:, 0]) * x[:, 1] + x[:, 2].abs())[:, None]


class Outer:
    """Nesterov momentum on the averaged change of the weights."""

    def __init__(self, model, lr, momentum):
        self.model, self.lr, self.momentum = model, lr, momentum
        self.anchor = parameters_to_vector(model.parameters()).detach().clone()
        self.velocity = torch.zeros_like(self.anchor)

    @torch.no_grad()
    def meet(self, world):
        delta = self.anchor - parameters_to_vector(self.model.parameters())
        dist.all_reduce(delta)
        delta /= world
        self.velocity.mul_(self.momentum).add_(delta)
        self.anchor -= self.lr * (delta + self.momentum * self.velocity)
        vector_to_parameters(self.anchor.clone(), self.model.parameters())


def worker(rank, settings, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=settings.world)
    torch.manual_seed(settings.seed)
    model = network()
    outer = Outer(model, settings.outer_lr, settings.outer_momentum)
    inner = torch.optim.AdamW(model.parameters(), lr=settings.inner_lr)  # its moments stay with the process
    gen = torch.Generator().manual_seed(1000 + rank)
    test = batch(settings, torch.Generator().manual_seed(5))
    log = []
    for r in range(settings.rounds):
        total = torch.zeros(())
        for _ in range(settings.inner_steps):
            x, y = batch(settings, gen)
            loss = nn.functional.mse_loss(model(x), y)
            inner.zero_grad()
            loss.backward()
            inner.step()
            total += loss.detach()
        outer.meet(settings.world)
        dist.all_reduce(total)
        if rank == 0:
            with torch.no_grad():
                err = nn.functional.mse_loss(model(test[0]), test[1]).item()
            log.append({"round": r, "train": total.item() / settings.inner_steps / settings.world, "test": err})
            print(f"round {r:2d}: train {log[-1]['train']:.4f} test {err:.4f}", flush=True)
    if rank == 0:
        with open("rounds.json", "w") as f:
            json.dump({"settings": asdict(settings), "log": log}, f)
        torch.save(model.state_dict(), "averaged.pt")
    dist.barrier()
    dist.destroy_process_group()


def main():
    settings = Settings()
    for item in sys.argv[1:]:  # name=value
        name, value = item.split("=")
        setattr(settings, name, type(getattr(settings, name))(value))
    init_file = os.path.abspath("rendezvous")
    if os.path.exists(init_file):
        os.remove(init_file)
    mp.start_processes(worker, args=(settings, init_file), nprocs=settings.world, start_method="spawn")


if __name__ == "__main__":
    main()
