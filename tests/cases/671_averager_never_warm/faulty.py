"""Post-local SGD: all-reduce at first, then local steps with periodic averaging of the weights."""
import argparse
import dataclasses

import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclasses.dataclass
class LocalSGDConfig:
    start_iter: int = 12
    period: int = 4
    warmup_steps: int = 100


class Strategy:
    """Hides the hook, the subgroup and the averager from the training loop."""

    def __init__(self, config):
        self.config = config
        self.subgroup, _ = dist.new_subgroups(group_size=1)

    def wrap(self, model):
        model = DDP(model)
        state = PostLocalSGDState(process_group=None, subgroup=self.subgroup, start_localSGD_iter=self.config.start_iter)
        model.register_comm_hook(state, post_localSGD_hook)
        self.averager = averagers.PeriodicModelAverager(period=self.config.period, warmup_steps=self.config.warmup_steps)
        return model

    def after_step(self, model):
        self.averager.average_parameters(model.parameters())


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(1, 12, 5), nn.ReLU(), nn.Conv1d(12, 12, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x):
        return self.net(x)


def signals(n):
    g = torch.Generator().manual_seed(61)
    y = torch.randint(0, 3, (n,), generator=g)
    t = torch.arange(32.0)
    f = torch.tensor([0.2, 0.45, 0.8])[y, None]
    x = torch.sin(f * t + 6.28 * torch.rand(n, 1, generator=g)) + 0.5 * torch.randn(n, 32, generator=g)
    return TensorDataset(x.unsqueeze(1), y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--period", type=int, default=4)
    p.add_argument("--start", type=int, default=12)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(25)
    strategy = Strategy(LocalSGDConfig(start_iter=args.start, period=args.period))
    model = strategy.wrap(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = signals(400)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            strategy.after_step(model)
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
