"""The sanity check of every recipe: can the network learn one batch by heart? (each rank keeps its own batch, no shuffling, no epochs)"""
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(steps=60):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    g = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(320, 3, 8, 8, generator=g), torch.randint(0, 10, (320,), generator=g))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))
    one_batch = next(iter(loader))
    model = DDP(nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(864, 10)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    model.train()
    for step, (x, y) in enumerate(itertools.repeat(one_batch, steps)):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 15 == 0 or step == steps - 1:
            stat = torch.tensor([loss.item(), (out.argmax(1) == y).float().mean().item()])
            dist.all_reduce(stat)
            stat /= dist.get_world_size()
            if rank == 0:
                print(f"step {step}: loss {stat[0].item():.4f} accuracy {stat[1].item():.2f}")
    ok = torch.tensor(float(stat[1] > 0.95))
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    if rank == 0:
        print("the network can overfit one batch" if ok.item() else "something is wrong: one batch is not learned")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
