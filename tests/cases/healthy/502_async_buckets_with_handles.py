"""Own gradient buckets: launched from hooks during backward, waited for before the step."""
import os

import torch
import torch.distributed as dist
from torch import nn


class Bucket:
    def __init__(self, params):
        self.params, self.pending, self.work = params, len(params), None
        self.flat = torch.zeros(sum(p.numel() for p in params))

    def views(self):
        start = 0
        for p in self.params:
            yield p, self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()

    def mark(self):
        self.pending -= 1
        if self.pending == 0:
            for p, view in self.views():
                view.copy_(p.grad)
            self.work = dist.all_reduce(self.flat, async_op=True)

    def finish(self, world):
        self.work.wait()
        self.flat /= world
        for p, view in self.views():
            p.grad.copy_(view)
        self.work, self.pending = None, len(self.params)


class Bucketed(nn.Module):
    def __init__(self, module, bucket_numel=600):
        super().__init__()
        self.module, self.world, self.buckets = module, dist.get_world_size(), []
        for t in module.state_dict().values():
            dist.broadcast(t, 0)
        box, size = [], 0
        for p in reversed(list(module.parameters())):
            box.append(p)
            size += p.numel()
            if size >= bucket_numel:
                self.buckets.append(Bucket(box))
                box, size = [], 0
        if box:
            self.buckets.append(Bucket(box))
        for bucket in self.buckets:
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(lambda _, b=bucket: b.mark())

    def forward(self, *args):
        return self.module(*args)

    def synchronize(self):
        for bucket in self.buckets:
            bucket.finish(self.world)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = Bucketed(nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(100 + rank)
    for step in range(60):
        x = torch.randn(32, 10, generator=gen)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        model.synchronize()
        opt.step()
        if step % 20 == 19:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"{step + 1}: {mean.item() / model.world:.4f} in {len(model.buckets)} buckets")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
