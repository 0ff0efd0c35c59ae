"""Residual MLP; trainer base class with hooks."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.norm(torch.relu(self.lin(x)))


class ResMLP(nn.Module):
    def __init__(self, dim, width, depth, out):
        super().__init__()
        self.inp = nn.Linear(dim, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.out = nn.Linear(width, out)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


class BaseTrainer:
    lr = 0.01
    epochs = 4
    batch = 16

    def __init__(self, net, data):
        self.rank = dist.get_rank()
        self.data = data
        self.net = net
        self.optimizer = self.make_optimizer()
        self.on_init()
        self.model = DDP(self.net)

    def make_optimizer(self):
        decay = [p for p in self.net.parameters() if p.ndim > 1]
        rest = [p for p in self.net.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=self.lr)

    def on_init(self):
        """For subclasses."""

    def loss(self, batch):
        raise NotImplementedError

    def fit(self):
        sampler = DistributedSampler(self.data)
        loader = DataLoader(self.data, batch_size=self.batch, sampler=sampler)
        for epoch in range(self.epochs):
            sampler.set_epoch(epoch)
            mean = torch.zeros(())
            for batch in loader:
                self.model.zero_grad()
                loss = self.loss(batch)
                loss.backward()
                self.optimizer.step()
                mean += loss.detach() / len(loader)
            dist.all_reduce(mean)
            if self.rank == 0:
                print(f"{type(self).__name__} epoch {epoch}: {mean.item() / dist.get_world_size():.4f}")


class ZeroGammaTrainer(BaseTrainer):
    """Blocks start as the identity (Goyal et al. 2017, section 5.1)."""

    def on_init(self):
        for block in self.net.blocks:
            nn.init.zeros_(block.norm.weight)

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)


def physics(n=480):
    gen = torch.Generator().manual_seed(18)
    x = torch.rand(n, 6, generator=gen) * 2 - 1
    y = torch.stack([x[:, 0] * x[:, 1], (x[:, 2] * 3).sin() + x[:, 3] ** 2], 1)
    return TensorDataset(x, y)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(50)
    ZeroGammaTrainer(ResMLP(6, 32, 3, 2), physics()).fit()
    dist.destroy_process_group()
