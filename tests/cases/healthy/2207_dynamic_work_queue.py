"""Ranks of unequal speed draw chunks of each large batch from a shared counter; gradients are summed over all chunks."""
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn

CHUNKS, CHUNK, STEPS = 12, 32, 40
DIM = 12


class Queue:
    """A counter for each step in a store that rank 0 hosts."""

    def __init__(self, rank):
        port = [None]
        if rank == 0:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = [self.store.port]
        dist.broadcast_object_list(port, src=0)
        if rank != 0:
            self.store = dist.TCPStore("127.0.0.1", port[0], is_master=False, wait_for_workers=False)

    def draw(self, step):
        while True:
            index = self.store.add(f"step{step}", 1) - 1
            if index >= CHUNKS:
                return
            yield index


def load_chunk(step, index):
    """A chunk depends on its number only, whoever works on it."""
    gen = torch.Generator().manual_seed(1000 * step + index)
    x = torch.randn(CHUNK, DIM, generator=gen)
    y = torch.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.3 * x[:, 3:].sum(1)
    return x, (y + 0.1 * torch.randn(CHUNK, generator=gen)).unsqueeze(-1)


class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.queue = Queue(rank)
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, 1))
        for p in self.model.parameters():
            dist.broadcast(p.data, src=0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.done = 0

    def work(self, step):
        # a rank that comes too late for any chunk still has zero gradients to add
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        loss_sum, samples = 0.0, 0
        for index in self.queue.draw(step):
            x, y = load_chunk(step, index)
            loss = F.mse_loss(self.model(x), y, reduction="sum")
            loss.backward()
            loss_sum += loss.item()
            samples += len(x)
            self.done += 1
            if self.rank == 1:
                time.sleep(0.006)  # the slower host
        return loss_sum, samples

    def step(self, step):
        loss_sum, samples = self.work(step)
        params = list(self.model.parameters())
        flat = torch.cat([p.grad.flatten() for p in params] + [torch.tensor([loss_sum, float(samples)])])
        dist.all_reduce(flat)
        total = flat[-1].item()
        assert total == CHUNKS * CHUNK
        for p, g in zip(params, flat[:-2].split([p.numel() for p in params])):
            p.grad = (g / total).view_as(p)
        self.optimizer.step()
        return flat[-2].item() / total

    def run(self):
        for step in range(STEPS):
            loss = self.step(step)
            if self.rank == 0 and step % 8 == 7:
                print(f"step {step}: loss {loss:.4f}", flush=True)
        shares = [None] * self.world
        dist.all_gather_object(shares, self.done)
        if self.rank == 0:
            print(f"chunks done by each rank: {shares}", flush=True)
            torch.save(self.model.state_dict(), "regressor.pt")


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Trainer(dist.get_rank(), dist.get_world_size()).run()
    dist.barrier()  # the store must outlive the last draw
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
