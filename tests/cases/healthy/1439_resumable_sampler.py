"""Interrupted in the middle of an epoch, then goes on with the very next sample."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ResumableSampler(Sampler):
    def __init__(self, size, rank, world, seed=0):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.epoch, self.offset = 0, 0

    def __iter__(self):
        perm = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        per_rank = self.size // self.world
        return iter(perm[:per_rank * self.world][self.rank::self.world][self.offset:])

    def __len__(self):
        return self.size // self.world - self.offset


class Job:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(9)
        self.net = DDP(nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 3)))
        self.opt = torch.optim.Adagrad(self.net.parameters(), lr=0.05)
        g = torch.Generator().manual_seed(70)
        x = torch.randn(402, 5, generator=g)
        self.data = TensorDataset(x, (x @ torch.randn(5, 3, generator=g)).argmax(1))
        self.sampler = ResumableSampler(len(self.data), self.rank, self.world)
        self.step = 0

    def state(self):
        return {"net": self.net.module.state_dict(), "opt": self.opt.state_dict(), "epoch": self.sampler.epoch,
                "offset": self.sampler.offset, "step": self.step}

    def maybe_resume(self):
        if os.path.exists(self.args.ckpt):
            s = torch.load(self.args.ckpt, weights_only=False)
            self.net.module.load_state_dict(s["net"])
            self.opt.load_state_dict(s["opt"])
            self.sampler.epoch, self.sampler.offset, self.step = s["epoch"], s["offset"], s["step"]
        dist.barrier()

    def run(self, stop_at=None):
        while self.sampler.epoch < self.args.epochs:
            consumed = self.sampler.offset
            for x, y in DataLoader(self.data, batch_size=self.args.batch, sampler=self.sampler):
                loss = nn.functional.cross_entropy(self.net(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.step += 1
                consumed += len(x)
                if self.step == stop_at:
                    self.sampler.offset = consumed
                    if self.rank == 0:
                        torch.save(self.state(), self.args.ckpt)
                        print(f"preempted at step {self.step}, epoch {self.sampler.epoch}, sample {consumed}")
                    dist.barrier()
                    return
            self.sampler.epoch, self.sampler.offset = self.sampler.epoch + 1, 0
            if self.rank == 0:
                print(f"epoch {self.sampler.epoch} done, last loss {loss.item():.4f}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--ckpt", default="preempt.pt")
    args = p.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0 and os.path.exists(args.ckpt):
        os.remove(args.ckpt)
    dist.barrier()
    Job(args).run(stop_at=27)
    second = Job(args)
    second.maybe_resume()
    second.run()
    dist.destroy_process_group()
