"""Documents are filtered per shard, so the ranks have different numbers of batches; join() takes care of it."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


def documents(rank, world, n=420):
    g = torch.Generator().manual_seed(61)
    out = []
    for i in range(n):
        size = int(torch.randint(2, 16, (), generator=g))
        words = torch.randint(0, 80, (size,), generator=g)
        if i % world == rank and size >= 5 + 3 * (i % world):
            out.append((words, float((words % 2).float().mean() > 0.5)))
    return out


def collate(rows):
    starts = torch.tensor([0] + [len(w) for w, _ in rows[:-1]]).cumsum(0)
    return torch.cat([w for w, _ in rows]), starts, torch.tensor([y for _, y in rows])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(80, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, words, starts):
        return self.out(self.bag(words, starts)).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Bag())
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    docs = documents(rank, world)
    for epoch in range(5):
        shuffled = torch.Generator().manual_seed(100 * rank + epoch)
        loader = DataLoader(docs, batch_size=6, shuffle=True, generator=shuffled, collate_fn=collate)
        loss_sum = torch.zeros(2)
        with model.join(divide_by_initial_world_size=False):
            for words, starts, y in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(words, starts), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                loss_sum += torch.tensor([loss.item() * len(y), float(len(y))])
        dist.all_reduce(loss_sum)
        if rank == 0:
            print(f"epoch {epoch}: loss {(loss_sum[0] / loss_sum[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
