import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class DeepRanker(nn.Module):
    def __init__(self, fields=20, width=24, depth=24):
        super().__init__()
        self.stem = nn.Linear(fields, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        return self.score(self.blocks(self.stem(x))).squeeze(-1)


class Dashboard:
    """Keeps per-tensor gradient norms and writes one json line per report."""

    def __init__(self, path, rank, world, every):
        self.rank, self.world, self.every = rank, world, every
        self.history = {}
        self.file = open(path, "w") if rank == 0 else None

    def observe(self, model):
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            norm = p.grad.detach().norm()
            self.history[name] = 0.9 * self.history.get(name, 0.0) + 0.1 * norm.item()

    def report(self, step, loss):
        if self.file is not None:
            top = sorted(self.history.items(), key=lambda kv: -kv[1])[:3]
            self.file.write(json.dumps({"step": step, "loss": loss, "largest": top}) + "\n")

    def close(self):
        if self.file is not None:
            self.file.close()


def pairs(gen, teacher, batch):
    a = torch.randn(batch, 20, generator=gen)
    b = torch.randn(batch, 20, generator=gen)
    sa = torch.tanh(a @ teacher[:, 0]) + 0.3 * a @ teacher[:, 1]
    sb = torch.tanh(b @ teacher[:, 0]) + 0.3 * b @ teacher[:, 1]
    return a, b, (sa > sb).float()


def main(steps=200, batch=64, every=40):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    teacher = torch.randn(20, 2)
    model = DDP(DeepRanker())
    opt = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
    gen = torch.Generator().manual_seed(10_000 + rank)
    board = Dashboard("grad_norms.jsonl", rank, world, every)

    tally = torch.zeros(3)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        a, b, better = pairs(gen, teacher, batch)
        scores = model(torch.cat([a, b]))
        margin = scores[:batch] - scores[batch:]
        loss = nn.functional.binary_cross_entropy_with_logits(margin, better)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        board.observe(model.module)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        tally += torch.tensor([loss.item(), ((margin > 0).float() == better).float().mean().item(), 1.0])
        if step % every == 0:
            dist.all_reduce(tally)
            mean_loss, acc = (tally[:2] / tally[2]).tolist()
            board.report(step, mean_loss)
            if rank == 0:
                pace = step / (time.perf_counter() - began)
                print(f"step {step} loss {mean_loss:.4f} pair acc {acc:.3f} {pace:.1f} steps/s", flush=True)
            tally.zero_()
    board.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
