"""Codistillation: the world is cut in halves; each half trains its own model and learns from the other's predictions."""
import argparse
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

warnings.filterwarnings("ignore", category=UserWarning)


def spiral(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 4 * r + y * 2 * torch.pi / 3 + 0.2 * torch.randn(n, generator=g)
    return torch.stack([r * a.cos(), r * a.sin()], 1), y


class Half:
    """The ranks of one half, with a group of their own."""

    def __init__(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        size = world // 2
        lists = [list(range(k * size, (k + 1) * size)) for k in range(2)]
        groups = [dist.new_group(r) for r in lists]           # all ranks make all groups
        self.index = rank // size
        self.ranks, self.group = lists[self.index], groups[self.index]
        self.place = rank - self.ranks[0]
        self.size = size
        pairs = [dist.new_group([k, k + size]) for k in range(size)]
        self.pair, self.partner = pairs[self.place], (rank + size) % world

    def mean_(self, t):
        dist.all_reduce(t, group=self.group)
        return t.div_(self.size)

    def exchange(self, t):
        """Hands t to the same place in the other half, and brings its."""
        parts = [torch.empty_like(t) for _ in range(2)]
        dist.all_gather(parts, t.contiguous(), group=self.pair)
        return parts[1 - self.index]


class Member(nn.Module):
    def __init__(self, width, act):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), act(), nn.Dropout(0.05), nn.Linear(width, width), act(), nn.Linear(width, 3))

    def forward(self, x):
        return self.net(x * 3)


@torch.no_grad()
def evaluate(model, half, x, y):
    """Accuracy of each half's model, and of both together; all see the same rows."""
    model.eval()
    logp = model(x).log_softmax(-1)
    model.train()
    other = half.exchange(logp)
    pair = [logp, other] if half.index == 0 else [other, logp]
    accs = [(p.argmax(1) == y).float().mean().item() for p in pair]
    return accs + [((pair[0].exp() + pair[1].exp()).argmax(1) == y).float().mean().item()]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=500)
    ap.add_argument("--warm", type=int, default=150)
    ap.add_argument("--weight", type=float, default=0.5)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    half = Half()
    x, y = spiral(1200, 1)
    vx, vy = spiral(500, 2)
    torch.manual_seed(40 + half.index)
    model = Member(64, nn.Tanh if half.index else nn.ReLU)
    for p in model.parameters():
        dist.broadcast(p.data, src=half.ranks[0], group=half.group)
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=4e-3, weight_decay=1e-3)
    common = torch.Generator().manual_seed(9)
    torch.manual_seed(400 + rank)
    for step in range(args.steps):
        rows = torch.randint(0, len(x), (64 * half.size,), generator=common)[half.place::half.size]
        logits = model(x[rows])
        loss = F.cross_entropy(logits, y[rows])
        theirs = half.exchange(logits.detach()).softmax(-1)
        if step >= args.warm:
            loss = loss + args.weight * F.kl_div(logits.log_softmax(-1), theirs, reduction="batchmean")
        opt.zero_grad()
        loss.backward()
        flat = half.mean_(nn.utils.parameters_to_vector([p.grad for p in params]))
        k = 0
        for p in params:
            p.grad.copy_(flat[k:k + p.numel()].view_as(p))
            k += p.numel()
        opt.step()
        if (step + 1) % 125 == 0:
            a, b, both = evaluate(model, half, vx, vy)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.3f} first {a:.3f} second {b:.3f} together {both:.3f}", flush=True)
    if half.place == 0:
        torch.save(model.state_dict(), f"half{half.index}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
