"""Mean-teacher training: EMA teacher, frozen BatchNorm stem, loss scaler with clipping after unscale_."""
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, 8, 5, bias=False), nn.BatchNorm1d(8), nn.ReLU())
        self.rest = nn.Sequential(nn.Conv1d(8, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(64, 4))
        self.stem.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.stem.eval()
        return self

    def forward(self, x):
        return self.rest(self.stem(x))


class Chirps(Dataset):
    def __init__(self, n):
        self.n = n
        self.t = torch.linspace(0, 1, 48)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        y = i % 4
        x = torch.sin(6.28 * (2 + 2 * y) * self.t + 6.28 * torch.rand(1, generator=g))
        return x[None] + 0.3 * torch.randn(1, 48, generator=g), y


@torch.no_grad()
def follow(teacher, net, decay):
    for t, s in zip(teacher.parameters(), net.parameters()):
        t.lerp_(s, 1 - decay)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net().train()
    teacher = copy.deepcopy(net).requires_grad_(False).eval()
    model = DDP(net)
    opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.2, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = Chirps(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    noise = torch.Generator().manual_seed(300 + rank)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x + 0.2 * torch.randn(x.shape, generator=noise))
                with torch.no_grad():
                    soft = teacher(x)
            loss = F.cross_entropy(out.float(), y) + 0.1 * F.mse_loss(out.float().softmax(1), soft.float().softmax(1))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            follow(teacher, net, 0.95)
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
