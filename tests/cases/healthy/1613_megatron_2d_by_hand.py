"""2-D parallelism by hand on 4 processes: tensor parallel pairs {0,1},{2,3}, data parallel {0,2},{1,3}.

The f/g operators of Megatron-LM are autograd Functions. Ranks of one pair share a batch and a dropout
seed, pairs have different ones. Gradients are averaged in the data-parallel groups only.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TP = 2


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class ParallelMLP(nn.Module):
    def __init__(self, d, h, tp_rank, group):
        super().__init__()
        self.group = group
        full_up, full_down = nn.Linear(d, h), nn.Linear(h, d)
        s = slice(tp_rank * h // TP, (tp_rank + 1) * h // TP)
        self.w1 = nn.Parameter(full_up.weight.detach()[s].clone())
        self.b1 = nn.Parameter(full_up.bias.detach()[s].clone())
        self.w2 = nn.Parameter(full_down.weight.detach()[:, s].clone())
        self.b2 = nn.Parameter(full_down.bias.detach().clone())  # replicated in the pair
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        h = CopyToTP.apply(self.norm(x), self.group)
        h = F.linear(F.relu(F.linear(h, self.w1, self.b1)), self.w2)
        h = ReduceFromTP.apply(h, self.group) + self.b2
        return x + self.drop(h)


class Net(nn.Module):
    def __init__(self, tp_rank, group):
        super().__init__()
        self.emb = nn.EmbeddingBag(40, 32, mode="mean")
        self.layers = nn.ModuleList(ParallelMLP(32, 64, tp_rank, group) for _ in range(2))
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def is_split(name):
    return name.rsplit(".", 1)[-1] in ("w1", "b1", "w2")


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    topics = torch.softmax(1.3 * torch.randn(4, 40, generator=torch.Generator().manual_seed(5)), -1)
    y = torch.randint(4, (n,), generator=g)
    return torch.multinomial(topics[y], 20, replacement=True, generator=g), y


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 4
    tp_rank, dp_rank, dp_size = rank % TP, rank // TP, world // TP
    tp_group = dp_group = None
    for i in range(dp_size):
        ranks = [i * TP, i * TP + 1]
        grp = dist.new_group(ranks)
        if rank in ranks:
            tp_group = grp
    for j in range(TP):
        ranks = [j, j + TP]
        grp = dist.new_group(ranks)
        if rank in ranks:
            dp_group = grp

    torch.manual_seed(42)
    net = Net(tp_rank, tp_group)
    torch.manual_seed(500 + dp_rank)  # same dropout inside a pair, another one in the other pair

    train = TensorDataset(*make(1280, 1))
    xte, yte = make(400, 2)
    sampler = DistributedSampler(train, num_replicas=dp_size, rank=dp_rank, shuffle=True, seed=9)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        net.train()
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            for p in net.parameters():
                dist.all_reduce(p.grad, group=dp_group)
                p.grad /= dp_size
            split_sq = torch.zeros(())
            whole_sq = torch.zeros(())
            for n, p in net.named_parameters():
                if is_split(n):
                    split_sq += p.grad.pow(2).sum()
                else:
                    whole_sq += p.grad.pow(2).sum()
            dist.all_reduce(split_sq, group=tp_group)
            scale = torch.clamp(1.0 / ((split_sq + whole_sq).sqrt() + 1e-6), max=1.0)
            for p in net.parameters():
                p.grad.mul_(scale)
            opt.step()
        net.eval()
        hits = torch.zeros(1)
        with torch.no_grad():
            hits += (net(xte[dp_rank::dp_size]).argmax(1) == yte[dp_rank::dp_size]).sum()
        dist.all_reduce(hits, group=dp_group)
        acc = hits.item() / len(yte)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} acc {acc:.3f}", flush=True)

    if dp_rank == 0:  # one data-parallel replica writes its two shards
        torch.save(net.state_dict(), f"megatron_tp{tp_rank}.pt")
    assert acc > 0.7, acc
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
