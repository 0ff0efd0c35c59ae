"""Hard-example exchange: each rank queues samples with a high loss; every few steps the queues are gathered and dealt out in rounds, one of each
rank. What does not fill a round stays in the queue for the next exchange."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


def exchange(queue):
    """Full rounds (one item of every rank), and what is left of the own queue."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, queue)
    rounds = list(zip(*parts))
    return rounds, queue[len(rounds):]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    w = torch.randn(10, 3)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    g = torch.Generator().manual_seed(77 + rank)
    queue, extra = [], []
    for step in range(100):
        x = torch.randn(48, 10, generator=g)
        y = (x @ w).argmax(1)
        if extra:
            hard = extra.pop()
            x = torch.cat([x, torch.stack([h[0] for h in hard])])
            y = torch.cat([y, torch.tensor([h[1] for h in hard])])
        each = loss_fn(model(x), y)
        opt.zero_grad()
        each.mean().backward()
        opt.step()
        limit = each.detach().mean() + 1.5 * each.detach().std()
        queue += [(x[i].clone(), int(y[i])) for i in (each.detach() > limit).nonzero().flatten().tolist()]
        if step % 5 == 4:
            rounds, queue = exchange(queue)
            extra = [rounds[i : i + 4] for i in range(0, len(rounds) - 3, 4)]
            extra = [[one[(rank + 1) % world] for one in four] for four in extra]
        if rank == 0 and step % 20 == 19:
            print(f"step {step} loss {each.mean().item():.4f} queue {len(queue)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
