"""Population-based search inside one job, then all ranks train the winner together."""
import copy
import json
import random
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

POPULATION, GENERATIONS, STEPS_PER_GENERATION, FINAL_EPOCHS = 5, 4, 20, 3


def dataset(n, seed):
    g = torch.Generator().manual_seed(17)
    w1, w2 = torch.randn(16, 12, generator=g), torch.randn(12, 1, generator=g)
    g.manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return TensorDataset(x, torch.tanh(x @ w1 * 0.5) @ w2 + 0.1 * torch.randn(n, 1, generator=g))


@dataclass
class Hyper:
    lr: float
    weight_decay: float

    def explore(self, rng):
        return Hyper(self.lr * rng.choice([0.7, 1.4]), self.weight_decay * rng.choice([0.5, 2.0]))


@dataclass
class Member:
    index: int
    hyper: Hyper
    model: nn.Module = None
    optimizer: torch.optim.Optimizer = None
    draws: torch.Generator = field(default_factory=torch.Generator)

    def set_hyper(self, hyper):
        self.hyper = hyper
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = hyper.lr, hyper.weight_decay

    def train(self, data, steps):
        x, y = data.tensors
        self.model.train()
        for _ in range(steps):
            ids = torch.randint(len(x), (32,), generator=self.draws)
            loss = F.mse_loss(self.model(x[ids]), y[ids])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def score(self, data):
        self.model.eval()
        return F.mse_loss(self.model(data.tensors[0]), data.tensors[1]).item()


def network():
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Dropout(0.05), nn.Linear(48, 1))


def owner(index):
    return index % dist.get_world_size()


def recruit(rank):
    """members differ in learning rate and in weights, no gradient is shared between them"""
    rng, members = random.Random(3), {}
    for i in range(POPULATION):
        hyper = Hyper(10 ** rng.uniform(-4, -1.5), 10 ** rng.uniform(-5, -2))
        if owner(i) == rank:
            torch.manual_seed(60 + i)
            m = Member(i, hyper, network())
            m.optimizer = torch.optim.AdamW(m.model.parameters(), lr=hyper.lr, weight_decay=hyper.weight_decay)
            m.draws.manual_seed(i)
            members[i] = m
    return members


def hand_over(members, source, targets):
    """the owner of `source` sends weights, optimizer state and settings to everybody; the owners of `targets` use them"""
    parcel = [None]
    if source in members:
        m = members[source]
        parcel = [(m.model.state_dict(), m.optimizer.state_dict(), m.hyper)]
    dist.broadcast_object_list(parcel, src=owner(source))
    for t in targets:
        if t in members:
            members[t].model.load_state_dict(parcel[0][0])
            members[t].optimizer.load_state_dict(copy.deepcopy(parcel[0][1]))
    return parcel[0]


def search(rank, train, valid):
    members = recruit(rank)
    for generation in range(GENERATIONS):
        for m in members.values():
            m.train(train, STEPS_PER_GENERATION)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {i: (m.score(valid), m.hyper) for i, m in members.items()})
        table = {i: v for part in everyone for i, v in part.items()}
        ranking = sorted(table, key=lambda i: (table[i][0], i))              # identical on all ranks
        if rank == 0:
            print(f"generation {generation}", {i: (round(table[i][0], 4), f"{table[i][1].lr:.1e}") for i in ranking}, flush=True)
        best, worst = ranking[0], ranking[-1]
        if generation < GENERATIONS - 1:
            _, _, hyper = hand_over(members, best, [worst])
            new = hyper.explore(random.Random(1000 + generation))
            if worst in members:
                members[worst].set_hyper(new)
    state, _, hyper = hand_over(members, best, [])
    return state, hyper, table[best][0]


@torch.no_grad()
def shared_score(model, data, rank, world):
    model.eval()
    x, y = (t[rank::world] for t in data.tensors)
    s = torch.tensor([F.mse_loss(model(x), y, reduction="sum").item(), float(len(x))])
    dist.all_reduce(s)
    return (s[0] / s[1]).item()


def finish(rank, world, state, hyper, train, valid):
    model = network()
    model.load_state_dict(state)
    ddp = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=hyper.lr, weight_decay=hyper.weight_decay)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, 32, sampler=sampler, drop_last=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, FINAL_EPOCHS * len(loader))
    for epoch in range(FINAL_EPOCHS):
        sampler.set_epoch(epoch)
        ddp.train()
        for x, y in loader:
            loss = F.mse_loss(ddp(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model, shared_score(model, valid, rank, world)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = dataset(1024, 1), dataset(333, 2)
    state, hyper, before = search(rank, train, valid)
    model, after = finish(rank, world, state, hyper, train, valid)
    if rank == 0:
        print(f"winner lr {hyper.lr:.2e}: {before:.4f} alone, {after:.4f} after joint training")
        torch.save(model.state_dict(), "winner.pt")
        with open("winner.json", "w") as f:
            json.dump({"lr": hyper.lr, "weight_decay": hyper.weight_decay, "mse": after}, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
