"""A stream of resampled shards (WebDataset style: every rank draws shards from the whole list, with replacement), and a sliced regulariser whose
random directions are the same on all ranks on purpose: they belong to one statistic of the global batch (as in LeJEPA)."""
import random
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

torch.set_num_threads(1)
SHARDS, PER_SHARD, BATCH = 240, 16, 16


class ResampledShards(IterableDataset):
    def __init__(self, rank, length):
        self.rank, self.length, self.epoch = rank, length, 0

    def __iter__(self):
        rng = random.Random(f"{self.rank}-{self.epoch}-shards")
        done = 0
        while done < self.length:
            shard = rng.randrange(SHARDS)                 # with replacement
            rows = torch.randn(PER_SHARD, 16, generator=torch.Generator().manual_seed(9000 + shard))
            for i in rng.sample(range(PER_SHARD), PER_SHARD):
                if done == self.length:
                    return
                done += 1
                yield rows[i]


def sliced_gaussianity(z, step):
    g = torch.Generator().manual_seed(step)               # one set of directions for the whole global batch
    directions = torch.randn(z.size(1), BATCH, generator=g)
    directions = directions / directions.norm(dim=0)
    t = torch.linspace(0.2, 3, 8)
    proj = (z @ directions).unsqueeze(-1) * t
    ecf = torch.stack([proj.cos().mean(0), proj.sin().mean(0)])
    ecf = dnn.all_reduce(ecf) / dist.get_world_size()     # of all ranks, with gradient
    return ((ecf[0] - torch.exp(-t**2 / 2)) ** 2 + ecf[1] ** 2).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    encoder = DDP(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)))
    opt = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
    data = ResampledShards(rank, 320)
    loader = DataLoader(data, batch_size=BATCH)
    noise = torch.Generator().manual_seed(500 + rank)
    step = 0
    for epoch in range(1):
        data.epoch = epoch
        for x in loader:
            views = torch.cat([x + 0.1 * torch.randn(x.shape, generator=noise) for _ in range(2)])
            z = encoder(views)
            a, b = z.chunk(2)
            loss = nn.functional.mse_loss(a, b) + sliced_gaussianity(z, step)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        if rank == 0:
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
