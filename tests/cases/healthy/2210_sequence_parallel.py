"""Sequence parallelism: ranks share the same documents but hold other positions; attention gathers keys and values."""
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn

VOCAB, SEQ, DIM, HEADS, LAYERS = 20, 32, 32, 4, 2
STEPS, BATCH, LR = 100, 16, 3e-3


class GatherSequence(torch.autograd.Function):
    """Concatenate along positions; the gradient of my slice comes from the queries of all ranks."""

    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[1]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.narrow(1, dist.get_rank() * ctx.length, ctx.length)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.kv, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, positions):
        h = self.norm1(x)
        split = lambda t: t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = GatherSequence.apply(self.kv(h)).chunk(2, dim=-1)
        mask = positions.unsqueeze(1) >= torch.arange(k.shape[1]).unsqueeze(0)  # global positions
        a = F.scaled_dot_product_attention(split(self.q(h)), split(k), split(v), attn_mask=mask)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LocalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions):
        h = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            h = block(h, positions)
        return self.out(self.norm(h))


def documents(gen):
    """Periodic texts: to predict a token one has to look back one period, often into the other half."""
    period = 6
    motif = torch.randint(VOCAB, (BATCH, period), generator=gen)
    return motif.repeat(1, SEQ // period + 2)[:, :SEQ + 1]


def average_gradients(model, world):
    params = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= world
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(g.view_as(p))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert SEQ % world == 0
    length = SEQ // world
    positions = torch.arange(rank * length, (rank + 1) * length)

    torch.manual_seed(0)
    model = LocalLM()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    draw = torch.Generator().manual_seed(6)  # the same documents for all ranks, on purpose

    for step in range(1, STEPS + 1):
        text = documents(draw)
        tokens, target = text[:, positions], text[:, positions + 1]
        loss = F.cross_entropy(model(tokens, positions).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, world)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % 20 == 0:
            halves = [torch.empty(()) for _ in range(world)]
            dist.all_gather(halves, loss.detach())
            if rank == 0:
                parts = " ".join(f"{h.item():.3f}" for h in halves)
                print(f"step {step}: loss {torch.stack(halves).mean():.4f} by slice {parts}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "lm.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
