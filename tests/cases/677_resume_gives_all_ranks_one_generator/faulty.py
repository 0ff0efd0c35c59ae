"""Contrastive pairs drawn with a generator per process; the run is cut into two jobs that hand over a checkpoint."""
import io
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class PairSampler:
    """Draws (anchor, positive) from the same class, for ever."""

    def __init__(self, x, y, batch, seed):
        self.x, self.y, self.batch = x, y, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.by_class = [(y == c).nonzero().flatten() for c in range(int(y.max()) + 1)]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])

    def __next__(self):
        c = torch.randint(0, len(self.by_class), (self.batch,), generator=self.generator)
        pick = lambda: torch.stack([self.by_class[k][torch.randint(0, len(self.by_class[k]), (), generator=self.generator)] for k in c.tolist()])
        a, b = pick(), pick()
        return self.x[a], self.x[b], c


class Job:
    def __init__(self, path):
        self.path, self.rank = path, dist.get_rank()
        torch.manual_seed(0)
        self.model = DDP(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 12)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.step = 0
        g = torch.Generator().manual_seed(70)
        y = torch.randint(0, 6, (400,), generator=g)
        x = torch.randn(6, 16, generator=g)[y] + 0.8 * torch.randn(400, 16, generator=g)
        self.sampler = PairSampler(x, y, 24, seed=900 + self.rank)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "sampler": self.sampler}
        if os.path.exists(path):
            self.resume()

    def resume(self):
        state = torch.load(self.path)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.step = state["step"]
        if self.rank == 0:
            print(f"resumed at step {self.step}")

    def save(self):
        if self.rank == 0:
            torch.save({**{n: p.state_dict() for n, p in self.parts.items()}, "step": self.step}, self.path)
        dist.barrier()

    def train(self, until):
        while self.step < until:
            a, b, c = next(self.sampler)
            za, zb = nn.functional.normalize(self.model(torch.cat([a, b])), dim=1).chunk(2)
            sim = za @ zb.T / 0.2
            same = c[:, None] == c[None]
            loss = (sim.logsumexp(1) - (sim.masked_fill(~same, float("-inf"))).logsumexp(1)).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step % 15 == 0:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                if self.rank == 0:
                    print(f"step {self.step}: loss {shown.item() / dist.get_world_size():.4f}")


def main():
    dist.init_process_group("gloo")
    path = os.path.join(tempfile.gettempdir(), f"pairs_{os.environ['MASTER_PORT']}.pt")
    first = Job(path)
    first.train(30)
    first.save()
    second = Job(path)
    second.train(90)
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
