"""Own data-parallel wrapper: gradients leave as soon as they are ready and are awaited before the step."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Overlap(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.world = dist.get_world_size()
        self.pending = []
        for tensor in list(net.parameters()) + list(net.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(self._send)

    def _send(self, p):
        p.grad.div_(self.world)
        self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()

    def forward(self, x):
        return self.net(x)


def rings(n=512):
    g = torch.Generator().manual_seed(2)
    y = torch.randint(0, 3, (n,), generator=g)
    r = 1.0 + y + 0.2 * torch.randn(n, generator=g)
    a = 6.28 * torch.rand(n, generator=g)
    return TensorDataset(torch.stack([r * a.cos(), r * a.sin()], 1), y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11 + rank)
    model = Overlap(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)))
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    data = rings()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            logits = model(x)
            nn.functional.cross_entropy(logits, y).backward()
            model.finish()
            opt.step()
            stats += torch.tensor([(logits.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {(stats[0] / stats[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
