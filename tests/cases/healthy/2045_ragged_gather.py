"""Span tagging on texts of different lengths; the ranks get unequal numbers of batches and join their predictions at the end."""
import random
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

WORDS, TAGS = 60, 3


def texts(count, seed):
    """Words 0-9 open a span that lasts for three words, words 10-19 one of two; tag 0 elsewhere."""
    rng, out = random.Random(seed), []
    for _ in range(count):
        words = [rng.randrange(WORDS) for _ in range(rng.randint(5, 30))]
        tags = [0] * len(words)
        for i, word in enumerate(words):
            reach, tag = (3, 1) if word < 10 else (2, 2) if word < 20 else (0, 0)
            for j in range(i, min(i + reach, len(words))):
                tags[j] = tag
        out.append((torch.tensor(words), torch.tensor(tags)))
    return out


def packed_batches(items, tokens, order):
    """Batches of at most `tokens` padded tokens, short texts together."""
    order = sorted(order, key=lambda i: len(items[i][0]) + random.Random(i).random())
    batch = []
    for i in order:
        if batch and (len(batch) + 1) * len(items[i][0]) > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


class Tagger(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, dim, padding_idx=WORDS)
        self.rnn = nn.GRU(dim, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, TAGS)

    def forward(self, words):
        return self.head(self.rnn(self.embed(words))[0])


def collate(items, picks):
    words = pad_sequence([items[i][0] for i in picks], batch_first=True, padding_value=WORDS)
    tags = pad_sequence([items[i][1] for i in picks], batch_first=True, padding_value=-100)
    return words, tags


@torch.no_grad()
def predict(net, items, mine):
    """Each rank tags its own texts; rank 0 gets all of them."""
    net.eval()
    own = {}
    for picks in packed_batches(items, 400, mine):
        words, _ = collate(items, picks)
        for i, row in zip(picks, net(words).argmax(-1)):
            own[i] = row[: len(items[i][0])].tolist()
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, everyone, dst=0)
    net.train()
    return {i: tags for part in everyone for i, tags in part.items()} if everyone else None


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    train_set, test_set = texts(801, 1), texts(121, 2)
    net = Tagger()
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        order = list(range(len(train_set)))
        random.Random(epoch).shuffle(order)
        batches = list(packed_batches(train_set, 320, order[rank::world]))
        random.Random(100 * epoch + rank).shuffle(batches)
        with Join([model]) if world > 1 else nullcontext():
            for picks in batches:
                words, tags = collate(train_set, picks)
                loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten(), ignore_index=-100)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        guesses = predict(net, test_set, range(rank, len(test_set), world))
        if rank == 0:
            assert len(guesses) == len(test_set)
            right = sum(int(a == b) for i, tags in guesses.items() for a, b in zip(tags, test_set[i][1].tolist()))
            total = sum(len(words) for words, _ in test_set)
            print(f"epoch {epoch}: {len(batches)} batches here, word accuracy {right / total:.4f} on {total} words", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
