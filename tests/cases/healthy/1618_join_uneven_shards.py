"""Uneven shards (sites of different size) on three ranks, trained with the Join context manager.

Plain SGD has no state, so ranks that run dry early and only shadow the collectives lose nothing:
at the end of the context the last joiner's parameters are broadcast.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def site(rank):
    """The records of one hospital: 360, 520 or 680 of them."""
    n = 360 + 160 * rank
    g = torch.Generator().manual_seed(900 + rank)
    x = torch.randn(n, 6, generator=g)
    logit = 2 * x[:, 0] * x[:, 1] + 1.5 * x[:, 2] - x[:, 3].abs() + 0.5
    y = (torch.rand(n, generator=g) < torch.sigmoid(2 * logit)).float()
    cut = int(0.8 * n)
    return TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])


def global_auc_like(scores, labels):
    order = scores.argsort()
    ranks = torch.empty_like(scores)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=scores.dtype)
    pos = labels.sum()
    neg = len(labels) - pos
    return ((ranks[labels > 0.5].sum() - pos * (pos + 1) / 2) / (pos * neg)).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = site(rank)
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    ddp = DDP(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.25)
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True,
                        generator=torch.Generator().manual_seed(rank))

    for epoch in range(12):
        ddp.train()
        n, s = 0, 0.0
        with Join([ddp]):
            for x, y in loader:
                opt.zero_grad()
                loss = F.binary_cross_entropy_with_logits(ddp(x).squeeze(1), y)
                loss.backward()
                opt.step()
                n += len(y)
                s += loss.item() * len(y)
        stat = torch.tensor([s, float(n)])
        dist.all_reduce(stat)
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch}: {int(stat[1])} samples, loss {stat[0] / stat[1]:.4f}", flush=True)

    net.eval()
    with torch.no_grad():
        xs, ys = test.tensors
        part = (net(xs).squeeze(1), ys)
    parts = [None] * world
    dist.all_gather_object(parts, part)
    auc = global_auc_like(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
    if rank == 0:
        print(f"AUC over all sites {auc:.3f}")
        torch.save(net.state_dict(), "join_model.pt")
    assert auc > 0.75
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
