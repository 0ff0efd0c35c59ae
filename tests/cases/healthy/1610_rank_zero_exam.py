"""Rank 0 alone examines the bare model, decides about the learning rate and tells the others."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    return TensorDataset(x, torch.tanh(x[:, ::3]).sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=g))


@torch.no_grad()
def examine(net, data):
    net.eval()
    x, y = (t.to(DEVICE) for t in data.tensors)
    error = nn.functional.mse_loss(net(x), y).item()
    net.train()
    return error


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(DEVICE)
    model = DDP(net)
    torch.manual_seed(100 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    data, exam = make(384, 1), make(128, 2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    best = float("inf")
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(DEVICE)), y.to(DEVICE))
            opt.zero_grad()
            loss.backward()
            opt.step()
        verdict = [None]
        if rank == 0:
            verdict[0] = examine(net, exam)
            if verdict[0] < best:
                torch.save(net.state_dict(), "best.pt")
        dist.broadcast_object_list(verdict, src=0)
        best = min(best, verdict[0])
        plateau.step(verdict[0])
        with open(f"log_rank{rank}.txt", "a") as f:
            f.write(f"{epoch} {verdict[0]:.5f} {opt.param_groups[0]['lr']:.5f}\n")
        if rank == 0:
            print(f"epoch {epoch}: exam mse {verdict[0]:.4f}, next lr {opt.param_groups[0]['lr']:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
