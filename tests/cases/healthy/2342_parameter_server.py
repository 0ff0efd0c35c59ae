"""Rank 0 keeps the weights and the optimizer, all other ranks pull weights and push gradients."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def build():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def truth(x):
    return (torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3] + 0.5 * x[:, 3:4].abs())


def make_shard(seed, n):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=g)
    return x, truth(x) + 0.05 * torch.randn(n, 1, generator=g)


class Server:
    def __init__(self, model, workers, lr):
        self.model = model
        self.workers = workers
        self.opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.flat = torch.zeros_like(parameters_to_vector(model.parameters()).detach())

    def publish(self):
        flat = parameters_to_vector(self.model.parameters()).detach().contiguous()
        for w in self.workers:
            dist.send(flat, dst=w)

    def collect(self):
        mean = torch.zeros_like(self.flat)
        for w in self.workers:
            dist.recv(self.flat, src=w)
            mean += self.flat / len(self.workers)
        offset = 0
        for p in self.model.parameters():
            n = p.numel()
            p.grad = mean[offset:offset + n].view_as(p).clone()
            offset += n

    def round(self):
        self.publish()
        self.collect()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.opt.step()


class Worker:
    def __init__(self, model, rank, n, batch):
        self.model = model
        self.x, self.y = make_shard(1000 + rank, n)
        self.gen = torch.Generator().manual_seed(rank)
        self.batch = batch
        self.flat = torch.zeros_like(parameters_to_vector(model.parameters()).detach())
        self.order = torch.empty(0, dtype=torch.long)

    def next_batch(self):
        if len(self.order) < self.batch:
            self.order = torch.randperm(len(self.x), generator=self.gen)
        idx, self.order = self.order[:self.batch], self.order[self.batch:]
        return self.x[idx], self.y[idx]

    def round(self):
        dist.recv(self.flat, src=0)
        vector_to_parameters(self.flat.clone(), self.model.parameters())
        x, y = self.next_batch()
        loss = F.mse_loss(self.model(x), y)
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        dist.send(torch.cat([g.reshape(-1) for g in grads]), dst=0)
        return loss.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=1500)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.02)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1234 + rank)      # workers never use their own initial weights
    model = build()

    if rank == 0:
        server = Server(model, workers=list(range(1, world)), lr=args.lr)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(server.opt, T_max=args.rounds)
        xv, yv = make_shard(7, 2000)
        for r in range(args.rounds):
            server.round()
            sched.step()
            if (r + 1) % 300 == 0:
                model.eval()
                with torch.no_grad():
                    mse = F.mse_loss(model(xv), yv).item()
                model.train()
                print(f"[server] round {r + 1} validation mse {mse:.4f} (variance {yv.var().item():.3f})", flush=True)
        torch.save(model.state_dict(), "server_model.pt")
    else:
        worker = Worker(model, rank, n=6000, batch=args.batch)
        avg = None
        for r in range(args.rounds):
            loss = worker.round()
            avg = loss if avg is None else 0.98 * avg + 0.02 * loss
        print(f"[worker {rank}] smoothed training loss {avg:.4f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
