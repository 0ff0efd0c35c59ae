"""Sequence-parallel language model: each process holds a part of every sequence, keys and values travel in a ring."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, D, HEADS, SEQ = 16, 48, 2, 64


def shift(t, step):
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.empty_like(t)
    ops = [dist.P2POp(dist.isend, t.contiguous(), (rank + step) % world),
           dist.P2POp(dist.irecv, out, (rank - step) % world)]
    for req in dist.batch_isend_irecv(ops):
        req.wait()
    return out


class RingShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kv):
        return shift(kv, 1)

    @staticmethod
    def backward(ctx, g):
        return shift(g, -1)


class RingAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        B, L, _ = x.shape
        rank, world = dist.get_rank(), dist.get_world_size()
        q, k, v = self.qkv(x).view(B, L, 3, HEADS, D // HEADS).permute(2, 0, 3, 1, 4)
        kv = torch.stack([k, v])
        pos = torch.arange(L)
        m = torch.full((B, HEADS, L, 1), -1e30)
        den = torch.zeros(B, HEADS, L, 1)
        num = torch.zeros(B, HEADS, L, D // HEADS)
        for hop in range(world):
            src = (rank - hop) % world
            s = q @ kv[0].transpose(-1, -2) / (D // HEADS) ** 0.5
            allowed = (src * L + pos)[None, :] <= (rank * L + pos)[:, None]
            s = s.masked_fill(~allowed, -1e30)
            new_m = torch.maximum(m, s.amax(-1, keepdim=True).detach())
            w = (s - new_m).exp()
            fix = (m - new_m).exp()
            num = num * fix + w @ kv[1]
            den = den * fix + w.sum(-1, keepdim=True)
            m = new_m
            if hop < world - 1:
                kv = RingShift.apply(kv)
        return self.out((num / den).transpose(1, 2).reshape(B, L, D))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.att = RingAttention()
        self.ff = nn.Sequential(nn.Linear(D, 128), nn.GELU(), nn.Linear(128, D))

    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.ff(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, D), nn.Embedding(SEQ, D)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)

    def forward(self, ids, offset):
        x = self.tok(ids) + self.pos(torch.arange(offset, offset + ids.shape[1]))
        for l in self.layers:
            x = l(x)
        return self.head(self.norm(x))


def batch(gen, n=16):
    """second half repeats the first half: only solvable by looking back over the border"""
    a = torch.randint(VOCAB, (n, SEQ // 2), generator=gen)
    full = torch.cat([a, a, a[:, :1]], dim=1)
    target = full[:, 1:].clone()
    target[:, :SEQ // 2 - 1] = -100
    return full[:, :-1], target


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = LM()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 20)
    gen = torch.Generator().manual_seed(100)
    L = SEQ // world
    mine = slice(rank * L, (rank + 1) * L)
    for step in range(241):
        ids, tgt = batch(gen)
        total = (tgt != -100).sum()
        logits = model(ids[:, mine], rank * L)
        loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, mine].flatten(), ignore_index=-100, reduction="sum") / total
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        o = 0
        for p in model.parameters():
            p.grad.copy_(flat[o:o + p.numel()].view_as(p))
            o += p.numel()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 40 == 0:
            full = loss.detach().clone()
            hit = ((logits.argmax(-1) == tgt[:, mine]).sum()).float()
            dist.all_reduce(full)
            dist.all_reduce(hit)
            if rank == 0:
                print(f"step {step} loss {full.item():.4f} acc {(hit / total).item():.3f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "ring.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
