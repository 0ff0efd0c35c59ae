"""An asynchronous parameter server with plain send/recv: rank 0 serves, ranks 1 and 2 compute.

The server owns the only optimizer and never runs the network on training data. A worker sends its
flat gradient (first number: 1 = gradient, 0 = I am done) and gets fresh parameters back.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, Subset, TensorDataset


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    r = torch.rand(n, generator=g)
    a = 3.2 * r + y * 2.0944 + 0.12 * torch.randn(n, generator=g)
    return torch.stack([r * torch.cos(a), r * torch.sin(a)], dim=1) * 2, y


def build():
    torch.manual_seed(13)
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def serve(world):
    net = build()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    flat = parameters_to_vector(net.parameters()).detach()
    buf = torch.empty(flat.numel() + 1)
    active, steps = world - 1, 0
    while active:
        src = dist.recv(buf)  # whoever comes first
        if buf[0] == 0:
            active -= 1
            continue
        opt.zero_grad()
        at = 1
        for p in net.parameters():
            p.grad = buf[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        opt.step()
        steps += 1
        dist.send(parameters_to_vector(net.parameters()).detach(), dst=src)
    xt, yt = spirals(600, 99)
    net.eval()
    with torch.no_grad():
        acc = (net(xt).argmax(1) == yt).float().mean().item()
    torch.save(net.state_dict(), "server.pt")
    print(f"server: {steps} updates, test accuracy {acc:.3f}", flush=True)
    assert acc > 0.85


def work(rank, world):
    net = build()
    x, y = spirals(1800, 1)
    mine = Subset(TensorDataset(x, y), range(rank - 1, len(x), world - 1))
    loader = DataLoader(mine, batch_size=30, shuffle=True, generator=torch.Generator().manual_seed(rank))
    fresh = parameters_to_vector(net.parameters()).detach().clone()
    for epoch in range(10):
        last = None
        for a, b in loader:
            net.zero_grad()
            loss = F.cross_entropy(net(a), b)
            loss.backward()
            grad = torch.cat([p.grad.flatten() for p in net.parameters()])
            dist.send(torch.cat([torch.ones(1), grad]), dst=0)
            dist.recv(fresh, src=0)
            vector_to_parameters(fresh.clone(), net.parameters())
            last = loss.item()
        if epoch % 3 == 0:
            print(f"worker {rank} epoch {epoch} loss {last:.3f}", flush=True)
    dist.send(torch.zeros(fresh.numel() + 1), dst=0)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        serve(world)
    else:
        work(rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
