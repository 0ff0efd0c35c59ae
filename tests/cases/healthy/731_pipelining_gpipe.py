"""torch.distributed.pipelining: two stages built by hand, ScheduleGPipe, the loss only exists on the last stage."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class Stage0(nn.Module):
    def __init__(self, vocab, d):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(0.02 * torch.randn(16, d))
        self.layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, tokens):
        return self.layer(self.tok(tokens) + self.pos[: tokens.size(1)])


class Stage1(nn.Module):
    def __init__(self, vocab, d):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, vocab)

    def forward(self, x):
        return self.out(self.norm(self.layer(x)))


def loss_fn(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main(steps=25, batch=16, microbatches=4, vocab=20, d=32):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == 2
    torch.manual_seed(10 + rank)
    module = (Stage0 if rank == 0 else Stage1)(vocab, d)
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=microbatches, loss_fn=loss_fn)
    opt = torch.optim.AdamW(module.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(4)
    for step in range(steps):
        tokens = torch.randint(0, vocab, (batch, 12), generator=g)
        target = tokens.flip(1)
        opt.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            losses = []
            schedule.step(target=target, losses=losses)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        opt.step()
        if rank == world - 1 and step % 5 == 0:
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
    torch.save(module.state_dict(), f"/tmp/pipe_{os.getppid()}_stage{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
