"""Topic classifier with a big vocabulary; gradients are averaged by hand with overlapping all-reduces."""
import argparse

import torch
import torch.distributed as dist
from torch import nn


class TopicNet(nn.Module):
    def __init__(self, vocab, dim, topics):
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.hidden = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, topics)

    def forward(self, ids):
        return self.out(torch.relu(self.hidden(self.words(ids).mean(1))))


class Documents:
    """A document uses words of its topic more often than others."""

    def __init__(self, vocab, topics, length, seed):
        self.vocab, self.topics, self.length = vocab, topics, length
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self, n):
        topic = torch.randint(0, self.topics, (n,), generator=self.gen)
        span = self.vocab // self.topics
        own = topic[:, None] * span + torch.randint(0, span, (n, self.length), generator=self.gen)
        noise = torch.randint(0, self.vocab, (n, self.length), generator=self.gen)
        use_own = torch.rand(n, self.length, generator=self.gen) < 0.5
        return torch.where(use_own, own, noise), topic


def broadcast_parameters(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def average_gradients(model, world):
    for p in model.parameters():
        p.grad.div_(world)
        work = dist.all_reduce(p.grad, async_op=True)
    work.wait()


@torch.no_grad()
def accuracy(model, documents, world):
    ids, topic = documents.draw(400)
    hits = (model(ids).argmax(1) == topic).float().sum()
    dist.all_reduce(hits)
    return hits.item() / (400 * world)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=40000)
    ap.add_argument("--dim", type=int, default=64)
    ap.add_argument("--topics", type=int, default=8)
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = TopicNet(args.vocab, args.dim, args.topics)
    broadcast_parameters(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    train = Documents(args.vocab, args.topics, 40, seed=100 + rank)
    test = Documents(args.vocab, args.topics, 40, seed=900 + rank)

    for step in range(1, args.steps + 1):
        ids, topic = train.draw(args.batch)
        loss = nn.functional.cross_entropy(model(ids), topic)
        opt.zero_grad()
        loss.backward()
        average_gradients(model, world)
        opt.step()
        if step % 15 == 0:
            acc = accuracy(model, test, world)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / world:.4f} accuracy {acc:.3f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "topics.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
