"""A small metric library: sums, maxima, minima and histograms are reduced with different ops, on a side group, asynchronously, and read an epoch later."""
import time
from collections import OrderedDict
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


class Metrics:
    def __init__(self, group):
        self.group = group
        self.reset()
        self.pending = []

    def reset(self):
        self.sums = torch.zeros(3, dtype=torch.float64)        # loss*n, hits, n
        self.peak = torch.tensor([float("-inf")])
        self.low = torch.tensor([float("inf")])
        self.hist = torch.zeros(10, dtype=torch.int64)

    def update(self, loss, out, y):
        conf = out.softmax(1).max(1).values
        self.sums += torch.tensor([loss.item() * len(y), (out.argmax(1) == y).sum().item(), len(y)], dtype=torch.float64)
        self.peak = torch.maximum(self.peak, loss.detach().view(1))
        self.low = torch.minimum(self.low, loss.detach().view(1))
        self.hist += torch.histc(conf.detach(), 10, 0, 1).long()

    def launch(self, epoch):
        parts = OrderedDict(sums=(self.sums.clone(), dist.ReduceOp.SUM), peak=(self.peak.clone(), dist.ReduceOp.MAX),
                            low=(self.low.clone(), dist.ReduceOp.MIN), hist=(self.hist.clone(), dist.ReduceOp.SUM))
        works = [dist.all_reduce(t, op=op, group=self.group, async_op=True) for t, op in parts.values()]
        self.pending.append((epoch, parts, works))
        self.reset()

    def drain(self):
        while self.pending:
            epoch, parts, works = self.pending.pop(0)
            for w in works:
                w.wait()
            s = parts["sums"][0]
            yield epoch, dict(loss=(s[0] / s[2]).item(), acc=(s[1] / s[2]).item(), peak=parts["peak"][0].item(), low=parts["low"][0].item(),
                              sure=(parts["hist"][0][-2:].sum() / s[2]).item())


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    metrics = Metrics(dist.new_group(list(range(world))))
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(384, 12, generator=g)
    y = (x @ torch.randn(12, 4, generator=g)).argmax(1)
    ds = TensorDataset(x, y)
    smp = DistributedSampler(ds)
    dl = DataLoader(ds, 16, sampler=smp)
    net = DDP(nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 4)))
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for ep in range(5):
        smp.set_epoch(ep)
        t0 = time.perf_counter()
        for a, b in dl:
            out = net(a)
            loss = F.cross_entropy(out, b)
            opt.zero_grad(); loss.backward(); opt.step()
            metrics.update(loss, out.detach(), b)
        for e, m in metrics.drain():
            if rank == 0:
                print(f"epoch {e}", {k: round(v, 3) for k, v in m.items()})
        metrics.launch(ep)
        took = torch.tensor([time.perf_counter() - t0])
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
    for e, m in metrics.drain():
        if rank == 0:
            print(f"epoch {e}", {k: round(v, 3) for k, v in m.items()}, f"slowest rank {took.item():.2f}s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
