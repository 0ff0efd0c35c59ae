"""Lock-free training of a shared softmax classifier while another process watches the test error."""
import argparse
import time

import torch
import torch.multiprocessing as mp
from torch import nn


class Classifier(nn.Module):
    def __init__(self, inputs=20, classes=5):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 40), nn.ReLU(), nn.Linear(40, classes))

    def forward(self, x):
        return self.net(x)


def draw(n, gen):
    x = torch.randn(n, 20, generator=gen)
    return x, x[:, :5].cumsum(1).argmax(1)


def train(number, model, counter, args):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(args.seed + 1000 * (number + 1))
    # one plain SGD per process: it keeps no state, and set_to_none makes the gradients private
    opt = torch.optim.SGD(model.parameters(), lr=args.lr)
    while True:
        with counter.get_lock():
            if counter.value >= args.updates:
                return
            counter.value += 1
        x, y = draw(args.batch, gen)
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


def watch(model, counter, args, history):
    torch.set_num_threads(1)
    x, y = draw(2000, torch.Generator().manual_seed(5))
    while counter.value < args.updates:
        with torch.no_grad():
            snapshot = {k: v.clone() for k, v in model.state_dict().items()}
            frozen = Classifier()
            frozen.load_state_dict(snapshot)
            acc = (frozen(x).argmax(1) == y).float().mean().item()
        history.put((counter.value, acc))
        time.sleep(args.pause)
    history.put(None)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--updates", type=int, default=1500)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.15)
    ap.add_argument("--pause", type=float, default=0.3)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    ctx = mp.get_context("spawn")
    model = Classifier().share_memory()
    counter, history = ctx.Value("l", 0), ctx.SimpleQueue()
    crew = [ctx.Process(target=train, args=(n, model, counter, args)) for n in range(args.workers)]
    crew.append(ctx.Process(target=watch, args=(model, counter, args, history)))
    for p in crew:
        p.start()
    while (entry := history.get()) is not None:
        print(f"after {entry[0]} updates: accuracy {entry[1]:.3f}", flush=True)
    for p in crew:
        p.join()
        assert p.exitcode == 0, p.exitcode
    x, y = draw(2000, torch.Generator().manual_seed(5))
    with torch.no_grad():
        print(f"end: accuracy {(model(x).argmax(1) == y).float().mean().item():.3f}")
    torch.save(model.state_dict(), "classifier.pt")


if __name__ == "__main__":
    main()
