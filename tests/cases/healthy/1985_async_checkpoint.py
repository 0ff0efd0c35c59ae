"""Training that survives preemption: a background thread writes checkpoints, a run resumes in the middle of an epoch.

The script plays both parts: a first run is cut off at step 37, a second one resumes from the last checkpoint (step 30)
and must see the same batches, dropout masks and losses in steps 31 to 37.
"""
import copy
import os
import queue
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH, TOTAL_STEPS, SAVE_EVERY, CHECKPOINT = 32, 80, 15, "ckpt/latest.pt"


class ResumableSampler(Sampler):
    """Distributed, shuffled anew in each epoch; can start at any batch of an epoch."""

    def __init__(self, size, batch, rank, world, seed):
        self.size, self.batch, self.rank, self.world, self.seed = size, batch, rank, world, seed
        self.epoch, self.start_batch = 0, 0

    @property
    def batches_per_epoch(self):
        return self.size // (self.batch * self.world)

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        usable = order[: self.batches_per_epoch * self.batch * self.world]
        yield from usable[self.rank::self.world][self.start_batch * self.batch:].tolist()

    def __len__(self):
        return (self.batches_per_epoch - self.start_batch) * self.batch


class AsyncWriter:
    """Writes states in a thread, one at a time, each under a temporary name first. The thread does no collectives."""

    def __init__(self, path):
        self.path, self.queue, self.error = path, queue.Queue(maxsize=1), None
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.thread = threading.Thread(target=self._loop, name="checkpoint-writer", daemon=True)
        self.thread.start()

    def _loop(self):
        while (state := self.queue.get()) is not None:
            try:
                torch.save(state, self.path + ".tmp")
                os.replace(self.path + ".tmp", self.path)
            except OSError as error:
                self.error = error

    def submit(self, state):
        # The training loop goes on to change its tensors in place: the thread gets a copy.
        self.queue.put(copy.deepcopy(state))

    def close(self):
        self.queue.put(None)
        self.thread.join()
        if self.error is not None:
            raise self.error


class Run:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        x, y = self.make_data()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(12, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 96), nn.ReLU(),
                                   nn.Dropout(0.2), nn.Linear(96, 4))
        self.ddp = DDP(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=4e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=TOTAL_STEPS)
        self.sampler = ResumableSampler(len(x), BATCH, self.rank, self.world, seed=60)
        # With a generator of its own the loader leaves the global one, which the dropout uses, alone.
        self.loader = DataLoader(TensorDataset(x, y), BATCH, sampler=self.sampler, generator=torch.Generator())
        self.step = 0
        torch.manual_seed(1000 + self.rank)
        self.writer = AsyncWriter(CHECKPOINT) if self.rank == 0 else None

    @staticmethod
    def make_data(n=1600):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(n, 12, generator=g)
        w = torch.randn(12, 4, generator=g)
        return x, (x @ w + 0.5 * (x ** 2) @ w.roll(1, 0) + 0.3 * torch.randn(n, 4, generator=g)).argmax(1)

    def checkpoint(self):
        rng = [None] * self.world if self.rank == 0 else None
        dist.gather_object(torch.get_rng_state(), rng, dst=0)  # in the main thread of every process
        if self.rank == 0:
            self.writer.submit({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                                "scheduler": self.scheduler.state_dict(), "step": self.step, "rng": rng})

    def resume(self):
        state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"][self.rank])

    def batches(self):
        while True:
            self.sampler.epoch, self.sampler.start_batch = divmod(self.step, self.sampler.batches_per_epoch)
            yield from self.loader

    def train(self, until):
        """Returns this process's losses by step."""
        losses, window = {}, torch.zeros(2)
        stream = self.batches()
        while self.step < until:
            x, y = next(stream)
            loss = nn.functional.cross_entropy(self.ddp(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses[self.step] = loss.item()
            window += torch.tensor([loss.item(), 1.0])
            if self.step % SAVE_EVERY == 0:
                self.checkpoint()
                dist.all_reduce(window)
                if self.rank == 0:
                    print(f"step {self.step} (epoch {self.sampler.epoch}) loss {window[0] / window[1]:.4f} "
                          f"lr {self.scheduler.get_last_lr()[0]:.2e}", flush=True)
                window.zero_()
        return losses

    def close(self):
        if self.writer is not None:
            self.writer.close()
        dist.barrier()  # the last checkpoint is on disk before anybody reads it


def main():
    dist.init_process_group("gloo")
    first = Run()
    lost = first.train(until=37)
    first.close()
    del first

    second = Run()
    second.resume()
    if second.rank == 0:
        print(f"resuming at step {second.step}", flush=True)
    again = second.train(until=TOTAL_STEPS)
    second.close()

    # Each process looks after its own losses.
    replayed = sorted(set(lost) & set(again))
    worst = max(abs(lost[s] - again[s]) for s in replayed)
    if worst > 1e-5:
        raise RuntimeError(f"rank {second.rank}: losses of replayed steps differ by {worst:.2e}")
    print(f"[rank {second.rank}] steps {replayed[0]}-{replayed[-1]} replayed, largest difference {worst:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
