"""Next-token training from a stream that is read by several loader workers."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class TokenStream(IterableDataset):
    def __init__(self, documents=512, length=16, vocab=32):
        self.documents, self.length, self.vocab = documents, length, vocab
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.epoch = 0

    def document(self, number):
        g = torch.Generator().manual_seed(number)
        step = int(torch.randint(1, 4, (), generator=g))
        start = int(torch.randint(0, self.vocab, (), generator=g))
        return (start + step * torch.arange(self.length + 1)) % self.vocab

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        shard, shards = worker, workers
        order = torch.randperm(self.documents, generator=torch.Generator().manual_seed(77 + self.epoch))
        for number in order[shard::shards].tolist():
            text = self.document(number)
            yield text[:-1], text[1:]


class Lm(nn.Module):
    def __init__(self, vocab=32, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        self.unembed = nn.Linear(width, vocab)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.unembed(self.body(self.embed(tokens), mask=mask, is_causal=True))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--workers", type=int, default=2)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stream = TokenStream()
    loader = DataLoader(stream, batch_size=args.batch_size, num_workers=args.workers)
    model = DDP(Lm())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        stream.epoch = epoch
        acc = torch.zeros(2, dtype=torch.float64)
        for tokens, target in loader:
            loss = nn.functional.cross_entropy(model(tokens).transpose(1, 2), target)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            acc += torch.tensor([loss.item() * target.numel(), target.numel()])
        dist.all_reduce(acc)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {int(acc[1])} tokens, loss {(acc[0] / acc[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
