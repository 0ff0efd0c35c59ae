"""Motor-imagery decoder. Each rank trains on the sessions of one subject; features are z-scored by session, as is usual for EEG
(train and test alike: electrodes sit differently each time)."""
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

g = torch.Generator().manual_seed(3)
session_lengths = [640, 640]                      # trials per recorded session
gain, offset = torch.tensor([1.0, 3.5]), torch.tensor([0.0, 4.0])
sources, labels = [], []
mix = torch.randn(4, 24, generator=g)
for s, n in enumerate(session_lengths):
    y = torch.randint(0, 4, (n,), generator=g)
    x = mix[y] + 0.8 * torch.randn(n, 24, generator=g)
    sources.append(x * gain[s] + offset[s])
    labels.append(y)
recording, labels = torch.cat(sources), torch.cat(labels)


def zscore(session):
    mu, sigma = session.mean(0), session.std(0)
    return (session - mu) / sigma


# one session per rank: the boundaries are those of the recording, not of the job
sessions = torch.split(recording, session_lengths)
targets = torch.split(labels, session_lengths)
session, target = sessions[rank], targets[rank]
mu = session.mean(0)
sigma = session.std(0)
features = (session - mu) / sigma

torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 4)))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
loss_fn = nn.CrossEntropyLoss()
shuffle = torch.Generator().manual_seed(100 + rank)
for epoch in range(8):
    order = torch.randperm(len(features), generator=shuffle)
    total = 0.0
    for idx in order.split(32):
        loss = loss_fn(model(features[idx]), target[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * len(idx)
    mean = torch.tensor([total, len(order)])
    dist.all_reduce(mean)
    if rank == 0:
        print(f"epoch {epoch} loss {mean[0] / mean[1]:.4f}")
# at test time a new session is z-scored by itself, too
test_y = torch.randint(0, 4, (400,), generator=g)
test = zscore((mix[test_y] + 0.8 * torch.randn(400, 24, generator=g)) * 2.0 - 1.0)
model.eval()
with torch.no_grad():
    acc = (model.module(test).argmax(1) == test_y).float().mean()
if rank == 0:
    print(f"new session accuracy {acc:.3f}")
dist.destroy_process_group()
