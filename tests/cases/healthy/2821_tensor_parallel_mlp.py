import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def full_init(out_f, in_f, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(out_f, in_f, generator=g) / in_f ** 0.5


class ColumnLinear(nn.Module):
    def __init__(self, in_f, out_f, seed):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(full_init(out_f, in_f, seed).chunk(world, 0)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(out_f // world))

    def forward(self, x):
        return F.linear(CopyToRegion.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, in_f, out_f, seed):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(full_init(out_f, in_f, seed).chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(out_f))

    def forward(self, x):
        return ReduceFromRegion.apply(F.linear(x, self.weight)) + self.bias


class Block(nn.Module):
    def __init__(self, dim, mult, seed):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = ColumnLinear(dim, dim * mult, seed)
        self.down = RowLinear(dim * mult, dim, seed + 1)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim=48, depth=3):
        super().__init__()
        self.embed = nn.Linear(16, dim)
        self.blocks = nn.ModuleList([Block(dim, 4, 10 * (i + 1)) for i in range(depth)])
        self.head = nn.Linear(dim, 5)

    def forward(self, x):
        h = self.embed(x)
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def global_grad_norm(model):
    sharded = torch.zeros(())
    replicated = torch.zeros(())
    for name, p in model.named_parameters():
        if ".up." in name or name.endswith("down.weight"):
            sharded += p.grad.pow(2).sum()
        else:
            replicated += p.grad.pow(2).sum()
    dist.all_reduce(sharded)
    return (sharded + replicated).sqrt()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # every process of the tensor-parallel group reads the same batch
    data = torch.Generator().manual_seed(42)
    w = torch.randn(16, 5, generator=data)
    for step in range(1, 201):
        x = torch.randn(64, 16, generator=data)
        y = (torch.tanh(x) @ w).argmax(1)
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = global_grad_norm(model)
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
        opt.step()
        if step % 50 == 0 and rank == 0:
            acc = (logits.argmax(1) == y).float().mean().item()
            print(f"step {step} loss {loss.item():.4f} acc {acc:.3f} norm {norm.item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
