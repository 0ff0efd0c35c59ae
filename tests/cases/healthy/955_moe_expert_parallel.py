"""Switch layer with expert parallelism: every rank owns two experts, tokens travel by all_to_all; router and trunk are replicated."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

DIM, EXPERTS_PER_RANK, CLASSES = 24, 2, 5


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, recv):
        ctx.send, ctx.recv = send, recv
        out = x.new_empty(sum(recv), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), recv, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        back = grad.new_empty(sum(ctx.send), grad.shape[1])
        dist.all_to_all_single(back, grad.contiguous(), ctx.send, ctx.recv)
        return back, None, None


class ExpertParallelMoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world
        self.router = nn.Linear(DIM, EXPERTS_PER_RANK * world, bias=False)
        with torch.random.fork_rng():
            torch.manual_seed(500 + rank)  # experts are meant to differ
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(EXPERTS_PER_RANK)
            )

    def forward(self, x):
        probs = F.softmax(self.router(x), dim=1)
        gate, choice = probs.max(1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=EXPERTS_PER_RANK * self.world)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)  # how many tokens each peer sends to each of my experts
        send = counts.view(self.world, -1).sum(1).tolist()
        recv = incoming.view(self.world, -1).sum(1).tolist()
        tokens = Exchange.apply(x[order], send, recv)
        owner = torch.arange(EXPERTS_PER_RANK).repeat(self.world).repeat_interleave(incoming)
        out = tokens.new_zeros(tokens.shape)
        for i, expert in enumerate(self.experts):
            mine = (owner == i).nonzero().squeeze(1)
            out = out.index_add(0, mine, expert(tokens[mine]))  # an expert without tokens gets a zero gradient
        back = Exchange.apply(out, recv, send)
        y = torch.empty_like(back).index_copy(0, order, back)
        load = F.one_hot(choice, probs.shape[1]).float().mean(0)
        balance = probs.shape[1] * (load * probs.mean(0)).sum()
        return x + gate.unsqueeze(1) * y, balance


class Model(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem = nn.Linear(12, DIM)
        self.moe = ExpertParallelMoE(rank, world)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h, balance = self.moe(torch.tanh(self.stem(x)))
        return self.head(h), balance


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(rank, world)
    experts = {id(p) for p in model.moe.experts.parameters()}
    shared = [p for p in model.parameters() if id(p) not in experts]
    for p in shared:
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(640, 12, generator=g)
    y = (x[:, :CLASSES] + x[:, 5 : 5 + CLASSES].abs()).argmax(1)
    mine_x, mine_y = x[rank::world], y[rank::world]

    for epoch in range(5):
        perm = torch.randperm(len(mine_x), generator=g)
        seen = correct = 0
        for idx in perm.split(40):
            logits, balance = model(mine_x[idx])
            loss = F.cross_entropy(logits, mine_y[idx]) + 0.01 * balance
            opt.zero_grad()
            loss.backward()
            flat = torch.cat([p.grad.reshape(-1) for p in shared])
            dist.all_reduce(flat)
            flat /= world
            for p, piece in zip(shared, flat.split([p.numel() for p in shared])):
                p.grad.copy_(piece.view_as(p))
            for p in model.moe.experts.parameters():
                p.grad /= world  # tokens of all ranks have already been summed by the backward exchange
            opt.step()
            seen += len(idx)
            correct += (logits.argmax(1) == mine_y[idx]).sum().item()
        stat = torch.tensor([correct, seen])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch}: train accuracy {stat[0].item() / stat[1].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
