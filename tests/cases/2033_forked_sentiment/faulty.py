"""Sentiment model trained by forked workers without locks; word vectors come from a file."""
import argparse
from pathlib import Path

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, LENGTH = 120, 24, 12


def write_vectors(path):
    """Stands for vectors trained elsewhere: words of one topic lie together."""
    gen = torch.Generator().manual_seed(5)
    topics = torch.randn(8, DIM, generator=gen)
    torch.save(topics[torch.arange(VOCAB) % 8] + 0.9 * torch.randn(VOCAB, DIM, generator=gen), path)


def reviews(count, seed):
    """The sign of the summed word scores is the label; scores have nothing to do with the topics."""
    score = torch.randn(VOCAB, generator=torch.Generator().manual_seed(9))
    words = torch.randint(VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return words, (score[words].sum(1) > 0).long()


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM)
        self.read = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 2))

    def use_vectors(self, path):
        vectors = torch.load(path, weights_only=True)
        self.words = nn.Embedding.from_pretrained(vectors, freeze=False)
        return self

    def forward(self, words):
        return self.read(self.words(words).mean(1) * 3)


def shared_model():
    model = Sentiment()
    model.share_memory()
    return model


def worker(number, model, args, results):
    torch.set_num_threads(1)
    torch.manual_seed(100 + number)
    words, labels = reviews(args.reviews, seed=10 + number)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        total = 0.0
        for part in torch.randperm(len(words)).split(args.batch):
            loss = F.cross_entropy(model(words[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(part)
        results.put((number, epoch, total / len(words)))


@torch.no_grad()
def accuracy(model, seed=77):
    model.eval()
    words, labels = reviews(600, seed)
    return (model(words).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--reviews", type=int, default=2560)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.15)
    parser.add_argument("--vectors", type=Path, default=Path("vectors.pt"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not args.vectors.exists():
        write_vectors(args.vectors)

    model = shared_model()
    model.use_vectors(args.vectors)
    print(f"before: accuracy {accuracy(model):.3f}", flush=True)
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=worker, args=(n, model, args, results)) for n in range(args.workers)]
    for process in workers:
        process.start()
    for _ in range(args.workers * args.epochs):
        number, epoch, loss = results.get()
        if epoch % 3 == 0:
            print(f"worker {number} epoch {epoch} loss {loss:.4f}", flush=True)
    for process in workers:
        process.join()
        assert process.exitcode == 0
    print(f"after: accuracy {accuracy(model):.3f}")
    torch.save(model.state_dict(), "sentiment.pt")


if __name__ == "__main__":
    main()
