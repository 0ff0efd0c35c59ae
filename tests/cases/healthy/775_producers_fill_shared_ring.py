"""Producers (processes of our own) generate samples into a ring buffer in shared memory; the parent trains. Nobody else trains, so nothing has to be
shared but the ring."""
import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

SLOTS, B, D = 6, 32, 12


def produce(seed, ring_x, ring_y, free, full, n):
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(D, generator=torch.Generator().manual_seed(0))
    for _ in range(n):
        slot = free.get()
        x = torch.randn(B, D, generator=g)
        ring_x[slot].copy_(x)
        ring_y[slot].copy_((x @ w > 0).float())
        full.put(slot)


def main():
    ctx = mp.get_context("spawn")
    torch.set_num_threads(1)
    ring_x = torch.zeros(SLOTS, B, D).share_memory_()
    ring_y = torch.zeros(SLOTS, B).share_memory_()
    free, full = ctx.Queue(), ctx.Queue()
    for s in range(SLOTS):
        free.put(s)
    steps = 80
    workers = [ctx.Process(target=produce, args=(s, ring_x, ring_y, free, full, steps // 2), daemon=True) for s in (1, 2)]
    for w in workers:
        w.start()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    avg = None
    for it in range(steps):
        slot = full.get()
        x, y = ring_x[slot].clone(), ring_y[slot].clone()       # copy out before the slot is given back
        free.put(slot)
        loss = F.binary_cross_entropy_with_logits(net(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        avg = loss.item() if avg is None else 0.9 * avg + 0.1 * loss.item()
        if it % 20 == 19:
            print(f"step {it + 1}: {avg:.3f}", flush=True)
    for w in workers:
        w.join()


if __name__ == "__main__":
    main()
