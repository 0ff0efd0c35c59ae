"""Expert-parallel mixture of experts (top-1) for a regression over several regimes."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Exchange(torch.autograd.Function):
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


class ExpertLayer(nn.Module):
    def __init__(self, width, hidden, n_experts):
        super().__init__()
        self.world = dist.get_world_size()
        self.n_experts, self.n_local = n_experts, n_experts // self.world
        self.router = nn.Linear(width, n_experts)
        every = [nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
                 for _ in range(n_experts)]
        first = dist.get_rank() * self.n_local
        self.experts = nn.ModuleList(every[first:first + self.n_local])

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, choice = probs.max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=self.n_experts)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        send = counts.view(self.world, -1).sum(1).tolist()
        recv = theirs.view(self.world, -1).sum(1).tolist()
        inbox = Exchange.apply(x[order], send, recv)
        local_id = torch.arange(self.n_local).repeat(self.world).repeat_interleave(theirs)
        outbox = torch.zeros_like(inbox)
        for e, expert in enumerate(self.experts):
            pick = (local_id == e).nonzero().squeeze(1)
            outbox = outbox.index_add(0, pick, expert(inbox[pick]))
        back = Exchange.apply(outbox, recv, send)
        y = torch.zeros_like(x).index_copy(0, order, back)
        share = counts.float()
        dist.all_reduce(share)
        share = share / share.sum()
        aux = self.n_experts * (share * probs.mean(0)).sum()
        return x + gate[:, None] * y, aux


class Net(nn.Module):
    def __init__(self, width=24, hidden=32, n_experts=4):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.moe = ExpertLayer(width, hidden, n_experts)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h, aux = self.moe(torch.tanh(self.inp(x)))
        return self.out(h).squeeze(1), aux


def make_batch(gen, n):
    x = torch.randn(n, 8, generator=gen)
    regime = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    w = torch.randn(4, 8, generator=torch.Generator().manual_seed(31))
    return x, (x * w[regime]).sum(1) + 0.05 * torch.randn(n, generator=gen)


def average_gradients(model):
    world = dist.get_world_size()
    for name, p in model.named_parameters():
        if ".experts." in name:
            p.grad.div_(world)
        else:
            dist.all_reduce(p.grad)
            p.grad.div_(world)


def expert_norm(model):
    sq = sum(p.grad.pow(2).sum() for n, p in model.named_parameters() if ".experts." in n)
    dist.all_reduce(sq)
    return sq.sqrt().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--global-batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--aux", type=float, default=0.01)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    gen = torch.Generator().manual_seed(50)
    for step in range(args.steps):
        x, y = make_batch(gen, args.global_batch)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        pred, aux = model(x)
        loss = F.mse_loss(pred, y)
        opt.zero_grad()
        (loss + args.aux * aux).backward()
        average_gradients(model)
        opt.step()
        if step % 100 == 0 or step == args.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            norm = expert_norm(model)
            if rank == 0:
                print(f"step {step} mse {mean.item() / world:.4f} expert_grad {norm:.5f}", flush=True)
    with torch.no_grad():
        x, y = make_batch(torch.Generator().manual_seed(900), 1024)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        err = F.mse_loss(model(x)[0], y)
        dist.all_reduce(err)
    if rank == 0:
        print(f"held-out mse {err.item() / world:.4f}", flush=True)
    os.makedirs("moe", exist_ok=True)
    torch.save(model.state_dict(), f"moe/ep{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
