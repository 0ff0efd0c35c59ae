"""Asynchronous SGD for an embedding model (skip-gram like) in shared memory."""
import multiprocessing
import time

import torch
import torch.nn as nn

WORDS, TOPICS = 60, 6


class SkipGram(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.centre = nn.Embedding(WORDS, dim)
        self.context = nn.Linear(dim, WORDS, bias=False)

    def forward(self, w):
        return self.context(self.centre(w))


def pairs(gen, n):
    """Words of one topic occur together."""
    topic = torch.randint(0, TOPICS, (n, 1), generator=gen)
    word = torch.randint(0, WORDS // TOPICS, (n, 2), generator=gen) + topic * (WORDS // TOPICS)
    return word[:, 0], word[:, 1]


def loss_on(net, gen, n):
    w, c = pairs(gen, n)
    return nn.functional.cross_entropy(net(w), c)


class Worker(multiprocessing.get_context("fork").Process):
    def __init__(self, number, net, lr, steps, batch):
        super().__init__(name=f"sgd-{number}")
        self.number, self.net, self.lr, self.steps, self.batch = number, net, lr, steps, batch

    def run(self):
        torch.set_num_threads(1)
        gen = torch.Generator().manual_seed(40 + self.number)
        opt = torch.optim.SGD(self.net.parameters(), lr=self.lr)
        for _ in range(self.steps):
            opt.zero_grad(set_to_none=False)
            loss_on(self.net, gen, self.batch).backward()
            opt.step()


def suggest_lr(net, gen):
    """Inverse of the gradient norm of one large batch, within bounds."""
    loss_on(net, gen, 2000).backward()
    norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm().item()
    net.zero_grad(set_to_none=True)
    return min(2.0, max(0.5, 0.5 / norm))


def main(num_workers=2, steps=400, batch=32):
    torch.set_num_threads(1)
    torch.manual_seed(8)
    net = SkipGram()
    lr = suggest_lr(net, torch.Generator().manual_seed(1))
    net.share_memory()

    workers = [Worker(k, net, lr, steps, batch) for k in range(num_workers)]
    t0 = time.perf_counter()
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    failed = [w.name for w in workers if w.exitcode != 0]
    if failed:
        raise SystemExit(f"failed: {failed}")

    with torch.no_grad():
        final = loss_on(net, torch.Generator().manual_seed(2), 4000).item()
    print(f"lr {lr:.2f}, {num_workers} workers x {steps} steps in {time.perf_counter() - t0:.1f} s, loss {final:.4f}")
    torch.save(net.state_dict(), "skipgram.pt")


if __name__ == "__main__":
    main()
