"""CTC on synthetic utterances; batches are formed by duration, ranks get different numbers of them and the Join context evens that out."""
import collections
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

Utterance = collections.namedtuple("Utterance", "features tokens")
SYMBOLS, MELS, MAX_FRAMES = 8, 12, 560


class Corpus(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(33)
        codebook = torch.randn(SYMBOLS, MELS, generator=g)
        g.manual_seed(seed)
        self.items = []
        for _ in range(n):
            tokens = torch.randint(SYMBOLS, (int(torch.randint(2, 9, (1,), generator=g)),), generator=g)
            spans = torch.randint(4, 9, (len(tokens),), generator=g)
            frames = codebook[tokens].repeat_interleave(spans, 0)
            frames = frames + 0.4 * torch.randn(frames.shape, generator=g)
            silence = torch.zeros(3, MELS)
            self.items.append(Utterance(torch.cat([silence, frames, silence]), tokens + 1))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class DurationBatchSampler:
    """batches of about MAX_FRAMES frames; one shuffled plan for all ranks, rank r takes every world-th batch, the tail is not padded"""

    def __init__(self, corpus, rank, world, seed):
        self.lengths = [len(u.features) for u in corpus.items]
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def plan(self):
        rng = random.Random(self.seed * 1000 + self.epoch)
        noisy = {i: n + rng.random() * 6 for i, n in enumerate(self.lengths)}
        batches, batch = [], []
        for i in sorted(noisy, key=noisy.get):
            if batch and self.lengths[i] * (len(batch) + 1) > MAX_FRAMES:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
        rng.shuffle(batches)
        return batches

    def __iter__(self):
        return iter(self.plan()[self.rank::self.world])

    def __len__(self):
        return len(self.plan()[self.rank::self.world])


def collate(batch):
    x = nn.utils.rnn.pad_sequence([u.features for u in batch], batch_first=True)
    return (x, torch.tensor([len(u.features) for u in batch]), torch.cat([u.tokens for u in batch]), torch.tensor([len(u.tokens) for u in batch]))


def spec_augment(x):
    x = x.clone()
    for row in x:
        f, t = random.randrange(MELS - 1), random.randrange(max(1, len(row) - 2))
        row[:, f:f + 1] = 0
        row[t:t + 2] = 0
    return x


class Acoustic(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.conv = nn.Conv1d(MELS, width, 5, stride=2, padding=2)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, SYMBOLS + 1)

    def forward(self, x, lengths):
        h = torch.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        lengths = (lengths - 1) // 2 + 1
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(h).log_softmax(-1), lengths


def collapse(path):
    out, previous = [], 0
    for s in path.tolist():
        if s != previous and s != 0:
            out.append(s)
        previous = s
    return out


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diag, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diag, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diag + (x != y))
    return row[-1]


@torch.no_grad()
def token_error_rate(model, corpus, rank, world):
    model.eval()
    errors = torch.zeros(2)
    for i in range(rank, len(corpus), world):
        u = corpus[i]
        logp, _ = model(u.features[None], torch.tensor([len(u.features)]))
        errors += torch.tensor([float(distance(collapse(logp[0].argmax(-1)), u.tokens.tolist())), float(len(u.tokens))])
    dist.all_reduce(errors)
    model.train()
    return (errors[0] / errors[1]).item()


def main(epochs=5):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    random.seed(70 + rank)                                # masks differ by rank
    train, dev = Corpus(420, 1), Corpus(61, 2)
    batches = DurationBatchSampler(train, rank, world, seed=6)
    loader = DataLoader(train, batch_sampler=batches, collate_fn=collate)
    model = DistributedDataParallel(Acoustic())
    # plain SGD keeps no state, so a rank that ran dry earlier misses nothing once the weights are handed over at the end
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85)
    ctc = nn.CTCLoss(reduction="none")
    usual = len(train) / len(batches.plan())               # a constant, so that every utterance weighs the same in any batch
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        meter, mine = torch.zeros(2), 0
        with model.join():
            for x, x_len, y, y_len in loader:
                logp, out_len = model(spec_augment(x), x_len)
                each = ctc(logp.transpose(0, 1), y, out_len, y_len) / y_len
                loss = each.sum() / usual
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                meter += torch.tensor([each.sum().item(), float(len(each))])
                mine += 1
        scheduler.step()
        dist.all_reduce(meter)
        ter = token_error_rate(model.module, dev, rank, world)
        if rank == 0:
            print(f"epoch {epoch} ctc {meter[0] / meter[1]:.3f} dev error {ter:.3f} batches here {mine} of {len(batches.plan())}", flush=True)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "ctc.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
