import os, math
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def share(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def reduce_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        p.grad /= dist.get_world_size()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(30, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x, h):
        y, h = self.rnn(self.emb(x), h)
        return self.out(y).transpose(1, 2), h


def main():
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    text = torch.randint(30, (40, 16, 64), generator=g)  # 40 batches of 16 sequences
    torch.manual_seed(0)
    net = Tagger()
    share(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(2):
        for batch in text:
            x = batch[rank::world]
            y = (x + x.roll(1, 1)) % 5
            h = None
            opt.zero_grad()
            total = 0.0
            for start in range(0, 64, 16):  # truncated in time: the loss is the sum over the sequence
                part = slice(start, start + 16)
                logits, h = net(x[:, part], h)
                loss = F.cross_entropy(logits, y[:, part], reduction="sum") / len(x)
                loss.backward()
                h = h.detach()
                total += loss.item()
            reduce_gradients(net)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} nats a sequence {total:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        main()
    finally:
        dist.destroy_process_group()
