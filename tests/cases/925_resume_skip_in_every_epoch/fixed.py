"""Instruction tuning of a small GRU with checkpoints in the middle of an epoch."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

PAD, VOCAB = 0, 30


class Instructions(Dataset):
    """Prompt: op and digits; answer: the digits reversed or sorted. Loss on the answer only."""

    def __init__(self, n=320, digits=5):
        g = torch.Generator().manual_seed(44)
        op = torch.randint(0, 2, (n, 1), generator=g)
        d = torch.randint(3, VOCAB, (n, digits), generator=g)
        answer = torch.where(op == 0, d.flip(1), d.sort(1).values)
        self.ids = torch.cat([op + 1, d, answer], 1)
        self.labels = self.ids.clone()
        self.labels[:, :digits + 1] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return self.ids[i], self.labels[i]


class GRULM(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.out(self.gru(self.emb(ids))[0])


def lm_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def job(args, rank, data, path, stop_at):
    torch.manual_seed(0)
    net = GRULM()
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    completed, starting_epoch, resume_step = 0, 0, None
    if os.path.exists(path):
        state = torch.load(path, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        completed = state["completed"]
        starting_epoch, resume_step = divmod(completed, len(loader))

    for epoch in range(starting_epoch, args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for step, (ids, labels) in enumerate(loader):
            if epoch == starting_epoch and resume_step is not None and step < resume_step:
                continue  # seen before the interruption
            loss = lm_loss(model(ids), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            completed += 1
            total += torch.tensor([loss.item(), 1.0])
            if completed == stop_at:  # time limit of the job
                if rank == 0:
                    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "completed": completed},
                               path)
                dist.barrier()
                return completed
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f} after {completed} steps", flush=True)
    return completed


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=2)
    ap.add_argument("--job-steps", type=int, default=16)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    data = Instructions()
    job(args, rank, data, "state.pt", stop_at=args.job_steps)
    done = job(args, rank, data, "state.pt", stop_at=-1)
    if rank == 0:
        print(f"finished after {done} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
