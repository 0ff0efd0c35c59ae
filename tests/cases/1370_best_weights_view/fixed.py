"""Multi-task network with early stopping that returns to the best epoch before the final test."""
import argparse
import copy
import json

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Molecules(Dataset):
    """Random descriptor vectors with a regression target and a binary label."""

    def __init__(self, size, seed, dim=24, noise=0.5):
        g = torch.Generator().manual_seed(seed)
        rule = torch.Generator().manual_seed(999)
        w1, w2 = torch.randn(dim, 6, generator=rule), torch.randn(6, 2, generator=rule)
        self.x = torch.randn(size, dim, generator=g)
        hidden = torch.tanh(self.x @ w1 / 3) @ w2
        self.solubility = hidden[:, 0] + noise * torch.randn(size, generator=g)
        self.toxic = (hidden[:, 1] + noise * torch.randn(size, generator=g) > 0).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "solubility": self.solubility[i], "toxic": self.toxic[i]}


class MultiTaskNet(nn.Module):
    def __init__(self, dim=24, width=96):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict({"solubility": nn.Linear(width, 1), "toxic": nn.Linear(width, 1)})

    def forward(self, x):
        h = self.trunk(x)
        return {name: head(h).squeeze(1) for name, head in self.heads.items()}


class UncertaintyLoss(nn.Module):
    """Weights the tasks by learned log-variances."""

    def __init__(self, tasks):
        super().__init__()
        self.log_var = nn.ParameterDict({t: nn.Parameter(torch.zeros(())) for t in tasks})

    def forward(self, out, batch):
        parts = {
            "solubility": F.mse_loss(out["solubility"], batch["solubility"]),
            "toxic": F.binary_cross_entropy_with_logits(out["toxic"], batch["toxic"]),
        }
        total = sum(torch.exp(-self.log_var[t]) * v + 0.5 * self.log_var[t] for t, v in parts.items())
        return total, parts


class NetWithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = MultiTaskNet()
        self.loss = UncertaintyLoss(["solubility", "toxic"])

    def forward(self, batch):
        return self.loss(self.net(batch["x"]), batch)


class EarlyStopping:
    def __init__(self, patience, min_delta=0.0):
        self.patience, self.min_delta = patience, min_delta
        self.best = float("inf")
        self.best_epoch = -1
        self.weights = None
        self.waited = 0

    def update(self, epoch, value, module):
        """True when training should end."""
        if value < self.best - self.min_delta:
            self.best, self.best_epoch, self.waited = value, epoch, 0
            self.weights = copy.deepcopy(module.state_dict())
            return False
        self.waited += 1
        return self.waited >= self.patience

    def restore(self, module):
        module.load_state_dict(self.weights)


class Runner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train_set, self.valid_set, self.test_set = Molecules(240, 1), Molecules(160, 2), Molecules(160, 3)
        self.sampler = DistributedSampler(self.train_set, shuffle=True, seed=args.seed)
        self.loader = DataLoader(self.train_set, args.batch_size, sampler=self.sampler)
        torch.manual_seed(args.seed)
        self.model = DDP(NetWithLoss())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.stopper = EarlyStopping(args.patience)
        self.log = []

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in self.loader:
            loss, _ = self.model(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            n = len(batch["x"])
            sums += torch.tensor([loss.item() * n, n], dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    @torch.no_grad()
    def score(self, dataset):
        net = self.model.module.net.eval()
        part = slice(self.rank, None, self.world)
        out = net(dataset.x[part])
        sums = torch.stack([
            F.mse_loss(out["solubility"], dataset.solubility[part], reduction="sum"),
            F.binary_cross_entropy_with_logits(out["toxic"], dataset.toxic[part], reduction="sum"),
            ((out["toxic"] > 0).float() == dataset.toxic[part]).sum().float(),
            torch.tensor(float(len(dataset.x[part]))),
        ]).double()
        dist.all_reduce(sums)
        mse, bce, accuracy = (sums[:3] / sums[3]).tolist()
        return {"mse": mse, "bce": bce, "accuracy": accuracy}

    def report(self, epoch, train, valid):
        self.log.append({"epoch": epoch, "train": train, **valid})
        if self.rank == 0:
            print(f"epoch {epoch:2d}: train {train:.4f} valid mse {valid['mse']:.4f} bce {valid['bce']:.4f} "
                  f"accuracy {valid['accuracy']:.3f}", flush=True)

    def fit(self):
        for epoch in range(self.args.epochs):
            train, valid = self.train_epoch(epoch), self.score(self.valid_set)
            self.report(epoch, train, valid)
            if self.stopper.update(epoch, valid["mse"] + valid["bce"], self.model.module):
                break
        self.stopper.restore(self.model.module)

    def finish(self):
        again, test = self.score(self.valid_set), self.score(self.test_set)
        if self.rank == 0:
            print(f"best epoch {self.stopper.best_epoch} with {self.stopper.best:.4f}; "
                  f"restored weights score {again['mse'] + again['bce']:.4f}")
            print("test " + " ".join(f"{k} {v:.4f}" for k, v in test.items()))
            torch.save(self.model.module.net.state_dict(), self.args.out)
            with open("log.json", "w") as f:
                json.dump(self.log, f, indent=1)
        dist.barrier()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=25)
    p.add_argument("--batch-size", type=int, default=20)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--patience", type=int, default=4)
    p.add_argument("--seed", type=int, default=6)
    p.add_argument("--out", default="multitask.pt")
    args = p.parse_args()
    dist.init_process_group("gloo")
    runner = Runner(args)
    runner.fit()
    runner.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
