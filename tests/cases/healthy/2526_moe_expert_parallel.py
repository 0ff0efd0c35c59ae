"""Token-routing mixture of experts; every process owns its own experts, the rest is replicated."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

DIM, CLASSES, EXPERTS, SEQ = 24, 6, 4, 10


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


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, DIM))

    def forward(self, x):
        return self.net(x)


class MoE(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.world = world
        self.per = EXPERTS // world
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        gen_state = torch.get_rng_state()
        torch.manual_seed(1000 + rank)
        self.experts = nn.ModuleList([Expert() for _ in range(self.per)])
        torch.set_rng_state(gen_state)
        for p in self.experts.parameters():
            p.expert_local = True

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, DIM)
        probs = self.gate(x).softmax(-1)
        w, choice = probs.max(-1)
        order = choice.argsort(stable=True)
        per_expert = torch.bincount(choice, minlength=EXPERTS)
        recv_counts = torch.empty_like(per_expert)
        dist.all_to_all_single(recv_counts, per_expert)
        send = per_expert.view(self.world, self.per).sum(1).tolist()
        table = recv_counts.view(self.world, self.per)
        recv = table.sum(1).tolist()
        tokens = AllToAll.apply(x[order], send, recv)
        chunks = tokens.split(table.flatten().tolist())
        outs = [None] * len(chunks)
        for e in range(self.per):
            idx = [r * self.per + e for r in range(self.world)]
            y = self.experts[e](torch.cat([chunks[i] for i in idx]))
            for i, piece in zip(idx, y.split([len(chunks[i]) for i in idx])):
                outs[i] = piece
        back = AllToAll.apply(torch.cat(outs), recv, send)
        y = torch.empty_like(x).index_copy(0, order, back) * w.unsqueeze(-1)
        frac = per_expert.float() / len(x)
        aux = EXPERTS * (frac * probs.mean(0)).sum()
        return y.view(shape), aux


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.inp = nn.Linear(8, DIM)
        self.ln = nn.LayerNorm(DIM)
        self.moe = MoE(rank, world)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h = self.inp(x)
        y, aux = self.moe(self.ln(h))
        return self.head((h + y).mean(1)), aux


def split_params(model):
    shared = [p for p in model.parameters() if not getattr(p, "expert_local", False)]
    local = [p for p in model.parameters() if getattr(p, "expert_local", False)]
    return shared, local


def reduce_grads(shared, local, world):
    flat = torch.cat([p.grad.flatten() for p in shared])
    dist.all_reduce(flat)
    flat /= world
    o = 0
    for p in shared:
        p.grad.copy_(flat[o:o + p.numel()].view_as(p))
        o += p.numel()
    for p in local:
        p.grad.div_(world)


def clip(shared, local, limit):
    sq = sum(p.grad.pow(2).sum() for p in local)
    dist.all_reduce(sq)
    norm = (sq + sum(p.grad.pow(2).sum() for p in shared)).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for p in shared + local:
        p.grad.mul_(scale)
    return norm.item()


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(4, 8, CLASSES, generator=torch.Generator().manual_seed(9))
    x = torch.randn(n, SEQ, 8, generator=g)
    mode = (x[..., 0] > 0).long() * 2 + (x[..., 1] > 0).long()
    score = torch.einsum("nsd,nsdc->nsc", x, w[mode]).mean(1)
    return x, score.argmax(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net(rank, world)
    shared, local = split_params(model)
    for p in shared:
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam([{"params": shared}, {"params": local}], lr=3e-3)
    X, Y = make(2048, 1)
    VX, VY = make(512, 2)
    bs = 64
    for epoch in range(8):
        perm = torch.randperm(len(X), generator=torch.Generator().manual_seed(epoch))
        mine = perm[rank::world]
        for i in range(0, len(mine) - bs + 1, bs):
            idx = mine[i:i + bs]
            logits, aux = model(X[idx])
            loss = F.cross_entropy(logits, Y[idx]) + 0.01 * aux
            opt.zero_grad(set_to_none=False)
            loss.backward()
            reduce_grads(shared, local, world)
            norm = clip(shared, local, 5.0)
            opt.step()
        model.eval()
        with torch.no_grad():
            vx, vy = VX[rank::world], VY[rank::world]
            hit = torch.tensor([(model(vx)[0].argmax(1) == vy).sum().item(), len(vy)], dtype=torch.float64)
        model.train()
        dist.all_reduce(hit)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.3f} gnorm {norm:.2f} val acc {(hit[0] / hit[1]).item():.3f}")
    os.makedirs("moe_ckpt", exist_ok=True)
    torch.save({k: v for k, v in model.state_dict().items() if "experts" in k}, f"moe_ckpt/experts_rank{rank}.pt")
    if rank == 0:
        torch.save({k: v for k, v in model.state_dict().items() if "experts" not in k}, "moe_ckpt/shared.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
