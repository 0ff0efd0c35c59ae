"""Old lab code: one process, nn.DataParallel, loss computed inside forward and averaged outside, `module.` handled at saving."""
import argparse, os, tempfile, time
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class AvgMeter:
    def __init__(self):
        self.v = self.n = 0

    def update(self, v, n=1):
        self.v += v * n
        self.n += n

    @property
    def avg(self):
        return self.v / max(self.n, 1)


class Blobs(Dataset):
    def __init__(self, n, train):
        rs = np.random.RandomState(0 if train else 1)
        self.mu = np.random.RandomState(5).randn(4, 16)
        self.y = rs.randint(0, 4, n)
        self.x = (self.mu[self.y] + rs.randn(n, 16)).astype("float32")
        self.train = train

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.train:
            x = x + 0.1 * np.random.randn(16).astype("float32")
        return x, int(self.y[i])


class ModelWithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
        self.crit = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        out = self.net(x)
        return out if y is None else (out, self.crit(out, y).unsqueeze(0))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gpu", default="0,1")
    ap.add_argument("--epochs", type=int, default=4)
    a = ap.parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", a.gpu)
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    np.random.seed(1); torch.manual_seed(1)
    model = nn.DataParallel(ModelWithLoss()).to(dev)
    opt = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=5e-4)
    sch = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 3], 0.3)
    tl, vl = DataLoader(Blobs(640, True), 32, True), DataLoader(Blobs(200, False), 64)
    best = 0
    for ep in range(a.epochs):
        model.train()
        m, t0 = AvgMeter(), time.time()
        for x, y in tl:
            _, loss = model(x.to(dev), y.to(dev))
            loss = loss.mean()
            opt.zero_grad(); loss.backward(); opt.step()
            m.update(loss.item(), len(y))
        sch.step()
        model.eval()
        acc = AvgMeter()
        with torch.no_grad():
            for x, y in vl:
                acc.update((model(x.to(dev)).argmax(1).cpu() == y).float().mean().item(), len(y))
        if acc.avg > best:
            best = acc.avg
            torch.save({k: v.cpu() for k, v in model.module.state_dict().items()}, os.path.join(tempfile.gettempdir(), "best773.pth"))
        print(f"{ep} loss {m.avg:.4f} acc {acc.avg:.4f} best {best:.4f} ({time.time() - t0:.1f}s)")


if __name__ == "__main__":
    main()
