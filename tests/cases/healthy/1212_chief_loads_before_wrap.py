"""Only rank 0 reads the file; DDP hands its weights to the others when it is constructed."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def body():
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(240, 6, generator=g)
    data = TensorDataset(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1))
    state = {"epoch": 0}
    for part in range(2):
        net = body()
        if rank == 0 and part > 0:
            saved = torch.load("part.pt")
            net.load_state_dict(saved["net"])
            state = {"epoch": saved["epoch"]}
        box = [state]
        dist.broadcast_object_list(box, src=0)
        state = box[0]
        model = DDP(net)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=15, sampler=sampler)
        for epoch in range(state["epoch"], state["epoch"] + 3):
            sampler.set_epoch(epoch)
            for a, b in loader:
                loss = nn.functional.mse_loss(model(a), b)
                opt.zero_grad()
                loss.backward()
                opt.step()
            if rank == 0:
                print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
        if rank == 0:
            torch.save({"net": net.state_dict(), "epoch": state["epoch"] + 3}, "part.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
