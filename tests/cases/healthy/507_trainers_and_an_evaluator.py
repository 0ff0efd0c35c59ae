"""Two trainers and one evaluator process."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TRAINERS = [0, 1]
EVALUATOR = 2
STEPS, EVERY = 48, 12


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 32), nn.SiLU(), nn.Linear(32, 2))


def sample(gen, n):
    x = torch.randn(n, 5, generator=gen)
    return x, torch.stack([x[:, 0] * x[:, 1], x[:, 2:].sum(1).sin()], 1)


def publish(net):
    for t in net.state_dict().values():
        dist.broadcast(t, src=TRAINERS[0])


def train(rank, group):
    net = build()
    model = DDP(net, process_group=group)
    opt = torch.optim.Adam(model.parameters(), lr=6e-3)
    gen = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        x, y = sample(gen, 48)
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % EVERY == 0:
            publish(net)


def evaluate():
    net = build().eval()
    x, y = sample(torch.Generator().manual_seed(777), 1000)
    for round_ in range(STEPS // EVERY):
        publish(net)
        with torch.no_grad():
            print(f"evaluation {round_}: {nn.functional.mse_loss(net(x), y).item():.4f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    group = dist.new_group(TRAINERS)
    if rank in TRAINERS:
        train(rank, group)
    else:
        evaluate()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
