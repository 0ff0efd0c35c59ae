"""Pre-emptible training: stop after some epochs, start again from the file."""
import argparse
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Session:
    def __init__(self, args, path):
        self.args, self.path = args, path
        self.rank = int(os.environ["RANK"])
        torch.manual_seed(args.seed)
        self.net = nn.Sequential(nn.Linear(14, 48), nn.ReLU(), nn.Linear(48, 5))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / 10) * 0.97**s)
        self.epoch = 0
        if os.path.exists(path):
            self.restore()
        self.model = DDP(self.net)
        g = torch.Generator().manual_seed(3)
        x = torch.randn(320, 14, generator=g)
        self.data = TensorDataset(x, (x @ torch.randn(14, 5, generator=g)).argmax(1))

    def restore(self):
        ckpt = torch.load(self.path, map_location="cpu", weights_only=True)
        self.net.load_state_dict(ckpt["net"])
        self.optimizer.load_state_dict(ckpt["optimizer"])
        self.scheduler.load_state_dict(ckpt["scheduler"])
        self.epoch = ckpt["epoch"]

    def store(self):
        if self.rank == 0:
            ckpt = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(), "epoch": self.epoch}
            torch.save(ckpt, self.path + ".part")
            os.replace(self.path + ".part", self.path)
        dist.barrier()

    def train(self, num_epochs):
        sampler = DistributedSampler(self.data, seed=self.args.seed)
        loader = DataLoader(self.data, self.args.batch, sampler=sampler)
        for _ in range(num_epochs):
            sampler.set_epoch(self.epoch)
            c = torch.zeros(2)
            for x, y in loader:
                out = self.model(x)
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(out, y).backward()
                self.optimizer.step()
                self.scheduler.step()
                c += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
            self.epoch += 1
            dist.all_reduce(c)
            if self.rank == 0:
                print(f"epoch {self.epoch} accuracy {(c[0] / c[1]).item():.3f} lr {self.scheduler.get_last_lr()[0]:.4f}")
            self.store()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--batch", type=int, default=16)
    args = p.parse_args()
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "session.pt")
    Session(args, path).train(3)
    Session(args, path).train(2)  # the second allocation
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
