"""ZeroRedundancyOptimizer: Adam's moments are sharded, consolidated on rank 0 before saving."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def print_state_size(prefix, optimizer):
    n = sum(v.numel() for s in optimizer.optim.state_dict()["state"].values() for v in s.values() if torch.is_tensor(v))
    print(f"{prefix}: {n} numbers of optimizer state on this rank", flush=True)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(6)], nn.Linear(32, 1))
    ddp_model = DDP(model)
    loss_fn = nn.MSELoss()
    optimizer = ZeroRedundancyOptimizer(ddp_model.parameters(), optimizer_class=torch.optim.Adam, lr=3e-3)

    g = torch.Generator().manual_seed(1)
    x = torch.randn(512, 32, generator=g)
    dataset = TensorDataset(x, (x[:, :8].sum(1, keepdim=True)).tanh())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 32, sampler=sampler)

    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for xb, yb in loader:
            ddp_model.zero_grad()
            loss = loss_fn(ddp_model(xb), yb)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / (len(loader) * dist.get_world_size()):.5f}")

    print_state_size(f"[{rank}]", optimizer)
    optimizer.consolidate_state_dict(to=0)  # all ranks take part
    if rank == 0:
        with tempfile.TemporaryDirectory() as d:
            path = os.path.join(d, "full.pt")
            torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, path)
            print("entries in the full state:", len(torch.load(path)["optim"]["state"]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
