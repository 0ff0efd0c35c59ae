"""DLRM in small: embedding tables are model parallel (each rank owns some), MLPs are data parallel under DDP, rows travel by all_to_all."""
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
from torch.nn.parallel import DistributedDataParallel as DDP

TABLES, ROWS, DIM, DENSE, LOCAL_B = 4, 50, 8, 6, 32


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.top = nn.Sequential(nn.Linear(DIM * (TABLES + 1), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense, emb):
        z = torch.cat([self.bottom(dense), emb.flatten(1)], dim=1)
        return self.top(z).squeeze(1)


class ClickLog:
    def __init__(self, rank):
        g = torch.Generator().manual_seed(5)
        self.w_cat = torch.randn(TABLES, ROWS, generator=g)
        self.w_den = torch.randn(DENSE, generator=g)
        self.g = torch.Generator().manual_seed(1000 + rank)

    def batch(self):
        cat = torch.randint(0, ROWS, (LOCAL_B, TABLES), generator=self.g)
        den = torch.randn(LOCAL_B, DENSE, generator=self.g)
        logit = den @ self.w_den + self.w_cat[torch.arange(TABLES), cat].sum(1)
        return den, cat, (torch.rand(LOCAL_B, generator=self.g) < logit.sigmoid()).float()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = list(range(rank, TABLES, world))
    torch.manual_seed(77 + rank)                                   # own tables: other values on each rank by design
    tables = nn.ModuleDict({str(t): nn.Embedding(ROWS, DIM) for t in own})
    torch.manual_seed(0)
    dense_net = DDP(DenseNet())
    opt_dense = torch.optim.Adagrad(dense_net.parameters(), lr=0.05)
    opt_emb = torch.optim.Adagrad(tables.parameters(), lr=0.2)
    log = ClickLog(rank)
    order = torch.tensor([t for r in range(world) for t in range(r, TABLES, world)]).argsort()
    for it in range(60):
        den, cat, y = log.batch()
        everyones = [torch.empty_like(cat) for _ in range(world)]
        dist.all_gather(everyones, cat)
        # look up my tables for the whole global batch, then send each rank its rows
        looked = torch.stack([tables[str(t)](torch.cat(everyones)[:, t]) for t in own], 1)      # world*B, own, D
        send = [c.contiguous() for c in looked.chunk(world)]
        recv = [torch.empty(LOCAL_B, len(own), DIM) for _ in range(world)]
        recv = dfn.all_to_all(recv, send)
        emb = torch.cat(list(recv), 1)[:, order]
        loss = F.binary_cross_entropy_with_logits(dense_net(den, emb), y)
        opt_dense.zero_grad(); opt_emb.zero_grad()
        loss.backward()
        for p in tables.parameters():                              # table gradients hold the sum over ranks: make it the mean of the global batch
            p.grad.div_(world)
        opt_dense.step(); opt_emb.step()
        m = loss.detach().clone()
        dist.all_reduce(m)
        if rank == 0 and it % 15 == 14:
            print(f"it {it + 1} logloss {m.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
