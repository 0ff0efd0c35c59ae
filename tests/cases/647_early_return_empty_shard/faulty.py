"""Speech-activity detection; validation recordings are dealt to the ranks by file."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler


def recording(seed, frames=48):
    g = torch.Generator().manual_seed(seed)
    active = (torch.rand(frames // 8, generator=g) > 0.5).repeat_interleave(8)
    energy = torch.randn(frames, 5, generator=g) * (0.5 + active[:, None])
    return energy, active.float()


def frames_of(seeds):
    parts = [recording(s) for s in seeds]
    return TensorDataset(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


class Vad(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(torch.cat([x, x.abs()], 1)).squeeze(1)


@torch.no_grad()
def validate(model, files):
    """files: the recordings of this rank."""
    if not files:
        return None
    model.eval()
    c = torch.zeros(2)
    for seed in files:
        x, y = recording(seed)
        c += torch.tensor([((model(x) > 0) == y.bool()).sum().item(), len(y)])
    dist.all_reduce(c)
    model.train()
    return (c[0] / c[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--train-files", type=int, default=18)
    ap.add_argument("--val-files", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=24)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = frames_of(range(args.train_files))
    mine = list(range(1000, 1000 + args.val_files))[rank::world]
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(Vad())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = validate(model.module, mine)
        if rank == 0:
            print(f"epoch {epoch}: validation accuracy {acc:.3f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
