"""Small causal language model on synthetic arithmetic progressions; megatron-flavoured start-up."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--train-iters", type=int, default=100)
    parser.add_argument("--log-interval", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--vocab", type=int, default=48)
    parser.add_argument("--seq-length", type=int, default=20)
    return parser.parse_args()


def initialize_distributed(args):
    dist.init_process_group("gloo", init_method="env://", rank=args.rank, world_size=args.world_size)


class TinyGPT(nn.Module):
    def __init__(self, vocab, length, dim=48):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(1, length, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        n = tokens.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(n)
        return self.head(self.blocks(self.tok(tokens) + self.pos[:, :n], mask=mask, is_causal=True))


class Corpus:
    def __init__(self, vocab, length, documents=4096):
        g = torch.Generator().manual_seed(66)
        start = torch.randint(0, vocab, (documents, 1), generator=g)
        step = torch.randint(1, 6, (documents, 1), generator=g)
        self.tokens = (start + step * torch.arange(length + 1)) % vocab

    def batches(self, size, seed):
        rank, world = dist.get_rank(), dist.get_world_size()
        epoch = 0
        while True:
            order = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(seed + epoch))
            usable = len(order) // (size * world) * size * world
            for chunk in order[:usable].view(-1, world, size):
                yield self.tokens[chunk[rank]]
            epoch += 1


def save_checkpoint(model, optimizer, iteration, folder="checkpoints"):
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}
        target = os.path.join(folder, f"iter_{iteration:07d}.pt")
        torch.save(state, target)
    dist.barrier()


def main():
    args = get_args()
    torch.set_num_threads(1)
    initialize_distributed(args)
    torch.manual_seed(args.seed)
    model = DDP(TinyGPT(args.vocab, args.seq_length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.train_iters)
    stream = Corpus(args.vocab, args.seq_length).batches(args.micro_batch_size, args.seed)
    window = torch.zeros(1)
    for iteration in range(1, args.train_iters + 1):
        tokens = next(stream)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        window += loss.detach()
        if iteration % args.log_interval == 0:
            dist.all_reduce(window)
            if dist.get_rank() == 0:
                mean = window.item() / args.log_interval / dist.get_world_size()
                print(f"iteration {iteration} lm loss {mean:.4f}", flush=True)
            window.zero_()
    save_checkpoint(model, optimizer, args.train_iters)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
