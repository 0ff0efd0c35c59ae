"""Federated averaging with server momentum (FedAvgM) over simulated clients that hold skewed data.

Clients are dealt out to the processes; a process trains the chosen ones among its own, one after the other. How many
these are, and so how many local steps a process does, changes from round to round. There is one exchange per round.
"""
import argparse
import json
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--clients", type=int, default=10)
    p.add_argument("--fraction", type=float, default=0.5)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--local-epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--client-lr", type=float, default=0.1)
    p.add_argument("--server-lr", type=float, default=1.0)
    p.add_argument("--server-momentum", type=float, default=0.5)
    p.add_argument("--seed", type=int, default=3)
    return p.parse_args()


CLASSES, DIM = 5, 20


def centres():
    return 1.6 * torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(77))


def client_data(client):
    """Between 60 and 180 samples, drawn mostly from two classes."""
    g = torch.Generator().manual_seed(1000 + client)
    n = int(torch.randint(60, 181, (1,), generator=g))
    weights = torch.full((CLASSES,), 0.1)
    weights[client % CLASSES] = weights[(client + 2) % CLASSES] = 1.0
    y = torch.multinomial(weights, n, replacement=True, generator=g)
    x = centres()[y] + 2.4 * torch.randn(n, DIM, generator=g)
    return x, y


def test_data(n=600):
    g = torch.Generator().manual_seed(5)
    y = torch.randint(CLASSES, (n,), generator=g)
    return centres()[y] + 2.4 * torch.randn(n, DIM, generator=g), y


def build():
    return nn.Sequential(nn.Linear(DIM, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, CLASSES))


class Client:
    def __init__(self, index, args):
        self.x, self.y = client_data(index)
        self.args = args
        self.generator = torch.Generator().manual_seed(50 + index)

    def __len__(self):
        return len(self.y)

    def train(self, model):
        """Local SGD from the weights in `model`; a fresh optimizer per round, as in the paper."""
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.args.client_lr)
        loss_sum, seen = 0.0, 0
        for _ in range(self.args.local_epochs):
            for idx in torch.randperm(len(self), generator=self.generator).split(self.args.batch):
                loss = F.cross_entropy(model(self.x[idx]), self.y[idx])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss_sum += loss.item() * len(idx)
                seen += len(idx)
        return loss_sum / seen


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    model.eval()
    part = slice(rank, None, world)
    hits = torch.tensor([(model(x[part]).argmax(1) == y[part]).sum().item(), len(y[part])])
    dist.all_reduce(hits)
    return hits[0].item() / hits[1].item()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    model = build()
    global_weights = parameters_to_vector(model.parameters()).detach().clone()
    dist.broadcast(global_weights, src=0)
    velocity = torch.zeros_like(global_weights)

    mine = {c: Client(c, args) for c in range(args.clients) if c % world == rank}
    x_test, y_test = test_data()
    chooser = random.Random(args.seed)  # equal on all processes: everybody knows who takes part
    history = []

    for rnd in range(args.rounds):
        chosen = chooser.sample(range(args.clients), max(1, round(args.fraction * args.clients)))
        # [weighted sum of client changes | weighted loss | number of samples]
        message = torch.zeros(len(global_weights) + 2)
        for c in chosen:
            if c not in mine:
                continue
            vector_to_parameters(global_weights.clone(), model.parameters())
            loss = mine[c].train(model)
            n = len(mine[c])
            message[:-2] += n * (parameters_to_vector(model.parameters()).detach() - global_weights)
            message[-2] += n * loss
            message[-1] += n
        dist.all_reduce(message)  # also from processes without a chosen client: they add zeros

        change = message[:-2] / message[-1]
        velocity.mul_(args.server_momentum).add_(change)
        global_weights.add_(velocity, alpha=args.server_lr)

        vector_to_parameters(global_weights.clone(), model.parameters())
        accuracy = evaluate(model, x_test, y_test, rank, world)
        record = {"round": rnd, "clients": len(chosen), "samples": int(message[-1]),
                  "loss": round((message[-2] / message[-1]).item(), 4), "accuracy": round(accuracy, 4)}
        history.append(record)
        if rank == 0:
            print(json.dumps(record), flush=True)

    if rank == 0:
        torch.save(model.state_dict(), "global_model.pt")
        with open("history.json", "w") as f:
            json.dump(history, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
