# Two pipeline stages by hand: activations go forward with send, gradients come back with recv.
import os
import torch
import torch.distributed as dist
from torch import nn

MICRO, MB_SIZE, WIDTH, STEPS = 4, 8, 24, 25


class Stage:
    def __init__(self, rank, last):
        self.rank, self.last = rank, last
        torch.manual_seed(50 + rank)
        self.net = nn.Sequential(nn.Linear(WIDTH, 3)) if last else nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.9)
        self.saved = []

    def forward(self, mb):
        if not self.last:
            out = self.net(mb[0])
            dist.send(out.detach(), dst=self.rank + 1)
            self.saved.append(out)
            return None
        act = torch.empty(MB_SIZE, WIDTH)
        dist.recv(act, src=self.rank - 1)
        act.requires_grad_()
        loss = nn.functional.cross_entropy(self.net(act), mb[1]) / MICRO
        self.saved.append((act, loss))
        return loss.item()

    def backward(self):
        if self.last:
            act, loss = self.saved.pop(0)
            loss.backward()
            dist.send(act.grad, dst=self.rank - 1)
        else:
            out = self.saved.pop(0)
            grad = torch.empty_like(out)
            dist.recv(grad, src=self.rank + 1)
            out.backward(grad)


def micro_batches(step):
    # the first stage uses x, the last one y: both are made from the same stream
    g = torch.Generator().manual_seed(step)
    for _ in range(MICRO):
        x = torch.randn(MB_SIZE, 6, generator=g)
        yield x, x.view(MB_SIZE, 3, 2).sum(2).argmax(1)


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert world == 2, "two stages"
    stage = Stage(rank, last=rank == world - 1)
    for step in range(STEPS):
        stage.opt.zero_grad()
        losses = [stage.forward(mb) for mb in micro_batches(step)]
        for _ in range(MICRO):
            stage.backward()
        stage.opt.step()
        if stage.last and step % 6 == 0:
            print(f"step {step} loss {sum(losses):.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
