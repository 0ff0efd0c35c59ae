"""4 ranks as 2 "nodes" of 2: gradients are reduced in the node, then among the node leaders, then broadcast in the node."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

NODE = 2


class Topology:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        nodes = [list(range(s, s + NODE)) for s in range(0, self.world, NODE)]
        self.groups = [dist.new_group(n) for n in nodes]
        self.leaders = dist.new_group([n[0] for n in nodes])
        self.mine = self.groups[self.rank // NODE]
        self.leader = (self.rank // NODE) * NODE

    def average(self, flat):
        dist.reduce(flat, dst=self.leader, group=self.mine)
        if self.rank == self.leader:
            dist.all_reduce(flat, group=self.leaders)
            flat /= self.world
        dist.broadcast(flat, src=self.leader, group=self.mine)
        return flat


def main():
    dist.init_process_group("gloo")
    topo = Topology()
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(topo.rank)
    w = torch.randn(10, generator=torch.Generator().manual_seed(99))
    for step in range(50):
        x = torch.randn(32, 10, generator=g)
        y = (x @ w > 0).long()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        flat = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        topo.average(flat)
        o = 0
        for p in model.parameters():
            p.grad.copy_(flat[o:o + p.numel()].view_as(p))
            o += p.numel()
        opt.step()
        if step % 10 == 9:
            l = loss.detach().clone()
            topo.average(l.view(1))
            if topo.rank == 0:
                print(f"step {step + 1} loss {l.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
