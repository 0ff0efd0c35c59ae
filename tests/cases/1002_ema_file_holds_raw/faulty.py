"""Fine-tune a small captioner with EMA; writes the raw and the averaged weights every 20 steps."""
import argparse
import os
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build_data(n=320, length=10, vocab=32):
    g = torch.Generator().manual_seed(59)
    start = torch.randint(0, vocab, (n, 1), generator=g)
    step = torch.randint(1, 4, (n, 1), generator=g)
    return TensorDataset((start + step * torch.arange(length)) % vocab)


class TokenModel(nn.Module):
    def __init__(self, vocab=32, width=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


@torch.no_grad()
def update_ema(ema_model, model, decay):
    for ema_p, p in zip(ema_model.parameters(), model.parameters()):
        ema_p.mul_(decay).add_(p, alpha=1 - decay)


def save_checkpoint(args, model, ema, opt, train_steps):
    state_dict = model.module.state_dict()
    ema_state_dict = ema.state_dict() if ema is not None else None
    path = os.path.join(args.results_dir, f"{train_steps:07d}")
    os.makedirs(path, exist_ok=True)
    torch.save(state_dict, os.path.join(path, "model.pt"))
    torch.save(opt.state_dict(), os.path.join(path, "optimizer.pt"))
    if ema_state_dict is not None:
        path = os.path.join(args.results_dir, f"{train_steps:07d}_ema")
        os.makedirs(path, exist_ok=True)
        torch.save(state_dict, os.path.join(path, "model.pt"))


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    net = TokenModel()
    ema = deepcopy(net).requires_grad_(False).eval() if args.use_ema else None
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dataset = build_data()
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    train_steps = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running, seen = 0.0, 0
        for (tokens,) in loader:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if ema is not None:
                update_ema(ema, model.module, args.ema_decay)
            running += loss.item()
            seen += 1
            train_steps += 1
            if train_steps % args.ckpt_every == 0:
                if rank == 0:
                    save_checkpoint(args, model, ema, opt, train_steps)
                dist.barrier()
        avg = torch.tensor([running, seen], dtype=torch.float64)
        dist.all_reduce(avg)
        if rank == 0:
            print(f"epoch {epoch} step {train_steps} loss {(avg[0] / avg[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--results_dir", default="results")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--ema_decay", type=float, default=0.95)
    parser.add_argument("--use_ema", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ckpt_every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
