"""Population based training on three ranks: same data, same start, another learning rate on each rank.

Every phase is followed by a comparison on the validation set; the loser takes weights and optimizer
state from the winner and continues with a perturbed rate. The test set is used once, by the winner.
"""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


def make():
    g = torch.Generator().manual_seed(61)
    x = torch.randn(1800, 9, generator=g)
    w1 = torch.randn(9, 24, generator=g)
    w2 = torch.randn(24, 3, generator=g)
    y = (torch.relu(x @ w1) @ w2)
    y = ((y - y.mean(0)) / y.std(0) + 0.1 * torch.randn(1800, 3, generator=g)).argmax(1)
    return TensorDataset(x, y)


def loss_on(net, subset):
    net.eval()
    with torch.no_grad():
        x, y = subset[:]
        out = net(x)
        return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    full = make()
    train, valid, test = random_split(full, [1200, 300, 300], generator=torch.Generator().manual_seed(0))
    train, valid, test = (TensorDataset(*s.dataset[s.indices]) for s in (train, valid, test))

    torch.manual_seed(9)  # fair comparison: one initialisation for everybody
    net = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    lr = [3e-4, 3e-3, 3e-2][rank % 3]
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    loader = DataLoader(train, batch_size=40, shuffle=True, generator=torch.Generator().manual_seed(3))
    perturb = torch.Generator().manual_seed(40 + rank)

    for phase in range(5):
        net.train()
        for _ in range(2):
            for x, y in loader:
                opt.zero_grad()
                F.cross_entropy(net(x), y).backward()
                opt.step()
        score = torch.tensor([loss_on(net, valid)[0]])
        scores = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(scores, score)
        scores = torch.cat(scores)
        best, worst = int(scores.argmin()), int(scores.argmax())
        if rank == 0:
            print(f"phase {phase} valid {[round(s, 3) for s in scores.tolist()]}", flush=True)
        if best != worst:
            parcel = [None]
            if rank == best:
                parcel = [(copy.deepcopy(net.state_dict()), copy.deepcopy(opt.state_dict()))]
            dist.broadcast_object_list(parcel, src=best)
            if rank == worst:
                net.load_state_dict(parcel[0][0])
                opt.load_state_dict(parcel[0][1])
                factor = 0.6 if torch.rand(1, generator=perturb).item() < 0.5 else 1.4
                for group in opt.param_groups:
                    group["lr"] *= factor

    if rank == best:
        _, acc = loss_on(net, test)
        print(f"winner rank {rank} lr {opt.param_groups[0]['lr']:.2e} test acc {acc:.3f}", flush=True)
        torch.save(net.state_dict(), "pbt_best.pt")
        assert acc > 0.7
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
