"""Asynchronous parameter server: rank 0 owns weights and optimizer, the other ranks only compute gradients."""
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

STEPS_PER_WORKER = 80
BATCH = 32
FEATURES, CLASSES = 20, 5


def build_model():
    return nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, CLASSES))


def make_split(n, seed):
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(7))
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=gen)
    return x, (x @ teacher).argmax(-1)


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    value = (model(x).argmax(-1) == y).float().mean().item()
    model.train()
    return value


class Server:
    def __init__(self, workers):
        torch.manual_seed(0)
        self.model = build_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.workers = workers
        self.version = 0
        self.last_pulled = {w: 0 for w in range(1, workers + 1)}

    def apply(self, flat_grad):
        offset = 0
        for p in self.model.parameters():
            p.grad = flat_grad[offset:offset + p.numel()].view_as(p).clone()
            offset += p.numel()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1

    def serve(self):
        weights = parameters_to_vector(self.model.parameters()).detach()
        dist.broadcast(weights, src=0)
        message = torch.empty(weights.numel() + 1)  # gradient and loss
        staleness, losses, start = [], [], time.time()
        for _ in range(self.workers * STEPS_PER_WORKER):
            worker = dist.recv(message)  # whoever comes first
            staleness.append(self.version - self.last_pulled[worker])
            self.apply(message[:-1])
            losses.append(message[-1].item())
            self.last_pulled[worker] = self.version
            dist.send(parameters_to_vector(self.model.parameters()).detach(), dst=worker)
            if self.version % 40 == 0:
                recent = losses[-40:]
                print(f"update {self.version}: loss {sum(recent) / len(recent):.4f} "
                      f"staleness {sum(staleness[-40:]) / 40:.2f}", flush=True)
        x, y = make_split(1000, seed=99)
        print(f"test accuracy {accuracy(self.model, x, y):.3f} after {time.time() - start:.1f}s", flush=True)


class Worker:
    def __init__(self, rank):
        self.rank = rank
        self.model = build_model()
        self.x, self.y = make_split(800, seed=rank)
        self.draw = torch.Generator().manual_seed(500 + rank)

    def run(self):
        weights = torch.empty(sum(p.numel() for p in self.model.parameters()))
        dist.broadcast(weights, src=0)
        vector_to_parameters(weights.clone(), self.model.parameters())
        for _ in range(STEPS_PER_WORKER):
            pick = torch.randint(len(self.x), (BATCH,), generator=self.draw)
            loss = F.cross_entropy(self.model(self.x[pick]), self.y[pick])
            self.model.zero_grad()
            loss.backward()
            if self.rank % 2 == 0:
                time.sleep(0.004)  # an older machine
            grads = parameters_to_vector([p.grad for p in self.model.parameters()])
            dist.send(torch.cat([grads, loss.detach().view(1)]), dst=0)
            dist.recv(weights, src=0)
            vector_to_parameters(weights.clone(), self.model.parameters())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        Server(world - 1).serve()
    else:
        Worker(rank).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
