import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def planted_graph(n=1200, k=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, k, (n,), generator=g)
    same = y.unsqueeze(0) == y.unsqueeze(1)
    p = torch.where(same, 0.012, 0.002)
    a = (torch.rand(n, n, generator=g) < p).float().triu(1)
    a = a + a.t() + torch.eye(n)
    d = a.sum(1).rsqrt()
    x = F.one_hot(y, k).float() @ torch.randn(k, 24, generator=g) + 2.0 * torch.randn(n, 24, generator=g)
    split = torch.rand(n, generator=g)
    return d.unsqueeze(1) * a * d.unsqueeze(0), x, y, split < 0.4, split > 0.7


class ExchangeNodes(torch.autograd.Function):
    """Own rows in, rows of the whole graph out."""

    @staticmethod
    def forward(ctx, h):
        rows = h.new_empty(h.shape[0] * dist.get_world_size(), h.shape[1])
        dist.all_gather_into_tensor(rows, h.contiguous())
        return rows

    @staticmethod
    def backward(ctx, grad):
        own = grad.new_empty(grad.shape[0] // dist.get_world_size(), grad.shape[1])
        dist.reduce_scatter_tensor(own, grad.contiguous())
        return own


class GCN(nn.Module):
    def __init__(self, d_in, hidden, classes):
        super().__init__()
        self.l1 = nn.Linear(d_in, hidden)
        self.l2 = nn.Linear(hidden, hidden)
        self.l3 = nn.Linear(hidden, classes)

    def forward(self, adj_rows, x):
        h = F.relu(adj_rows @ ExchangeNodes.apply(self.l1(x)))
        h = F.relu(adj_rows @ ExchangeNodes.apply(self.l2(h)))
        return adj_rows @ ExchangeNodes.apply(self.l3(h))


class PartitionTrainer:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        adj, x, y, train, test = planted_graph()
        n = len(y) // self.world
        own = slice(self.rank * n, (self.rank + 1) * n)
        self.adj, self.x, self.y = adj[own], x[own], y[own]
        self.train_mask, self.test_mask = train[own], test[own]
        self.n_train = self.total(self.train_mask.sum())
        torch.manual_seed(1)
        self.model = GCN(24, 48, 4)
        for p in self.model.parameters():
            dist.broadcast(p.data, 0)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=5e-4)

    @staticmethod
    def total(v):
        v = v.detach().clone().float()
        dist.all_reduce(v)
        return v

    def step(self):
        self.model.train()
        out = self.model(self.adj, self.x)
        loss = F.cross_entropy(out[self.train_mask], self.y[self.train_mask], reduction="sum") / self.n_train
        self.opt.zero_grad()
        loss.backward()
        works = [dist.all_reduce(p.grad, async_op=True) for p in self.model.parameters()]
        for w in works:
            w.wait()
        self.opt.step()
        return self.total(loss).item()

    @torch.no_grad()
    def test(self):
        self.model.eval()
        hit = (self.model(self.adj, self.x).argmax(1) == self.y)[self.test_mask]
        return (self.total(hit.sum()) / self.total(self.test_mask.sum())).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    t = PartitionTrainer()
    for epoch in range(1, 121):
        loss = t.step()
        if epoch % 30 == 0:
            acc = t.test()
            if t.rank == 0:
                print(f"epoch {epoch} loss {loss:.4f} test acc {acc:.4f}", flush=True)
    if t.rank == 0:
        torch.save(t.model.state_dict(), "gcn.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
