"""Sequence tagger that can be interrupted and resumed; runs both legs for a quick check."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--stop-after", type=int, default=2, help="leave after this many epochs in the first leg")
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--hidden", type=int, default=32)
    p.add_argument("--ckpt", default="tagger_ckpt.pth")
    return p.parse_args()


def sequences(n=256, length=12):
    g = torch.Generator().manual_seed(4)
    x = torch.randint(0, 20, (n, length), generator=g)
    y = (x + x.roll(1, dims=1)) % 3
    return TensorDataset(x, y)


class Tagger(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.emb = nn.Embedding(20, hidden)
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, 3)

    def forward(self, x):
        return self.out(self.lstm(self.emb(x))[0])


def save(args, model, optimizer, epoch):
    if dist.get_rank() == 0:
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": epoch,
            "args": args,
        }
        torch.save(state, args.ckpt)
    dist.barrier()


def train(args, resume, until):
    torch.manual_seed(0)
    model = DDP(Tagger(args.hidden))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    start_epoch = 0
    if resume:
        checkpoint = torch.load(args.ckpt, map_location="cpu", weights_only=False)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"] + 1
        if checkpoint["args"].hidden != args.hidden:
            raise SystemExit("checkpoint was made with another --hidden")
    data = sequences()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(start_epoch, until):
        sampler.set_epoch(epoch)
        stats = torch.zeros(2)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(stats)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {(stats[0] / stats[1]).item():.4f}", flush=True)
        save(args, model, optimizer, epoch)


def main():
    args = get_args()
    dist.init_process_group("gloo")
    train(args, resume=False, until=args.stop_after)
    train(args, resume=True, until=args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
