"""Three heads, three losses, learned task weights (inside the wrapped module), and a learning rate per depth."""
import os
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CFG = dict(train=dict(epochs=3, batch=24, base_lr=4e-3, decay=0.7), model=dict(width=40, depth=3), data=dict(n=480, n_val=96))


class Scenes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 12, generator=g)
        self.depth = self.x[:, :4].square().sum(1, keepdim=True).sqrt()
        self.cls = self.x[:, 4:8].argmax(1)
        self.flag = (self.x[:, 8] * self.x[:, 9] > 0).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return dict(x=self.x[i], depth=self.depth[i], cls=self.cls[i], flag=self.flag[i])


class MultiTask(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        dims = [12] + [width] * depth
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.SiLU()) for a, b in zip(dims, dims[1:]))
        self.heads = nn.ModuleDict(dict(depth=nn.Linear(width, 1), cls=nn.Linear(width, 4), flag=nn.Linear(width, 1)))
        self.log_var = nn.ParameterDict({k: nn.Parameter(torch.zeros(())) for k in self.heads})

    def forward(self, batch):
        h = batch["x"]
        for layer in self.trunk:
            h = layer(h)
        losses = dict(
            depth=nn.functional.smooth_l1_loss(self.heads["depth"](h), batch["depth"]),
            cls=nn.functional.cross_entropy(self.heads["cls"](h), batch["cls"]),
            flag=nn.functional.binary_cross_entropy_with_logits(self.heads["flag"](h).squeeze(1), batch["flag"]),
        )
        total = sum(torch.exp(-self.log_var[k]) * v + 0.5 * self.log_var[k] for k, v in losses.items())
        return total, {k: v.detach() for k, v in losses.items()}


def param_groups(model, base_lr, decay):
    groups = []
    for i, layer in enumerate(model.trunk):
        groups.append(dict(params=list(layer.parameters()), lr=base_lr * decay ** (len(model.trunk) - i), name=f"trunk.{i}"))
    groups.append(dict(params=list(model.heads.parameters()), lr=base_lr, name="heads"))
    groups.append(dict(params=list(model.log_var.parameters()), lr=base_lr * 0.1, weight_decay=0.0, name="log_var"))
    return groups


def average_over_ranks(d):
    keys = sorted(d)
    t = torch.stack([torch.stack(d[k]).mean() for k in keys])
    dist.all_reduce(t)
    return dict(zip(keys, (t / dist.get_world_size()).tolist()))


def main(cfg):
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = MultiTask(**cfg["model"])
    opt = torch.optim.AdamW(param_groups(net, cfg["train"]["base_lr"], cfg["train"]["decay"]), weight_decay=1e-2)
    model = nn.parallel.DistributedDataParallel(net)
    train, val = Scenes(cfg["data"]["n"], 1), Scenes(cfg["data"]["n_val"], 2)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, cfg["train"]["batch"], sampler=sampler, drop_last=True)
    vloader = DataLoader(val, 24, sampler=DistributedSampler(val, shuffle=False))
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, [g["lr"] for g in opt.param_groups], total_steps=cfg["train"]["epochs"] * len(loader))
    for epoch in range(cfg["train"]["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            opt.zero_grad()
            total, _ = model(batch)
            total.backward()
            opt.step()
            sched.step()
        model.eval()
        record = defaultdict(list)
        with torch.no_grad():
            for batch in vloader:
                for k, v in model(batch)[1].items():
                    record[k].append(v)
        means = average_over_ranks(record)
        if rank == 0:
            print(epoch, " ".join(f"{k}={v:.4f}" for k, v in means.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(CFG)
