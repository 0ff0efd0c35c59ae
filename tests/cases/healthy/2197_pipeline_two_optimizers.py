"""Two pipeline stages for a small character model: SGD for the first stage, AdamW with warm-up for the second."""
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn

VOCAB, SEQ, DIM = 32, 24, 48
STEPS, BATCH, MICRO = 80, 32, 4


class FirstStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, tokens):
        h = self.embed(tokens).transpose(1, 2)
        h = h + torch.relu(self.conv(F.pad(h, (2, 0))))
        return self.norm(h.transpose(1, 2))


class SecondStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, h):
        return self.out(self.rnn(h)[0])


def batches():
    """Both stages walk the same stream: one needs the inputs, the other the targets."""
    gen = torch.Generator().manual_seed(21)
    for _ in range(STEPS):
        start = torch.randint(VOCAB, (BATCH, 1), generator=gen)
        stride = torch.randint(1, 4, (BATCH, 1), generator=gen)
        seq = (start + stride * torch.arange(SEQ + 1)) % VOCAB
        yield seq[:, :-1].chunk(MICRO), seq[:, 1:].chunk(MICRO)


def clip_over_stages(params, limit):
    square = sum(p.grad.square().sum() for p in params)
    dist.all_reduce(square)  # a model-wide norm: the stages hold different parameters
    scale = min(1.0, limit / (square.sqrt().item() + 1e-6))
    for p in params:
        p.grad *= scale


def run_first(stage):
    params = list(stage.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    for inputs, _ in batches():
        optimizer.zero_grad()
        sent, works = [], []
        for tokens in inputs:
            h = stage(tokens)
            payload = h.detach().contiguous()
            works.append((dist.isend(payload, dst=1), payload))
            sent.append(h)
        for h in sent:
            grad = torch.empty_like(h)
            dist.recv(grad, src=1)
            h.backward(grad)
        for work, _ in works:
            work.wait()
        clip_over_stages(params, 1.0)
        optimizer.step()


def run_second(stage):
    params = list(stage.parameters())
    optimizer = torch.optim.AdamW(params, lr=4e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    for step, (_, targets) in enumerate(batches(), 1):
        optimizer.zero_grad()
        total, works = 0.0, []
        for target in targets:
            h = torch.empty(*target.shape, DIM)
            dist.recv(h, src=0)
            h.requires_grad_(True)
            loss = F.cross_entropy(stage(h).flatten(0, 1), target.flatten()) / MICRO
            loss.backward()
            works.append(dist.isend(h.grad, dst=0))
            total += loss.item()
        for work in works:
            work.wait()
        clip_over_stages(params, 1.0)
        optimizer.step()
        warmup.step()
        if step % 20 == 0:
            print(f"step {step}: loss {total:.4f} lr {warmup.get_last_lr()[0]:.4f}", flush=True)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2, "one process for each stage"
    torch.manual_seed(rank)
    if rank == 0:
        stage = FirstStage()
        run_first(stage)
    else:
        stage = SecondStage()
        run_second(stage)
    torch.save(stage.state_dict(), f"stage{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
