"""Batches by token budget: ranks hold other numbers of sentences and tokens, gradients are weighted by tokens."""
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

VOCAB, PAD, TAGS, DIM = 60, 0, 6, 32
SENTENCES, BUDGET, EPOCHS, LR = 1200, 400, 6, 4e-3


def corpus():
    gen = torch.Generator().manual_seed(14)
    tag_of = torch.randint(TAGS, (VOCAB,), generator=gen)
    pairs = []
    for _ in range(SENTENCES):
        n = int(torch.randint(3, 40, (1,), generator=gen))
        words = torch.randint(1, VOCAB, (n,), generator=gen)
        tags = tag_of[words].clone()
        tags[1:] = (tags[1:] + (words[:-1] % 2)) % TAGS  # the word before matters
        pairs.append((words, tags))
    return pairs


def plan_epoch(data, epoch, rank, world):
    """Every rank computes the whole plan, then takes each world-th batch of equally many."""
    gen = torch.Generator().manual_seed(epoch)
    jitter = torch.rand(len(data), generator=gen)
    order = sorted(range(len(data)), key=lambda i: len(data[i][0]) + 4 * jitter[i].item())
    batches, current, longest = [], [], 0
    for i in order:
        longest = max(longest, len(data[i][0]))
        if current and longest * (len(current) + 1) > BUDGET:
            batches.append(current)
            current, longest = [], len(data[i][0])
        current.append(i)
    batches.append(current)
    shuffled = [batches[i] for i in torch.randperm(len(batches), generator=gen).tolist()]
    usable = len(shuffled) // world * world
    return shuffled[rank:usable:world]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.out = nn.Linear(DIM, TAGS)

    def forward(self, words):
        h = self.embed(words)
        h = h + torch.relu(self.conv(h.transpose(1, 2))).transpose(1, 2)
        return self.out(h)


def collate(data, indices):
    words = pad_sequence([data[i][0] for i in indices], batch_first=True, padding_value=PAD)
    tags = pad_sequence([data[i][1] for i in indices], batch_first=True, padding_value=-100)
    return words, tags


def reduce_step(model, loss_sum, tokens):
    """Sum of token losses everywhere over the number of tokens everywhere."""
    stats = torch.tensor([loss_sum.item(), float(tokens)])
    dist.all_reduce(stats)
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= stats[1]
    return stats


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = corpus()
    torch.manual_seed(5)
    model = Tagger()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)

    for epoch in range(EPOCHS):
        totals = torch.zeros(2)
        batches = plan_epoch(data, epoch, rank, world)
        for indices in batches:
            words, tags = collate(data, indices)
            loss_sum = F.cross_entropy(model(words).flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")
            optimizer.zero_grad()
            loss_sum.backward()
            totals += reduce_step(model, loss_sum, (tags != -100).sum().item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {len(batches)} steps, {int(totals[1])} tokens, "
                  f"loss per token {totals[0].item() / totals[1].item():.4f}", flush=True)
    if rank == 0:
        torch.save(model.state_dict(), "tagger.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
