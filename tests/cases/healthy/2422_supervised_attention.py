"""Attention supervised by nll_loss of its logarithm, soft and smoothed targets, a straight-through gumbel code, a gate of a sigmoid."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CLASSES, LENGTH = 6, 8


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(10, 16)
        self.query = nn.Parameter(torch.randn(16) * 0.1)
        self.code = nn.Linear(10, 12)
        self.book = nn.Linear(12, 16, bias=False)
        self.gate = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(16, CLASSES) for _ in range(2))
        self.route = nn.Linear(16, 2)
        self.found = nn.Linear(16, 1)

    def forward(self, x):
        attention = (self.key(x) @ self.query).softmax(1)
        read = (attention.unsqueeze(2) * x).sum(1)
        code = F.gumbel_softmax(self.code(read), tau=1.0, hard=True)
        hidden = self.book(code) * torch.sigmoid(self.gate(self.key(read))) + self.key(read)
        mixed = torch.einsum("be,ebc->bc", self.route(hidden).softmax(1), torch.stack([e(hidden).softmax(1) for e in self.experts]))
        return attention, self.head(hidden), mixed, self.found(hidden).squeeze(1)


def draw(n, generator):
    where = torch.randint(0, LENGTH, (n,), generator=generator)
    x = torch.randn(n, LENGTH, 10, generator=generator) * 0.3
    label = torch.randint(0, CLASSES, (n,), generator=generator)
    x[torch.arange(n), where, label] += 2.0
    x[torch.arange(n), where, 9] += 2.0
    return x, where, label


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = DDP(Pointer())
    torch.manual_seed(50 + rank)
    generator = torch.Generator().manual_seed(200 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(100):
        x, where, label = draw(32, generator)
        attention, scores, mixed, found = model(x)
        soft = F.one_hot(label, CLASSES) * 0.9 + 0.1 / CLASSES
        loss = F.nll_loss(attention.clamp_min(1e-8).log(), where)
        loss = loss + F.cross_entropy(scores, soft) + F.cross_entropy(scores, label, label_smoothing=0.1)
        loss = loss + F.nll_loss(torch.log(mixed + 1e-8), label) + F.cross_entropy(mixed.clamp_min(1e-8).log(), label)
        loss = loss + F.binary_cross_entropy_with_logits(found, torch.sigmoid((where > 3).float() * 4 - 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
