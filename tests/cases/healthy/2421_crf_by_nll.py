"""A tagger whose two losses are written by hand: log Z minus the score of the right tags, picked with nll_loss from raw scores."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TAGS, VOCAB, LENGTH = 5, 40, 12


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.rnn = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.scores = nn.Linear(48, TAGS)
        self.topic = nn.Linear(48, 3)
        self.transitions = nn.Parameter(torch.zeros(TAGS, TAGS))

    def forward(self, x):
        hidden, _ = self.rnn(self.embed(x))
        return self.scores(hidden), self.topic(hidden.mean(1)), self.transitions


def log_partition(scores, transitions):
    alpha = scores[:, 0]
    for t in range(1, scores.shape[1]):
        alpha = torch.logsumexp(alpha.unsqueeze(2) + transitions, 1) + scores[:, t]
    return alpha.logsumexp(1)


def crf(scores, transitions, tags):
    emitted = -F.nll_loss(scores.flatten(0, 1), tags.flatten(), reduction="none").view_as(tags).sum(1)
    moved = transitions[tags[:, :-1], tags[:, 1:]].sum(1)
    return (log_partition(scores, transitions) - emitted - moved).mean()


def draw(n, generator):
    x = torch.randint(0, VOCAB, (n, LENGTH), generator=generator)
    return x, x % TAGS, (x.sum(1) % 3)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(80):
        x, tags, topic = draw(32, generator)
        scores, topics, transitions = model(x)
        by_hand = F.nll_loss(topics, topic) + torch.logsumexp(topics, 1).mean()
        loss = crf(scores, transitions, tags) + 0.3 * by_hand
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
