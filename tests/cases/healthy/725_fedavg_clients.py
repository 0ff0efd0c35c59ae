# FedAvg: each process is a client with its own (non-iid, unequal) data; the global model is the sample-weighted average after local epochs.
import copy
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


@dataclass
class Options:
    rounds: int = 6
    local_ep: int = 2
    local_bs: int = 16
    lr: float = 0.05
    alpha: float = 0.6
    seed: int = 2


def digits(n, seed):
    proto = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    return TensorDataset(proto[y] + 0.8 * torch.randn(n, 20, generator=g), y)


def dirichlet_split(labels, clients, alpha, seed):
    rng = np.random.default_rng(seed)
    parts = [[] for _ in range(clients)]
    for c in range(6):
        ids = np.flatnonzero(labels == c)
        rng.shuffle(ids)
        cuts = (np.cumsum(rng.dirichlet([alpha] * clients))[:-1] * len(ids)).astype(int)
        for part, chunk in zip(parts, np.split(ids, cuts)):
            part.extend(chunk.tolist())
    return parts


class LocalUpdate:
    def __init__(self, opt, dataset, ids):
        self.opt = opt
        self.loader = DataLoader(Subset(dataset, ids), batch_size=opt.local_bs, shuffle=True)
        self.n = len(ids)

    def update_weights(self, model):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.opt.lr, momentum=0.5)
        losses = []
        for _ in range(self.opt.local_ep):
            for x, y in self.loader:
                model.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return model.state_dict(), sum(losses) / len(losses)


def average_weights(state, n):
    total = torch.tensor(float(n))
    dist.all_reduce(total)
    out = {}
    for k, v in state.items():
        w = v.detach().clone() * (n / total.item())
        dist.all_reduce(w)
        out[k] = w
    return out


def main(opt):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = digits(900, 1), digits(240, 2)
    parts = dirichlet_split(train.tensors[1].numpy(), world, opt.alpha, opt.seed)
    torch.manual_seed(opt.seed)
    global_model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 6))
    torch.manual_seed(opt.seed + 50 + rank)
    client = LocalUpdate(opt, train, parts[rank])
    print(f"client {rank}: {client.n} samples")
    for rnd in range(opt.rounds):
        w, loss = client.update_weights(copy.deepcopy(global_model))
        global_model.load_state_dict(average_weights(w, client.n))
        report = [None] * world
        dist.all_gather_object(report, (client.n, loss))
        if rank == 0:
            global_model.eval()
            with torch.no_grad():
                x, y = test.tensors
                acc = (global_model(x).argmax(1) == y).float().mean().item()
            mean = sum(n * l for n, l in report) / sum(n for n, _ in report)
            print(f"round {rnd}: local loss {mean:.3f}, global test accuracy {acc:.3f}")
        dist.barrier()
    if rank == 0:
        torch.save(global_model.state_dict(), os.path.join("/tmp", f"fed_{os.getpid()}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Options())
