import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.send, ctx.recv = send, recv
        out = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, g):
        out = g.new_empty(sum(ctx.send), g.shape[1])
        dist.all_to_all_single(out, g.contiguous(), ctx.send, ctx.recv)
        return out, None, None


class SwitchLayer(nn.Module):
    """One expert per process, top-1 routing."""

    def __init__(self, dim):
        super().__init__()
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.router = nn.Linear(dim, self.world)
        with torch.random.fork_rng():
            torch.manual_seed(900 + self.rank)
            self.expert = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        prob = self.router(x).softmax(-1)
        gate, choice = prob.max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=self.world)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        send, recv = counts.tolist(), incoming.tolist()
        y = self.expert(AllToAll.apply(x[order], send, recv))
        y = AllToAll.apply(y, recv, send)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        share = counts.float() / len(x)
        balance = self.world * (share * prob.mean(0)).sum()
        return x + gate.unsqueeze(1) * y[back], balance


class Net(nn.Module):
    def __init__(self, d_in=20, dim=32, classes=8):
        super().__init__()
        self.inp = nn.Linear(d_in, dim)
        self.moe = SwitchLayer(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        h, balance = self.moe(F.relu(self.inp(x)))
        return self.out(h), balance

    def shared_parameters(self):
        return [p for n, p in self.named_parameters() if not n.startswith("moe.expert")]


class Piecewise:
    def __init__(self, seed):
        w = torch.Generator().manual_seed(3)
        self.a = torch.randn(2, 20, 8, generator=w)
        self.g = torch.Generator().manual_seed(seed)

    def batch(self, n):
        x = torch.randn(n, 20, generator=self.g)
        side = (x[:, 0] > 0).long()
        return x, torch.einsum("nd,ndc->nc", x, self.a[side]).argmax(1)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    net = Net()
    shared = net.shared_parameters()
    for p in shared:
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    source = Piecewise(60 + rank)
    local = 96
    global_batch = local * world
    for step in range(1, 221):
        x, y = source.batch(local)
        logits, balance = net(x)
        ce = F.cross_entropy(logits, y, reduction="sum") / global_batch
        loss = ce + 0.1 * balance / world
        opt.zero_grad()
        loss.backward()
        # objective is normalised by the global batch: shared gradients are plain sums,
        # the expert's gradient already holds the tokens of all the ranks
        for p in shared:
            dist.all_reduce(p.grad)
        opt.step()
        if step % 55 == 0:
            stat = torch.stack([ce.detach(), (logits.argmax(1) == y).float().sum() / global_batch])
            dist.all_reduce(stat)
            if rank == 0:
                print(f"step {step} ce {stat[0].item():.4f} acc {stat[1].item():.3f} balance {balance.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
