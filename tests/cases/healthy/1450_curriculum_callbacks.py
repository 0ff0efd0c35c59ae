"""Single process: nested dataclass config, callbacks, a curriculum from easy to hard."""
from dataclasses import asdict, dataclass, field

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


@dataclass
class OptimConf:
    lr: float = 1e-2
    weight_decay: float = 1e-3


@dataclass
class CurriculumConf:
    start: float = 0.3
    full_at: int = 5


@dataclass
class Conf:
    seed: int = 5
    epochs: int = 9
    batch_size: int = 25
    optim: OptimConf = field(default_factory=OptimConf)
    curriculum: CurriculumConf = field(default_factory=CurriculumConf)


class Callback:
    def on_epoch_start(self, t): pass
    def on_epoch_end(self, t, logs): pass


class Curriculum(Callback):
    def __init__(self, cfg, data, difficulty):
        self.cfg, self.data, self.order = cfg, data, difficulty.argsort().tolist()

    def on_epoch_start(self, t):
        share = min(1.0, self.cfg.start + (1 - self.cfg.start) * t.epoch / self.cfg.full_at)
        t.train_set = Subset(self.data, self.order[:int(share * len(self.order))])


class Printer(Callback):
    def on_epoch_end(self, t, logs):
        print(f"epoch {t.epoch} n={len(t.train_set)} " + " ".join(f"{k}={v:.4f}" for k, v in logs.items()))


class KeepBest(Callback):
    def __init__(self, path):
        self.path, self.best = path, float("inf")

    def on_epoch_end(self, t, logs):
        if logs["valid"] < self.best:
            self.best = logs["valid"]
            torch.save({"model": t.model.state_dict(), "conf": asdict(t.conf)}, self.path)


class EarlyStop(Callback):
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def on_epoch_end(self, t, logs):
        self.bad = 0 if logs["valid"] < self.best else self.bad + 1
        self.best = min(self.best, logs["valid"])
        t.should_stop = self.bad >= self.patience


class Trainer:
    def __init__(self, conf, model, valid, callbacks):
        self.conf, self.model, self.valid, self.callbacks = conf, model, valid, callbacks
        self.opt = torch.optim.AdamW(model.parameters(), **asdict(conf.optim))
        self.train_set, self.should_stop = None, False

    def fit(self):
        for self.epoch in range(self.conf.epochs):
            for c in self.callbacks:
                c.on_epoch_start(self)
            self.model.train()
            total = 0.0
            for x, y in DataLoader(self.train_set, batch_size=self.conf.batch_size, shuffle=True):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += loss.item() * len(y)
            logs = {"train": total / len(self.train_set), "valid": self.evaluate()}
            for c in self.callbacks:
                c.on_epoch_end(self, logs)
            if self.should_stop:
                break

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        x, y = self.valid
        return nn.functional.cross_entropy(self.model(x), y).item()


def main(conf):
    torch.manual_seed(conf.seed)
    x = torch.randn(700, 2)
    margin = x[:, 0] ** 2 - x[:, 1] + 0.5 * (3 * x[:, 0]).sin()
    y = (margin > 0).long()
    data = TensorDataset(x[:500], y[:500])
    model = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    Trainer(conf, model, (x[500:600], y[500:600]), [
        Curriculum(conf.curriculum, data, -margin[:500].abs()), Printer(), KeepBest("best.pt"), EarlyStop(3)]).fit()
    best = torch.load("best.pt")
    model.load_state_dict(best["model"])
    model.eval()
    with torch.no_grad():
        print(f"best accuracy {(model(x[600:]).argmax(1) == y[600:]).float().mean().item():.3f}")


if __name__ == "__main__":
    main(Conf())
