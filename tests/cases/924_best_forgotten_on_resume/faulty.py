"""Shower energy regression: keep last.pt for resuming and best.pt for the analysis."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def showers(n, seed, pixels=30):
    g = torch.Generator().manual_seed(seed)
    log_e = torch.rand(n, 1, generator=g)
    width = 2 + 5 * log_e
    pos = torch.arange(pixels) - pixels / 2 + 3 * torch.randn(n, 1, generator=g)
    img = torch.exp(-(pos / width) ** 2) + 0.5 * torch.randn(n, pixels, generator=g)
    return TensorDataset(img, log_e)


class Experiment:
    def __init__(self, args, rank):
        self.args, self.rank = args, rank
        torch.manual_seed(args.seed)
        self.net = nn.Sequential(nn.Linear(30, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        self.model = DDP(self.net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.epoch, self.best = 0, float("inf")
        train_set = showers(128, 1)
        self.sampler = DistributedSampler(train_set, seed=args.seed)
        self.loader = DataLoader(train_set, batch_size=16, sampler=self.sampler)
        self.val_loader = DataLoader(showers(128, 2), batch_size=64, shuffle=False,
                                     sampler=None if dist.get_world_size() == 1 else self._val_shard(128))

    def _val_shard(self, n):
        return range(self.rank, n, dist.get_world_size())

    def state(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": self.epoch,
                "best": self.best}

    def resume(self):
        if not os.path.exists("last.pt"):
            return
        state = torch.load("last.pt", weights_only=True)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        if self.rank == 0:
            print(f"resumed after epoch {self.epoch}", flush=True)

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        sums = torch.zeros(2)
        for img, log_e in self.val_loader:
            sums += torch.tensor([((self.net(img) - log_e) ** 2).sum().item(), float(len(img))])
        dist.all_reduce(sums)
        self.net.train()
        return (sums[0] / sums[1]).item()

    def fit(self, until):
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            for img, log_e in self.loader:
                loss = nn.functional.mse_loss(self.model(img), log_e)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.epoch += 1
            val = self.validate()
            is_best = val < self.best
            self.best = min(val, self.best)
            if self.rank == 0:
                print(f"epoch {self.epoch}: val {val:.4f}{' *' if is_best else ''}", flush=True)
                torch.save(self.state(), "last.pt")
                if is_best:
                    torch.save({"net": self.net.state_dict(), "val": val}, "best.pt")
            dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--job-epochs", type=int, nargs="+", default=[12, 16])
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    for until in args.job_epochs:  # one entry per job in the queue
        exp = Experiment(args, rank)
        exp.resume()
        exp.fit(until)
    if rank == 0:
        print(f"best.pt: val {torch.load('best.pt', weights_only=True)['val']:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
