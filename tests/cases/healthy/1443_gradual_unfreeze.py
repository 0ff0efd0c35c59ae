"""Fine-tuning: the head alone first, then block after block from the top."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([
            nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU(), nn.MaxPool2d(2))
            for c_in, c_out in ((1, 8), (8, 16))])
        self.head = nn.Linear(16 * 9, 4)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.head(x.flatten(1))

    def train(self, mode=True):
        super().train(mode)
        for b in self.blocks:
            if not next(b.parameters()).requires_grad:
                b.eval()
        return self


class FineTuner:
    stages = {0: [], 2: [1], 4: [0]}

    def __init__(self, net):
        self.net = net.requires_grad_(False)
        self.net.head.requires_grad_(True)
        self.opt = torch.optim.SGD(self.net.head.parameters(), lr=0.05, momentum=0.9)
        self.ddp = None

    def enter(self, epoch):
        if epoch not in self.stages:
            return
        for k in self.stages[epoch]:
            self.net.blocks[k].requires_grad_(True)
            self.opt.add_param_group({"params": list(self.net.blocks[k].parameters()), "lr": 0.01})
        self.ddp = DDP(self.net)

    def step(self, x, y):
        out = self.ddp(x)
        loss = nn.functional.cross_entropy(out, y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return (out.argmax(1) == y).sum()


def stripes(n=384):
    g = torch.Generator().manual_seed(15)
    y = torch.randint(0, 4, (n,), generator=g)
    grid = torch.arange(12).float()
    waves = torch.stack([grid.expand(12, 12), grid.expand(12, 12).T, grid.expand(12, 12) + grid.expand(12, 12).T,
                         grid.expand(12, 12) - grid.expand(12, 12).T])
    x = (waves[y] * 1.6 + 6.28 * torch.rand(n, 1, 1, generator=g)).sin() + 0.4 * torch.randn(n, 12, 12, generator=g)
    return TensorDataset(x[:, None], y)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(2)
    tuner = FineTuner(Backbone())
    data = stripes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(7):
        tuner.enter(epoch)
        sampler.set_epoch(epoch)
        tuner.ddp.train()
        right = torch.zeros(1)
        for x, y in loader:
            right += tuner.step(x, y)
        dist.all_reduce(right)
        if rank == 0:
            live = sum(p.numel() for p in tuner.net.parameters() if p.requires_grad)
            print(f"epoch {epoch}: train accuracy {right.item() / len(data):.3f} with {live} live weights")
    if rank == 0:
        torch.save(tuner.net.state_dict(), "tuned.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
