"""Classifier training over a resumable sharded stream; the job is cut into two sessions."""
import argparse
import logging
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger("stream")


class ShardedLoader:
    """Walks the files of one rank in a shuffled order; the state says exactly where it stands."""

    def __init__(self, files, rank, world, batch, seed):
        self.files = files[rank::world]
        self.batch = batch
        self.gen = torch.Generator().manual_seed(seed * 1009 + rank)
        self.order, self.cursor = [], 0

    def state_dict(self):
        return {"files": list(self.files), "order": list(self.order), "cursor": self.cursor, "gen": self.gen.get_state()}

    def load_state_dict(self, state):
        self.files, self.order, self.cursor = list(state["files"]), list(state["order"]), state["cursor"]
        self.gen.set_state(state["gen"])

    def _refill(self):
        n = sum(len(torch.load(f)["y"]) for f in self.files)
        self.order = torch.randperm(n, generator=self.gen).tolist()
        self.cursor = 0

    def __iter__(self):
        blobs = [torch.load(f) for f in self.files]
        x, y = torch.cat([b["x"] for b in blobs]), torch.cat([b["y"] for b in blobs])
        while True:
            if self.cursor + self.batch > len(self.order):
                self._refill()
            idx = self.order[self.cursor: self.cursor + self.batch]
            self.cursor += self.batch
            yield x[idx], y[idx]


def write_shards(folder, n_files, per_file, dim, classes):
    folder.mkdir(parents=True, exist_ok=True)
    centers = 1.2 * torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    for i in range(n_files):
        g = torch.Generator().manual_seed(50 + i)
        y = torch.randint(classes, (per_file,), generator=g)
        torch.save({"x": centers[y] + torch.randn(per_file, dim, generator=g), "y": y}, folder / f"shard{i:03d}.pt")


class Session:
    def __init__(self, args, rank, world):
        self.rank, self.world = rank, world
        self.path = pathlib.Path("ckpt/latest.pt")
        files = sorted(pathlib.Path("data").glob("shard*.pt"))
        self.loader = ShardedLoader(files, rank, world, args.batch, args.seed)
        torch.manual_seed(args.seed)
        self.model = DDP(nn.Sequential(nn.Linear(args.dim, 64), nn.ReLU(), nn.Linear(64, args.classes)))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.step = 0

    def save(self):
        world = self.world
        states = [None] * world
        dist.all_gather_object(states, self.loader.state_dict())
        if self.rank == 0:
            self.path.parent.mkdir(exist_ok=True)
            tmp = self.path.with_suffix(".tmp")
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "step": self.step,
                        "loader": states}, tmp)
            tmp.replace(self.path)
        dist.barrier()

    def maybe_resume(self):
        if not self.path.exists():
            return
        ck = torch.load(self.path, weights_only=False)
        self.model.module.load_state_dict(ck["model"])
        self.opt.load_state_dict(ck["opt"])
        self.step = ck["step"]
        self.loader.load_state_dict(ck["loader"][self.rank])
        log.info("resumed at step %d", self.step)

    def run(self, until, every):
        self.maybe_resume()
        meter = torch.zeros(3)
        it = iter(self.loader)
        while self.step < until:
            x, y = next(it)
            out = self.model(x)
            loss = nn.functional.cross_entropy(out, y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            meter += torch.stack([loss.detach() * len(y), (out.argmax(1) == y).sum().float(), torch.tensor(float(len(y)))])
            if self.step % every == 0:
                dist.all_reduce(meter)
                log.info("step %d loss %.4f acc %.3f", self.step, meter[0] / meter[2], meter[1] / meter[2])
                meter = torch.zeros(3)
        self.save()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--classes", type=int, default=8)
    p.add_argument("--seed", type=int, default=6)
    p.add_argument("--session-steps", type=int, default=100)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(name)s %(message)s")
    if rank == 0:
        write_shards(pathlib.Path("data"), 6, 160, args.dim, args.classes)
        pathlib.Path("ckpt/latest.pt").unlink(missing_ok=True)
    dist.barrier()
    for session in (1, 2):
        Session(args, rank, world).run(session * args.session_steps, 25)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
