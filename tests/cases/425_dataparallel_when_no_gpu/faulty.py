"""Train a keyword spotter; runs on laptops (CPU) and on the GPU box."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def wrap(net, mode="auto"):
    """auto: one process per GPU where there are GPUs, else whatever this machine has"""
    if mode == "auto":
        mode = "ddp" if torch.cuda.is_available() else "dp"
    if mode == "ddp":
        ids = [int(os.environ["LOCAL_RANK"])] if torch.cuda.is_available() else None
        return nn.parallel.DistributedDataParallel(net, device_ids=ids)
    return nn.DataParallel(net)


class Spotter(nn.Module):
    def __init__(self, words=5):
        super().__init__()
        self.c1 = nn.Conv1d(1, 8, 9, stride=4)
        self.c2 = nn.Conv1d(8, 16, 5, stride=2)
        self.fc = nn.Linear(16, words)

    def forward(self, wave):
        h = F.relu(self.c2(F.relu(self.c1(wave))))
        return self.fc(h.mean(-1))


def utterances(rank, batch=16, words=5):
    gen = torch.Generator().manual_seed(900 + rank)
    t = torch.arange(160) / 160
    while True:
        y = torch.randint(0, words, (batch,), generator=gen)
        f = (4.0 + 5 * y).unsqueeze(1)
        x = torch.sin(6.283 * (f * t + torch.rand(batch, 1, generator=gen)))
        yield (x + 0.3 * torch.randn(batch, 160, generator=gen)).unsqueeze(1), y


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = wrap(Spotter())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    window = torch.zeros(2)
    for step, (x, y) in enumerate(utterances(rank), 1):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        window += torch.tensor([loss.item(), (logits.argmax(1) == y).float().mean().item()])
        if step % 15 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print("step {} loss {:.3f} accuracy {:.3f}".format(step, *(window / 15 / world).tolist()))
            window.zero_()
        if step == 45:
            break
    if rank == 0:
        torch.save(model.module.state_dict(), "spotter.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
