import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CLASSES, DIM = 200, 32


class GatherFeatures(torch.autograd.Function):
    """all_gather forward; the gradients of all the class shards are added up on the way back."""

    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, g):
        out = g.new_empty(g.shape[0] // dist.get_world_size(), g.shape[1])
        dist.reduce_scatter_tensor(out, g.contiguous(), op=dist.ReduceOp.SUM)
        return out


class ShardedCE(torch.autograd.Function):
    """Mean softmax cross entropy over the global batch; every rank holds a slice of the classes."""

    @staticmethod
    def forward(ctx, logits, target, first):
        top = logits.max(1, keepdim=True).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        e = (logits - top).exp()
        z = e.sum(1, keepdim=True)
        dist.all_reduce(z)
        prob = e / z
        mine = (target >= first) & (target < first + logits.shape[1])
        rows = mine.nonzero().squeeze(1)
        cols = target[rows] - first
        p = torch.zeros(len(target))
        p[rows] = prob[rows, cols]
        dist.all_reduce(p)
        ctx.save_for_backward(prob, rows, cols)
        return -p.clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx, go):
        prob, rows, cols = ctx.saved_tensors
        g = prob.clone()
        g[rows, cols] -= 1
        return go * g / len(prob), None, None


class PartialFC(nn.Module):
    def __init__(self, scale=16.0, margin=0.2):
        super().__init__()
        world, rank = dist.get_world_size(), dist.get_rank()
        self.local = CLASSES // world
        self.first = rank * self.local
        full = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(9)) * 0.1
        self.weight = nn.Parameter(full[self.first:self.first + self.local].clone())
        self.scale, self.margin = scale, margin

    def forward(self, feats, labels):
        everything = GatherFeatures.apply(feats)
        all_labels = labels.new_empty(len(labels) * dist.get_world_size())
        dist.all_gather_into_tensor(all_labels, labels)
        cos = F.normalize(everything) @ F.normalize(self.weight).t()
        own = (all_labels - self.first).clamp(0, self.local - 1)
        hit = ((all_labels >= self.first) & (all_labels < self.first + self.local)).float()
        onehot = F.one_hot(own, self.local) * hit.unsqueeze(1)
        return ShardedCE.apply(self.scale * (cos - self.margin * onehot), all_labels, self.first)


class Faces:
    def __init__(self, seed):
        self.proto = torch.randn(CLASSES, 40, generator=torch.Generator().manual_seed(1))
        self.g = torch.Generator().manual_seed(seed)

    def batch(self, n):
        y = torch.randint(0, CLASSES, (n,), generator=self.g)
        return self.proto[y] + 0.5 * torch.randn(n, 40, generator=self.g), y


def sync_backbone(backbone):
    # the head's loss is already a mean over the whole batch: contributions add
    flat = torch.cat([p.grad.reshape(-1) for p in backbone.parameters()])
    dist.all_reduce(flat)
    i = 0
    for p in backbone.parameters():
        p.grad.copy_(flat[i:i + p.numel()].view_as(p))
        i += p.numel()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    backbone = nn.Sequential(nn.Linear(40, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, DIM))
    for p in backbone.parameters():
        dist.broadcast(p.data, 0)
    head = PartialFC()
    opt = torch.optim.SGD([{"params": backbone.parameters()}, {"params": head.parameters(), "lr": 0.4}], lr=0.1, momentum=0.9)
    faces = Faces(50 + rank)
    for step in range(1, 241):
        x, y = faces.batch(64)
        loss = head(backbone(x), y)
        opt.zero_grad()
        loss.backward()
        sync_backbone(backbone)
        opt.step()
        if step % 60 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    torch.save(head.state_dict(), f"head_shard{rank}.pt")
    if rank == 0:
        torch.save(backbone.state_dict(), "backbone.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
