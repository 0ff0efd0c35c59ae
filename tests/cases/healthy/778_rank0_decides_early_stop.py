"""Rank 0 alone evaluates the (small) validation set on the bare module, decides, and broadcasts (stop, lr factor); others wait in the broadcast."""
import copy
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler, random_split


class Stopper:
    def __init__(self, patience=2):
        self.best, self.bad, self.patience, self.keep = float("inf"), 0, patience, None

    def judge(self, value, model):
        if value < self.best - 1e-3:
            self.best, self.bad, self.keep = value, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(3)
    x = torch.randn(300, 30, generator=g)
    y = (x[:, :3].sum(1) + torch.randn(300, generator=g) > 0).long()
    train, val = random_split(TensorDataset(x, y), [220, 80], generator=torch.Generator().manual_seed(0))
    smp = DistributedSampler(train)
    dl = DataLoader(train, 10, sampler=smp)
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(30, 128), nn.ReLU(), nn.Linear(128, 2)))
    opt = torch.optim.Adam(net.parameters(), 5e-3)
    stopper = Stopper()
    vx = torch.stack([val[i][0] for i in range(len(val))]); vy = torch.stack([val[i][1] for i in range(len(val))])
    for ep in range(20):
        smp.set_epoch(ep)
        net.train()
        for a, b in dl:
            opt.zero_grad()
            F.cross_entropy(net(a), b).backward()
            opt.step()
        verdict = torch.zeros(2)
        if rank == 0:
            net.module.eval()
            with torch.no_grad():
                vl = F.cross_entropy(net.module(vx), vy).item()
            stop = stopper.judge(vl, net.module)
            verdict = torch.tensor([float(stop), 0.5 if stopper.bad else 1.0])
            print(f"epoch {ep} val {vl:.4f} best {stopper.best:.4f} bad {stopper.bad}")
        dist.broadcast(verdict, 0)
        for grp in opt.param_groups:
            grp["lr"] *= verdict[1].item()
        if verdict[0] > 0:
            break
    # best weights exist on rank 0 only: load there, then hand them to the others
    if rank == 0:
        net.module.load_state_dict(stopper.keep)
    for t in net.module.state_dict().values():
        dist.broadcast(t, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
