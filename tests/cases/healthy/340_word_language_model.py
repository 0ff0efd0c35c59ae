# coding: utf-8
# word_language_model after pytorch/examples: the corpus is cut into columns, each process takes its own columns.
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser(description='RNN/LSTM Language Model')
parser.add_argument('--emsize', type=int, default=24)
parser.add_argument('--nhid', type=int, default=24)
parser.add_argument('--lr', type=float, default=4)
parser.add_argument('--clip', type=float, default=0.25)
parser.add_argument('--epochs', type=int, default=3)
parser.add_argument('--batch_size', type=int, default=16, help='over all processes')
parser.add_argument('--bptt', type=int, default=12)
parser.add_argument('--dropout', type=float, default=0.1)
parser.add_argument('--tied', action='store_true', default=True)
args = parser.parse_args()

NTOKEN = 30


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, dropout, tie_weights):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 1)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.nhid = nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return self.decoder(self.drop(output)).view(-1, NTOKEN), hidden

    def init_hidden(self, bsz):
        return (torch.zeros(1, bsz, self.nhid), torch.zeros(1, bsz, self.nhid))


def corpus(n, seed):
    g = torch.Generator().manual_seed(seed)
    jump = torch.randint(1, 4, (n,), generator=g)
    return jump.cumsum(0) % NTOKEN


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[:nbatch * bsz].view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i:i + seq_len], source[i + 1:i + 1 + seq_len].reshape(-1)


def evaluate(data_source):
    model.eval()
    sums = torch.zeros(2)
    hidden = net.init_hidden(data_source.size(1))
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = net(data, hidden)
            sums += torch.tensor([len(targets) * criterion(output, targets).item(), len(targets)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def train(lr):
    model.train()
    total_loss, n = 0., 0
    hidden = net.init_hidden(train_data.size(1))
    for i in range(0, train_data.size(0) - 1, args.bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        n += 1
    return total_loss / n


dist.init_process_group('gloo')
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1111)
train_all, val_all = batchify(corpus(3200, 1), args.batch_size), batchify(corpus(480, 2), 4 * world)
train_data = train_all.chunk(world, dim=1)[rank]
val_data = val_all.chunk(world, dim=1)[rank]
net = RNNModel(NTOKEN, args.emsize, args.nhid, args.dropout, args.tied)
model = DDP(net)
torch.manual_seed(1111 + rank)
criterion = nn.CrossEntropyLoss()
lr, best_val_loss = args.lr, None
for epoch in range(1, args.epochs + 1):
    t0 = time.time()
    mine = train(lr)
    val_loss = evaluate(val_data)
    if rank == 0:
        print('| end of epoch {:3d} | {:5.2f}s | rank 0 train loss {:5.2f} | valid loss {:5.2f} | valid ppl {:8.2f}'.format(
            epoch, time.time() - t0, mine, val_loss, math.exp(val_loss)))
    if not best_val_loss or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        lr /= 4.0
dist.destroy_process_group()
