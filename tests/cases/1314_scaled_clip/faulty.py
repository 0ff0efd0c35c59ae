"""Mixed-precision training of a small convolutional net, with gradient clipping."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_device():
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def stripes(n=288):
    g = torch.Generator().manual_seed(61)
    label = torch.randint(0, 3, (n,), generator=g)
    img = 0.3 * torch.randn(n, 1, 8, 8, generator=g)
    for i, k in enumerate(label.tolist()):
        if k == 0:
            img[i, 0, ::2] += 1
        elif k == 1:
            img[i, 0, :, ::2] += 1
        else:
            img[i, 0] += torch.eye(8)
    return TensorDataset(img, label)


class AmpStep:
    def __init__(self, params, lr, max_norm, device):
        self.params = list(params)
        self.optimizer = torch.optim.SGD(self.params, lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler(device.type)
        self.max_norm = max_norm

    def __call__(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.params, self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--max-norm", type=float, default=1.0)
    args = ap.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = int(os.environ["RANK"])
    device = get_device()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    ).to(device)
    model = DDP(net)
    step = AmpStep(model.parameters(), args.lr, args.max_norm, device)
    data = stripes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        stat = torch.zeros(3, device=device)
        for img, label in loader:
            img, label = img.to(device), label.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                out = model(img)
            loss = F.cross_entropy(out.float(), label)
            step(loss)
            stat += torch.stack([loss.detach() * len(label), (out.argmax(1) == label).sum(), torch.tensor(len(label))])
        dist.all_reduce(stat)
        if rank == 0:
            print(f"epoch {epoch}: loss {(stat[0] / stat[2]).item():.4f} acc {(stat[1] / stat[2]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
