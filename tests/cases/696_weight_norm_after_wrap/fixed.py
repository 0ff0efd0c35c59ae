"""Speech-like upsampler; a helper adds weight norm to all convolutions."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Upsampler(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.pre = nn.Conv1d(4, ch, 5, padding=2)
        self.up = nn.Upsample(scale_factor=4)
        self.mid = nn.Conv1d(ch, ch, 5, padding=2)
        self.post = nn.Conv1d(ch, 1, 5, padding=2)

    def forward(self, x):
        x = nn.functional.leaky_relu(self.pre(x), 0.1)
        x = nn.functional.leaky_relu(self.mid(self.up(x)), 0.1)
        return self.post(x)


def add_weight_norm(module):
    for m in list(module.modules()):
        if isinstance(m, nn.Conv1d):
            weight_norm(m)
    return module


class Recipe:
    """Steps are run in order; each one gets and returns the model."""

    def __init__(self, *steps):
        self.steps = steps

    def __call__(self, model):
        for step in self.steps:
            model = step(model)
        return model


def tones(n):
    g = torch.Generator().manual_seed(26)
    f = 0.05 + 0.3 * torch.rand(n, 1, 1, generator=g)
    t = torch.arange(64.0)
    wave = torch.sin(f * t)
    cond = torch.cat([torch.sin(f * (t[::4] + k)) for k in (0, 1)] + [f.expand(-1, 1, 16), torch.cos(f * t[::4])], 1)
    return TensorDataset(cond, wave)


def main(epochs=4):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = Recipe(add_weight_norm, DDP)(Upsampler())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = tones(320)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for cond, wave in loader:
            loss = nn.functional.l1_loss(model(cond), wave)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: L1 {(total[0] / total[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
