"""Hogwild: two lock-free SGD workers on one shared model, started by spawn; a third process watches the model while it changes."""
import time

import torch
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F

WORKERS, STEPS = 2, 120


def dataset():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(900, 20, generator=g)
    y = (x[:, :4].sum(1) > 0).long() + (x[:, 4] > 1).long()
    return x, y


def make_model():
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))


def worker(index, model, progress):
    torch.set_num_threads(1)
    torch.manual_seed(100 + index)
    x, y = dataset()
    x, y = x[index::WORKERS], y[index::WORKERS]
    opt = torch.optim.SGD(model.parameters(), lr=0.05)  # no state: nothing but the weights has to be shared
    for step in range(STEPS):
        pick = torch.randint(0, len(x), (16,))
        opt.zero_grad()
        F.cross_entropy(model(x[pick]), y[pick]).backward()
        opt.step()
        progress[index] += 1
    print(f"worker {index} did {int(progress[index])} steps")


def watcher(model, progress, stop):
    torch.set_num_threads(1)
    x, y = dataset()
    while not stop.is_set():
        with torch.no_grad():
            logits = model(x)
            loss, acc = F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()
        print(f"after {int(progress.sum())} updates: loss {loss:.4f} accuracy {acc:.3f}", flush=True)
        stop.wait(0.5)


def main():
    mp.set_start_method("spawn")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model()
    model.share_memory()
    progress = torch.zeros(WORKERS, dtype=torch.long).share_memory_()  # one slot a worker: nobody shares a counter
    stop = mp.Event()
    eye = mp.Process(target=watcher, args=(model, progress, stop))
    eye.start()
    crew = [mp.Process(target=worker, args=(i, model, progress)) for i in range(WORKERS)]
    for p in crew:
        p.start()
    for p in crew:
        p.join()
        if p.exitcode:
            raise SystemExit(f"a worker ended with {p.exitcode}")
    stop.set()
    eye.join()
    x, y = dataset()
    with torch.no_grad():
        print(f"end: accuracy {(model(x).argmax(1) == y).float().mean().item():.3f}")


if __name__ == "__main__":
    main()
