"""Face-recognition style training: replicated backbone, the big softmax classifier is sharded over ranks by class."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    identities: int = 200
    features: int = 32
    embedding: int = 24
    batch: int = 64
    steps: int = 160
    scale: float = 16.0
    margin: float = 0.1
    lr: float = 4e-3


class GatherRows(torch.autograd.Function):
    """Rows of all ranks; every rank holds a part of the gradient of all rows, hence the sum on the way back."""

    @staticmethod
    def forward(ctx, rows):
        ctx.n = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.n
        return grad[start:start + ctx.n]


class ShardedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy over the global batch; each rank sees the logits of its own classes only."""

    @staticmethod
    def forward(ctx, logits, labels, first_class):
        top = logits.max(dim=1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        exp = (logits - top.unsqueeze(1)).exp()
        norm = exp.sum(dim=1)
        dist.all_reduce(norm)
        local = labels - first_class
        rows = ((local >= 0) & (local < logits.shape[1])).nonzero().squeeze(1)
        target = torch.zeros(len(logits))
        target[rows] = logits[rows, local[rows]] - top[rows]
        dist.all_reduce(target)
        ctx.save_for_backward(exp / norm.unsqueeze(1), rows, local[rows])
        return (norm.log() - target).mean()

    @staticmethod
    def backward(ctx, grad_out):
        prob, rows, columns = ctx.saved_tensors
        grad = prob.clone()
        grad[rows, columns] -= 1
        return grad * grad_out / len(prob), None, None


class PartialFC(nn.Module):
    def __init__(self, cfg, rank, world):
        super().__init__()
        assert cfg.identities % world == 0
        self.cfg = cfg
        self.per_rank = cfg.identities // world
        self.first = rank * self.per_rank
        self.weight = nn.Parameter(torch.randn(self.per_rank, cfg.embedding) * 0.1)

    def forward(self, embedding, labels):
        emb = GatherRows.apply(F.normalize(embedding))
        world = dist.get_world_size()
        all_labels = [torch.empty_like(labels) for _ in range(world)]
        dist.all_gather(all_labels, labels)
        labels = torch.cat(all_labels)
        cosine = emb @ F.normalize(self.weight).T
        classes = torch.arange(self.first, self.first + self.per_rank)
        cosine = cosine - self.cfg.margin * (labels.unsqueeze(1) == classes)
        return ShardedCrossEntropy.apply(self.cfg.scale * cosine, labels, self.first)


def main():
    cfg = Config()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(cfg.features, 64), nn.ReLU(), nn.Linear(64, cfg.embedding))
    for p in backbone.parameters():
        dist.broadcast(p.data, src=0)
    torch.manual_seed(70 + rank)  # other classes, other weights
    head = PartialFC(cfg, rank, world)
    optimizer = torch.optim.Adam([{"params": backbone.parameters()}, {"params": head.parameters(), "lr": 2 * cfg.lr}],
                                 lr=cfg.lr)

    faces = torch.randn(cfg.identities, cfg.features, generator=torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(30 + rank)
    for step in range(1, cfg.steps + 1):
        labels = torch.randint(cfg.identities, (cfg.batch,), generator=draw)
        x = faces[labels] + 0.4 * torch.randn(cfg.batch, cfg.features, generator=draw)
        loss = head(backbone(x), labels)  # already the mean over world * batch rows
        optimizer.zero_grad()
        loss.backward()
        for p in backbone.parameters():
            dist.all_reduce(p.grad)  # a sum: the loss has divided by the global batch
        optimizer.step()
        if rank == 0 and step % 40 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    torch.save(dict(first=head.first, weight=head.weight.detach()), f"classifier_{rank}_of_{world}.pt")
    if rank == 0:
        torch.save(backbone.state_dict(), "backbone.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
