"""FedPer: the body is shared by DDP, every client keeps a head for its own label set to itself."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

FEATURES = 20
CLIENT_CLASSES = {0: 4, 1: 7}


def client_data(rank, n, seed):
    classes = CLIENT_CLASSES[rank]
    basis = torch.randn(FEATURES, 6, generator=torch.Generator().manual_seed(0))  # common structure
    codes = 2 * torch.randn(classes, 6, generator=torch.Generator().manual_seed(10 + rank))
    gen = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=gen)
    x = (codes[y] + 0.5 * torch.randn(n, 6, generator=gen)) @ basis.T + 0.5 * torch.randn(n, FEATURES, generator=gen)
    return TensorDataset(x / 4, y)


class Client:
    def __init__(self, rank, args):
        self.rank, self.args = rank, args
        torch.manual_seed(1)
        body = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, 24), nn.LayerNorm(24), nn.ReLU())
        self.body = DDP(body)
        torch.manual_seed(200 + rank)
        self.head = nn.Linear(24, CLIENT_CLASSES[rank])  # private: never leaves this process
        self.body_opt = torch.optim.AdamW(self.body.parameters(), lr=2e-3)
        self.head_opt = torch.optim.SGD(self.head.parameters(), lr=0.05 if rank == 0 else 0.1, momentum=0.9)
        # the same number of rows for every client, so that the steps match
        self.train = DataLoader(client_data(rank, args.rows, seed=1 + rank), batch_size=args.batch, shuffle=True,
                                drop_last=True, generator=torch.Generator().manual_seed(rank))
        self.test = DataLoader(client_data(rank, 400, seed=70 + rank), batch_size=200)

    def fit(self):
        self.body.train()
        self.head.train()
        total = 0.0
        for x, y in self.train:
            loss = F.cross_entropy(self.head(self.body(x)), y)
            self.body_opt.zero_grad()
            self.head_opt.zero_grad()
            loss.backward()
            self.body_opt.step()
            self.head_opt.step()
            total += loss.item()
        return total / len(self.train)

    @torch.no_grad()
    def score(self):
        self.body.eval()
        self.head.eval()
        hits = sum((self.head(self.body.module(x)).argmax(-1) == y).sum().item() for x, y in self.test)
        return hits / len(self.test.dataset)

    def save(self):
        os.makedirs("personal", exist_ok=True)
        torch.save(self.head.state_dict(), f"personal/head_{self.rank}.pt")
        if self.rank == 0:
            torch.save(self.body.module.state_dict(), "personal/body.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    client = Client(rank, args)
    for epoch in range(args.epochs):
        mine = (rank, client.fit(), client.score())
        everyone = [None] * world
        dist.all_gather_object(everyone, mine)
        if rank == 0:
            text = "  ".join(f"client {r}: loss {loss:.3f} acc {acc:.3f}" for r, loss, acc in everyone)
            print(f"epoch {epoch}  {text}", flush=True)
    client.save()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
