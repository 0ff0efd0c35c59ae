"""Active learning: pool grows each round, the model is made anew each round, samplers and loaders are made anew as well."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ROUNDS, START, GROW, EPOCHS = 3, 64, 48, 4


def pool():
    g = torch.Generator().manual_seed(17)
    x = torch.randn(480, 2, generator=g)
    y = ((x[:, 0] * x[:, 1]) > 0).long()
    return TensorDataset(x, y)


def new_model():
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


@torch.no_grad()
def margin_scores(model, ds, idx, rank, world):
    """every rank scores a stripe of the unlabelled pool; scores are gathered in the common order"""
    model.eval()
    mine = idx[rank::world]
    p = model(ds.tensors[0][mine]).softmax(1).topk(2).values
    score = p[:, 0] - p[:, 1]
    out = torch.full((len(idx),), 0.0)
    out[rank::world] = score
    dist.all_reduce(out)
    return out


def train_round(ds, labelled, rnd):
    torch.manual_seed(1000 + rnd)
    net = DDP(new_model())
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    sub = Subset(ds, labelled.tolist())
    smp = DistributedSampler(sub, seed=rnd)
    dl = DataLoader(sub, batch_size=8, sampler=smp)
    for ep in range(EPOCHS):
        smp.set_epoch(ep)
        net.train()
        for x, y in dl:
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad(); loss.backward(); opt.step()
    return net.module, loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ds = pool()
    order = torch.randperm(len(ds), generator=torch.Generator().manual_seed(3))
    labelled, rest = order[:START], order[START:]
    for rnd in range(ROUNDS):
        net, last = train_round(ds, labelled, rnd)
        dist.all_reduce(last)
        if rank == 0:
            print(f"round {rnd}: {len(labelled)} labels, last loss {last.item() / world:.3f}")
        pick = margin_scores(net, ds, rest, rank, world).argsort()[:GROW]
        mask = torch.zeros(len(rest), dtype=torch.bool)
        mask[pick] = True
        labelled, rest = torch.cat([labelled, rest[mask]]), rest[~mask]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
