"""Each step's own outputs are gathered as arrays for a diversity weight; the curriculum makes them longer up to its bound at the end."""
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, SHORTEST, LONGEST = 140, 8, 160


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(nn.functional.pad(x, (2, 2)).unfold(2, 5, 1)).squeeze(3)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DDP(Denoiser())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(7 + rank)
    for step in range(STEPS):
        length = SHORTEST + (LONGEST - SHORTEST) * step // (STEPS - 1)
        phase = torch.rand(128, 1, 1, generator=generator) * 6.28
        clean = torch.sin(torch.linspace(0, length / 8, length) + phase)
        noisy = clean + 0.3 * torch.randn(clean.shape, generator=generator)
        out = model(noisy)
        gathered = [None] * world
        dist.all_gather_object(gathered, out.detach().numpy())
        spread = float(np.concatenate(gathered).std())
        loss = (out - clean).pow(2).mean() / max(0.1, spread)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} length {length} loss {shown.item() / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
