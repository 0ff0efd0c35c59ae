"""Transfer in stages: head only, then the top block, then everything; the wrapper and optimizer are rebuilt per stage."""
import gc
import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass(frozen=True)
class Stage:
    name: str
    trainable: tuple
    epochs: int
    lr: float


STAGES = (Stage("head", ("head",), 2, 1e-2), Stage("top", ("head", "top"), 2, 4e-3), Stage("all", ("",), 3, 1e-3))


class GraphNet(nn.Module):
    def __init__(self, feat, width=40, classes=4):
        super().__init__()
        self.low = nn.Linear(feat, width)
        self.top = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, x, adj):
        h = torch.relu(adj @ self.low(x))
        h = torch.relu(adj @ self.top(self.drop(h)))
        return self.head(h.mean(1))


def graphs(n, nodes, feat, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    motif = torch.randn(4, feat, generator=torch.Generator().manual_seed(55))
    dens = 0.15 + 0.1 * y.float()
    a = (torch.rand(n, nodes, nodes, generator=g) < dens[:, None, None]).float()
    a = ((a + a.transpose(1, 2)) > 0).float() + torch.eye(nodes)
    deg = a.sum(-1, keepdim=True)
    x = torch.randn(n, nodes, feat, generator=g) + 0.5 * motif[y][:, None]
    return TensorDataset(x, a / deg, y)


class StageRunner:
    def __init__(self, rank):
        self.rank = rank
        self.log = logging.getLogger("stages")
        train, test = graphs(960, 12, 10, 1), graphs(320, 12, 10, 2)
        self.sampler = DistributedSampler(train, seed=7)
        self.loader = DataLoader(train, batch_size=32, sampler=self.sampler)
        self.test = DataLoader(test, batch_size=80, sampler=DistributedSampler(test, shuffle=False))
        torch.manual_seed(20 + rank)  # own initial draw; the wrapper copies process 0 over the others
        self.net = GraphNet(10)
        for p in self.net.parameters():
            dist.broadcast(p.data, src=0)
        self.epoch = 0

    def run(self, stage):
        for name, p in self.net.named_parameters():
            p.requires_grad_(name.startswith(stage.trainable))
            p.grad = None
        ddp = DDP(self.net, gradient_as_bucket_view=True)
        params = [p for p in ddp.parameters() if p.requires_grad]
        opt = torch.optim.RAdam(params, lr=stage.lr)
        for _ in range(stage.epochs):
            self.sampler.set_epoch(self.epoch)
            ddp.train()
            s = torch.zeros(2)
            for x, a, y in self.loader:
                loss = nn.functional.cross_entropy(ddp(x, a), y)
                opt.zero_grad(set_to_none=True)
                loss.backward()
                opt.step()
                s += torch.tensor([loss.item() * len(y), float(len(y))])
            dist.all_reduce(s)
            acc = self.accuracy()
            self.log.info("%s epoch %d loss %.4f acc %.3f (%d tensors)", stage.name, self.epoch, s[0] / s[1], acc, len(params))
            self.epoch += 1
        del ddp
        gc.collect()

    @torch.no_grad()
    def accuracy(self):
        self.net.eval()
        c = torch.zeros(2)
        for x, a, y in self.test:
            c += torch.tensor([(self.net(x, a).argmax(1) == y).sum().item(), float(len(y))])
        dist.all_reduce(c)
        return (c[0] / c[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    runner = StageRunner(rank)
    for stage in STAGES:
        runner.run(stage)
    if rank == 0:
        torch.save(runner.net.state_dict(), "graph.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
