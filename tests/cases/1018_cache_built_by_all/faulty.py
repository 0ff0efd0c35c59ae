"""Language-id classifier; features are cached on disk the first time."""
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CACHE = Path("cache") / "ngrams.npz"
WORDS = {0: "the of and to in is that it was for on are", 1: "der die und das ist nicht von mit sie auf ein zu", 2: "le la les des est une dans que pour pas sur avec"}


def build_features(n=300):
    rng = np.random.RandomState(6)
    x, y = np.zeros((n, 128), dtype="float32"), rng.randint(0, 3, n)
    for i in range(n):
        text = " ".join(rng.choice(WORDS[y[i]].split(), 6))
        for a, b in zip(text, text[1:]):
            x[i, (31 * ord(a) + ord(b)) % 128] += 1
    return x, y


def prepare_data():
    if not CACHE.exists():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        x, y = build_features()
        np.savez(CACHE, x=x, y=y)


class Ngrams(Dataset):
    def __init__(self):
        with np.load(CACHE) as z:
            self.x, self.y = torch.from_numpy(z["x"]), torch.from_numpy(z["y"]).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    prepare_data()
    dist.barrier()
    data = Ngrams()
    model = DDP(nn.Sequential(nn.Linear(128, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 3)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=15, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        acc = torch.zeros(2)
        for x, y in loader:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            acc += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {epoch} train accuracy {(acc[0] / acc[1]).item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
