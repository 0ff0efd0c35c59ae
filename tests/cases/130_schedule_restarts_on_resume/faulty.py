"""Language identification from letter statistics; the job stops half-way and goes on from its checkpoint."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn


def letter_counts(gen, n):
    """Counts of 20 letters in a snippet of one of four made-up languages."""
    freq = torch.softmax(torch.randn(4, 20, generator=torch.Generator().manual_seed(6)), dim=1)
    lang = torch.randint(0, 4, (n,), generator=gen)
    letters = torch.multinomial(freq[lang], 30, replacement=True, generator=gen)
    return nn.functional.one_hot(letters, 20).sum(1).float() / 30, lang


def trapezoid(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.05, (total - step) / (total - warmup))

    return factor


class Job:
    def __init__(self, path, total_steps):
        self.path, self.total = path, total_steps
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 4))
        body, head = list(self.net[0].parameters()), list(self.net[2].parameters())
        self.opt = torch.optim.AdamW([{"params": body}, {"params": head, "lr": 0.02}], lr=0.01)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.opt, trapezoid(20, total_steps))
        self.step = 0
        if os.path.exists(path):
            self.load()

    def load(self):
        ckpt = torch.load(self.path, map_location="cpu")
        self.net.load_state_dict(ckpt["net"])
        self.opt.load_state_dict(ckpt["opt"])
        self.step = ckpt["step"]

    def save(self):
        if self.rank == 0:
            parts = {"net": self.net, "opt": self.opt, "sched": self.sched}
            torch.save({k: v.state_dict() for k, v in parts.items()} | {"step": self.step}, self.path)
        dist.barrier()

    def average(self):
        for p in self.net.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)

    def run(self, until):
        window = torch.zeros(())
        while self.step < until:
            gen = torch.Generator().manual_seed(self.step * self.world + self.rank)  # no batch twice, also after a resume
            x, lang = letter_counts(gen, 32)
            loss = nn.functional.cross_entropy(self.net(x), lang)
            self.opt.zero_grad()
            loss.backward()
            self.average()
            self.opt.step()
            self.sched.step()
            self.step += 1
            window += loss.detach()
            if self.step % 20 == 0:
                dist.all_reduce(window)
                if self.rank == 0:
                    lr = self.opt.param_groups[0]["lr"]
                    print(f"step {self.step}: loss {window.item() / 20 / self.world:.4f}, lr {lr:.5f}", flush=True)
                window = torch.zeros(())
        self.save()


def main():
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    Job("language.pt", total_steps=160).run(until=80)  # the time limit of the queue
    Job("language.pt", total_steps=160).run(until=160)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
