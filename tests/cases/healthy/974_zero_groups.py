"""ZeRO-1 with two parameter groups, a plain SGD beside it for the embeddings, and a checkpoint that rank 0 consolidates."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(50, 16), nn.Embedding(80, 16)
        self.mix = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, u, i):
        return self.mix(torch.cat([self.users(u), self.items(i)], 1)).squeeze(1)


def ratings(n=800):
    g = torch.Generator().manual_seed(17)
    taste, kind = torch.randn(50, 4, generator=g), torch.randn(80, 4, generator=g)
    u, i = torch.randint(0, 50, (n,), generator=g), torch.randint(0, 80, (n,), generator=g)
    return TensorDataset(u, i, (taste[u] * kind[i]).sum(1) / 2)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = TwoTower()
    model = DDP(net, gradient_as_bucket_view=True)
    dense = [p for n, p in net.mix.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in net.mix.named_parameters() if n.endswith("bias")]
    zero = ZeroRedundancyOptimizer(
        [{"params": dense, "lr": 5e-3, "weight_decay": 1e-2}, {"params": biases, "lr": 1e-2, "weight_decay": 0.0}], optimizer_class=torch.optim.AdamW, lr=5e-3
    )
    tables = torch.optim.SGD([net.users.weight, net.items.weight], lr=0.5)
    data = ratings()
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=25, sampler=sampler)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        se = torch.zeros(2)
        for u, i, r in loader:
            loss = F.mse_loss(model(u, i), r)
            zero.zero_grad()
            tables.zero_grad()
            loss.backward()
            zero.step()
            tables.step()
            se += torch.tensor([loss.item() * len(r), len(r)])
        dist.all_reduce(se)
        if rank == 0:
            print(f"epoch {epoch}: rmse {(se[0] / se[1]).sqrt().item():.4f}")
    held = sum(t.numel() for s in zero.optim.state.values() for t in s.values() if torch.is_tensor(t) and t.numel() > 1)
    print(f"rank {rank} keeps {held} numbers of AdamW state")
    zero.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"model": net.state_dict(), "zero": zero.state_dict(), "tables": tables.state_dict()}, os.path.join(folder[0], "ck.pt"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
