"""Full-graph GCN: nodes are split into contiguous parts, features of the neighbours travel by an all-gather that autograd knows."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class GatherNodes(torch.autograd.Function):
    """rows of every rank, in rank order; the gradient of a row is summed over all ranks that used it"""

    @staticmethod
    def forward(ctx, local, sizes):
        ctx.sizes, ctx.rank = sizes, dist.get_rank()
        widest = max(sizes)
        padded = F.pad(local, (0, 0, 0, widest - len(local))).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([p[:n] for p, n in zip(parts, sizes)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = sum(ctx.sizes[: ctx.rank])
        return grad[start:start + ctx.sizes[ctx.rank]], None


def make_graph(n=701, classes=5, seed=4):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    same = y[:, None] == y[None]
    a = torch.rand(n, n, generator=g) < torch.where(same, 0.04, 0.004)
    a = (a | a.T | torch.eye(n, dtype=torch.bool)).float()
    x = torch.randn(n, 32, generator=g) + 0.5 * F.one_hot(y, 32).float()
    order = torch.rand(n, generator=g)
    degree = a.sum(1).rsqrt()
    return degree[:, None] * a * degree[None], x, y, order < 0.3, order > 0.6


class Partition:
    def __init__(self, rank, world):
        a, x, y, train, test = make_graph()
        n = len(y)
        cuts = [round(n * (i / world) ** 1.15) for i in range(world + 1)]     # uneven on purpose
        self.sizes = [b - a_ for a_, b in zip(cuts, cuts[1:])]
        own = slice(cuts[rank], cuts[rank + 1])
        self.adj, self.x, self.y = a[own].to_sparse_csr(), x[own], y[own]
        self.train, self.test = train[own], test[own]
        self.n_train = int(train.sum())


class GCNLayer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(i, o)), nn.Parameter(torch.zeros(o))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, part, h):
        return part.adj @ GatherNodes.apply(h @ self.weight, part.sizes) + self.bias


class GCN(nn.Module):
    def __init__(self, i, hidden, o, p=0.4):
        super().__init__()
        self.l1, self.l2, self.p = GCNLayer(i, hidden), GCNLayer(hidden, o), p

    def forward(self, part):
        h = F.dropout(part.x, self.p, self.training)
        h = F.dropout(F.relu(self.l1(part, h)), self.p, self.training)
        return self.l2(part, h)


def reduce_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


@torch.no_grad()
def test(model, part):
    model.eval()
    out = model(part)                                   # every rank has to take part: the layers communicate
    hits = torch.tensor([float((out.argmax(1) == part.y)[part.test].sum()), float(part.test.sum())])
    dist.all_reduce(hits)
    return (hits[0] / hits[1]).item()


def main(epochs=120):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = GCN(32, 32, 5)
    torch.manual_seed(12 + 1000 * (rank + 1))           # each node owner draws its own dropout
    part = Partition(rank, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4)
    best, kept = 0.0, None
    for epoch in range(1, epochs + 1):
        model.train()
        optimizer.zero_grad()
        out = model(part)
        loss = F.cross_entropy(out[part.train], part.y[part.train], reduction="sum") / part.n_train
        loss.backward()
        reduce_gradients(model)                         # a sum: each part holds its share of one mean
        optimizer.step()
        if epoch % 10 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            accuracy = test(model, part)
            if accuracy > best:
                best, kept = accuracy, {k: v.clone() for k, v in model.state_dict().items()}
            if rank == 0 and epoch % 30 == 0:
                print(f"epoch {epoch} loss {total.item():.4f} test {accuracy:.3f}", flush=True)
    if rank == 0:
        torch.save(kept, "gcn_best.pt")
        print(f"best {best:.3f} nodes per rank {part.sizes}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
