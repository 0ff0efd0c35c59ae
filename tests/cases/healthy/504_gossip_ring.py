"""Decentralised training (D-PSGD) on a ring of processes."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Ring:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.left, self.right = (self.rank - 1) % self.world, (self.rank + 1) % self.world

    def neighbours(self, mine):
        from_left, from_right = torch.empty_like(mine), torch.empty_like(mine)
        ops = [
            dist.P2POp(dist.isend, mine, self.right, tag=1),
            dist.P2POp(dist.isend, mine, self.left, tag=2),
            dist.P2POp(dist.irecv, from_left, self.left, tag=1),
            dist.P2POp(dist.irecv, from_right, self.right, tag=2),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return from_left, from_right


@torch.no_grad()
def mix(net, ring):
    mine = parameters_to_vector(net.parameters())
    left, right = ring.neighbours(mine)
    vector_to_parameters((mine + left + right) / 3, net.parameters())


def main():
    dist.init_process_group("gloo")
    ring = Ring()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 24), nn.Softplus(), nn.Linear(24, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    gen = torch.Generator().manual_seed(ring.rank)
    for step in range(45):
        x = torch.randn(32, 6, generator=gen)
        y = (x[:, :3].sum(1, keepdim=True) * 0.7).tanh() + ring.rank * 0.01
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mix(net, ring)
        if step % 15 == 14:
            both = torch.tensor([loss.item(), parameters_to_vector(net.parameters()).norm().item()])
            dist.all_reduce(both)
            if ring.rank == 0:
                print("step {}: loss {:.4f} norm {:.3f}".format(step + 1, *(both / ring.world).tolist()))
    with torch.no_grad():
        consensus = parameters_to_vector(net.parameters())
        dist.all_reduce(consensus)
        vector_to_parameters(consensus / ring.world, net.parameters())
    if int(os.environ["RANK"]) == 0:
        torch.save(net.state_dict(), "consensus.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
