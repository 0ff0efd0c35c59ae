"""Character model trained in two sittings: a SIGUSR1 on rank 0 ends the first, the second goes on from the last checkpoint."""
import atexit
import os
import signal
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LAST = "run/last.pt"


class Addition(Dataset):
    """'a+b=c' with two digits each, as characters."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        a, b = divmod(int(self.numbers[i]), 50)
        text = f"{a:02d}+{b:02d}={f'{a + b:03d}'[::-1]}"
        return torch.tensor(["0123456789+=".index(c) for c in text])


class CharModel(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(12, dim)
        self.rnn = nn.LSTM(dim, 96, batch_first=True)
        self.drop = nn.Dropout(0.05)
        self.out = nn.Linear(96, 12)

    def forward(self, x):
        return self.out(self.drop(self.rnn(self.emb(x))[0]))


class Stop:
    """Asked for by a signal or by the clock; rank 0 decides for all."""

    def __init__(self, seconds):
        self.deadline = time.time() + seconds
        self.asked = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self.asked.set())

    def __call__(self):
        mine = self.asked.is_set() or time.time() > self.deadline
        flag = torch.tensor([int(mine)])
        dist.broadcast(flag, src=0)
        return bool(flag)


class Trainer:
    def __init__(self, train, test, seed=0):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.model = DDP(CharModel())
        torch.manual_seed(1000 * (seed + 1) + self.rank)
        self.sampler = DistributedSampler(train, seed=seed, drop_last=True)
        self.loader = DataLoader(train, batch_size=32, sampler=self.sampler, drop_last=True)
        self.test = test
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        self.sched = torch.optim.lr_scheduler.LinearLR(self.opt, 0.1, 1.0, total_iters=30)
        self.epoch, self.batch, self.step = 0, 0, 0

    def save(self):
        rng = [None] * self.world
        dist.all_gather_object(rng, torch.get_rng_state())
        if self.rank == 0:
            os.makedirs("run", exist_ok=True)
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                        "at": (self.epoch, self.batch, self.step), "rng": rng}, LAST + ".tmp")
            os.replace(LAST + ".tmp", LAST)
        dist.barrier()

    def resume(self):
        if not os.path.exists(LAST):
            return
        state = torch.load(LAST, map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.epoch, self.batch, self.step = state["at"]
        torch.set_rng_state(state["rng"][self.rank])
        if self.rank == 0:
            print(f"resumed at epoch {self.epoch} batch {self.batch} step {self.step}", flush=True)

    def fit(self, epochs, stop, poke_at=None):
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            skip = self.batch
            state = torch.get_rng_state()
            batches = iter(self.loader)
            torch.set_rng_state(state)
            for i, x in enumerate(batches):
                if i < skip:
                    continue
                loss = F.cross_entropy(self.model(x[:, :-1])[:, 5:].flatten(0, 1), x[:, 6:].flatten())
                self.opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.sched.step()
                self.step += 1
                self.batch = i + 1
                if self.step == poke_at and self.rank == 0:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if self.step % 5 == 0 and stop():
                    self.save()
                    return False
            self.epoch, self.batch = self.epoch + 1, 0
            acc = self.evaluate()
            if self.rank == 0:
                print(f"epoch {self.epoch} step {self.step} loss {loss.item():.3f} exact {acc:.3f}", flush=True)
            self.save()
        return True

    @torch.no_grad()
    def evaluate(self):
        net = self.model.module.eval()
        x = torch.stack([self.test[i] for i in range(self.rank, len(self.test), self.world)])
        right = (net(x[:, :-1])[:, 5:].argmax(-1) == x[:, 6:]).all(1).float()
        acc = torch.tensor([right.sum().item(), len(right)])
        dist.all_reduce(acc)
        net.train()
        return (acc[0] / acc[1]).item()


def main():
    dist.init_process_group("gloo")
    atexit.register(dist.destroy_process_group)
    torch.set_num_threads(1)
    if dist.get_rank() == 0 and os.path.exists(LAST):
        os.remove(LAST)
    dist.barrier()
    order = np.random.default_rng(0).permutation(2500)
    train, test = Addition(order[:2000]), Addition(order[2000:])
    first = Trainer(train, test)
    done = first.fit(6, Stop(60), poke_at=77)
    if not done:
        second = Trainer(train, test)
        second.resume()
        done = second.fit(6, Stop(60))
    if dist.get_rank() == 0:
        print("finished" if done else "out of time")


if __name__ == "__main__":
    main()
