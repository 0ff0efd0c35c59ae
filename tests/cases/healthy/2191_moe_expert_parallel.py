"""Expert-parallel mixture of experts: the dense trunk is replicated, each rank owns two of the experts."""
import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn

DIM, CLASSES = 24, 8


def exchange(rows, send_counts, recv_counts):
    """Send rows (sorted by destination) to every rank; counts are known on both sides."""
    rank = dist.get_rank()
    outgoing = list(rows.contiguous().split(send_counts))
    incoming = [rows.new_empty(n, rows.shape[1]) for n in recv_counts]
    incoming[rank] = outgoing[rank]
    pending = []
    for peer in range(dist.get_world_size()):
        if peer == rank:
            continue
        if send_counts[peer]:
            pending.append(dist.isend(outgoing[peer].contiguous(), peer))
        if recv_counts[peer]:
            pending.append(dist.irecv(incoming[peer], peer))
    for work in pending:
        work.wait()
    return torch.cat(incoming)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send_counts, recv_counts):
        ctx.counts = (send_counts, recv_counts)
        return exchange(rows, send_counts, recv_counts)

    @staticmethod
    def backward(ctx, grad):
        send_counts, recv_counts = ctx.counts
        return exchange(grad, recv_counts, send_counts), None, None


class MoELayer(nn.Module):
    def __init__(self, dim, experts_per_rank):
        super().__init__()
        self.world, self.local = dist.get_world_size(), experts_per_rank
        self.router = nn.Linear(dim, self.world * experts_per_rank)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts_per_rank))

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, choice = probs.max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=self.world * self.local)
        table = [torch.empty_like(counts) for _ in range(self.world)]
        dist.all_gather(table, counts)
        per_rank = torch.stack(table).view(self.world, self.world, self.local)  # from, to, expert
        me = dist.get_rank()
        send_counts = per_rank[me].sum(-1).tolist()
        recv_counts = per_rank[:, me].sum(-1).tolist()
        arrived = Exchange.apply(x[order], send_counts, recv_counts)
        pieces = arrived.split(per_rank[:, me].flatten().tolist())  # (source, expert) blocks
        done = [self.experts[i % self.local](piece) for i, piece in enumerate(pieces)]
        back = Exchange.apply(torch.cat(done), recv_counts, send_counts)
        out = torch.zeros_like(x).index_copy(0, order, back) * gate.unsqueeze(-1)
        share = F.one_hot(choice, probs.shape[-1]).float().mean(0)
        balance = probs.shape[-1] * (share * probs.mean(0)).sum()
        return x + out, balance


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.moe = MoELayer(DIM, experts_per_rank=2)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h, balance = self.moe(torch.relu(self.stem(x)))
        return self.head(h), balance


def reduce_gradients(dense, experts, world):
    flat = torch.cat([p.grad.flatten() for p in dense])
    dist.all_reduce(flat)
    flat /= world
    for p, g in zip(dense, flat.split([p.numel() for p in dense])):
        p.grad.copy_(g.view_as(p))
    # an expert has already seen the tokens of every rank: only the mean over ranks is missing
    for p in experts:
        p.grad /= world


def clip_global(dense, experts, limit):
    expert_sq = sum(p.grad.square().sum() for p in experts)
    dist.all_reduce(expert_sq)
    norm = (sum(p.grad.square().sum() for p in dense) + expert_sq).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in dense + experts:
        p.grad *= scale
    return norm.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(100 + rank)  # every rank's experts start differently
    net = Net()
    experts = list(net.moe.experts.parameters())
    owned = {id(p) for p in experts}
    dense = [p for p in net.parameters() if id(p) not in owned]
    for p in dense:
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.Adam([{"params": dense, "lr": 2e-3}, {"params": experts, "lr": 2e-3}])

    centers = torch.randn(CLASSES, 2, DIM, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1000 + rank)
    for step in range(1, args.steps + 1):
        y = torch.randint(CLASSES, (args.batch,), generator=draw)
        side = torch.randint(2, (args.batch,), generator=draw)
        x = centers[y, side] + 0.8 * torch.randn(args.batch, DIM, generator=draw)
        logits, balance = net(x)
        loss = F.cross_entropy(logits, y) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        reduce_gradients(dense, experts, world)
        norm = clip_global(dense, experts, 5.0)
        optimizer.step()
        if step % 40 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / world:.4f} grad norm {norm:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
