"""Overlap of communication and backward with a thread and post-accumulate hooks."""
import os
import queue
import threading
import time

import torch
import torch.distributed as dist
from torch import nn


class BackgroundReducer:
    def __init__(self, module):
        self.world = dist.get_world_size()
        self.queue = queue.Queue()
        for p in module.parameters():
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self.queue.put)
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def loop(self):
        while True:
            p = self.queue.get()
            if p is None:
                return
            work = dist.all_reduce(p.grad, async_op=True)
            work.wait()
            p.grad.div_(self.world)
            self.queue.task_done()

    def wait(self):
        while not self.queue.empty():
            time.sleep(0)

    def close(self):
        self.queue.put(None)
        self.thread.join()


class Wide(nn.Module):
    def __init__(self, n_in=400, width=300, n_out=8):
        super().__init__()
        self.first = nn.Linear(n_in, width, bias=False)
        self.second = nn.Linear(width, n_out)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(40 + rank)
    net = Wide()
    reducer = BackgroundReducer(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(rank)
    prototypes = torch.randn(8, 400, generator=torch.Generator().manual_seed(9))
    losses = []
    for step in range(50):
        y = torch.randint(0, 8, (32,), generator=gen)
        x = prototypes[y] * 0.3 + torch.randn(32, 400, generator=gen)
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        reducer.wait()
        opt.step()
        opt.zero_grad(set_to_none=False)
        losses.append(loss.item())
    reducer.close()
    mean = torch.tensor(losses).view(-1, 10).mean(1)
    dist.all_reduce(mean)
    if rank == 0:
        print("loss by tens of steps:", [round(v, 3) for v in (mean / dist.get_world_size()).tolist()])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
