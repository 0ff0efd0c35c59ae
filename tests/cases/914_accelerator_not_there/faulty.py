"""Character model, written for any accelerator."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

TEXT = ("the cat sat on the mat and the dog lay by the door while rain fell on the roof all night long ") * 20


class Windows(Dataset):
    def __init__(self, text, width=24):
        self.chars = sorted(set(text))
        code = {c: i for i, c in enumerate(self.chars)}
        self.ids = torch.tensor([code[c] for c in text])
        self.width = width

    def __len__(self):
        return (len(self.ids) - 1) // self.width

    def __getitem__(self, i):
        at = i * self.width
        return self.ids[at:at + self.width], self.ids[at + 1:at + 1 + self.width]


class CharGRU(nn.Module):
    def __init__(self, vocab, dim=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.head(h)


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    acc = torch.accelerator.current_accelerator()
    device_type = acc.type if acc is not None else "cpu"
    backend = dist.get_default_backend_for_device(device_type)
    dist.init_process_group(backend)
    if device_type == "cpu":
        return torch.device("cpu"), None
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device_type, local_rank), [local_rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=4)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    device, device_ids = setup()
    rank = dist.get_rank()
    torch.manual_seed(6)
    data = Windows(TEXT)
    model = DDP(CharGRU(len(data.chars)).to(device), device_ids=device_ids)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {total.item() / len(loader) / dist.get_world_size():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
