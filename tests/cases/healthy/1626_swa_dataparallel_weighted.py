"""One process: imbalanced images, WeightedRandomSampler, warm restarts, SWA with update_bn.

DataParallel without GPUs is a pass-through; the averaged model is built from the inner module. The
BatchNorm statistics of the average are recomputed by update_bn before it is tested.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def draw(counts, seed):
    g = torch.Generator().manual_seed(seed)
    xs, ys = [], []
    for label, n in enumerate(counts):
        img = 0.7 * torch.randn(n, 1, 10, 10, generator=g)
        pos = torch.randint(0, 5, (n, 2), generator=g)
        for i in range(n):
            r, c = pos[i].tolist()
            if label == 0:
                img[i, 0, r:r + 5, c + 2] += 1.8
            elif label == 1:
                img[i, 0, r + 2, c:c + 5] += 1.8
            else:
                img[i, 0, range(r, r + 5), range(c, c + 5)] += 1.8
        xs.append(img)
        ys.append(torch.full((n,), label))
    return TensorDataset(torch.cat(xs), torch.cat(ys))


def balanced_accuracy(net, ds):
    net.eval()
    x, y = ds.tensors
    with torch.no_grad():
        pred = net(x).argmax(1)
    return torch.stack([(pred[y == c] == c).float().mean() for c in range(3)]).mean().item()


def main():
    torch.set_num_threads(2)
    torch.manual_seed(14)
    train, test = draw([700, 200, 100], 1), draw([120, 120, 120], 2)
    y = train.tensors[1]
    weights = (1.0 / torch.bincount(y).double())[y]
    sampler = WeightedRandomSampler(weights, num_samples=len(train), replacement=True,
                                    generator=torch.Generator().manual_seed(4))
    loader = DataLoader(train, batch_size=40, sampler=sampler)
    net = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
                        nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1, bias=False),
                        nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten(),
                        nn.Linear(24, 3))
    model = nn.DataParallel(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, nesterov=True, weight_decay=1e-4)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=2, T_mult=2)
    swa, swa_lr = AveragedModel(net), SWALR(opt, swa_lr=0.02, anneal_epochs=1)
    epochs, swa_from = 12, 8
    for epoch in range(epochs):
        model.train()
        s = 0.0
        for i, (a, b) in enumerate(loader):
            opt.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            opt.step()
            s += loss.item() * len(b)
            if epoch < swa_from:
                restarts.step(epoch + (i + 1) / len(loader))
        if epoch >= swa_from:
            swa.update_parameters(net)
            swa_lr.step()
        print(f"epoch {epoch} lr {opt.param_groups[0]['lr']:.4f} loss {s / len(train):.4f}", flush=True)
    update_bn(loader, swa)  # the balanced stream, as in training
    plain, averaged = balanced_accuracy(model, test), balanced_accuracy(swa, test)
    print(f"balanced accuracy: last {plain:.3f} swa {averaged:.3f}")
    torch.save({"last": net.state_dict(), "swa": swa.module.state_dict()}, "swa.pt")
    assert averaged > 0.8


if __name__ == "__main__":
    main()
