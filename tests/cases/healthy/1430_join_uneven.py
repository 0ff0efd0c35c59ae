"""Ranks hold different amounts of data; the join context takes care of the shorter one."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset


def stations(n=500):
    g = torch.Generator().manual_seed(31)
    x = torch.randn(n, 9, generator=g)
    y = x[:, :3].prod(1) + 0.1 * torch.randn(n, generator=g)
    owner = (torch.rand(n, generator=g) < 0.4).long()
    return TensorDataset(x, y), owner


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data, owner = stations()
    mine = Subset(data, (owner == rank).nonzero().flatten().tolist())
    loader = DataLoader(mine, batch_size=16, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(9, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.03)
    for epoch in range(5):
        tally = torch.zeros(2)
        with Join([model]):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x).squeeze(1), y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                tally += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(tally)
        if rank == 0:
            print(f"epoch {epoch}: mse {tally[0].item() / tally[1].item():.4f} ({int(tally[1])} samples)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
