"""Local SGD: two sites train on their own scans and average their networks every few steps."""
import argparse
import itertools
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

SITES, EDGE = 2, 14


def scans(rng, scanner):
    """Images of discs, rings and bars; every scanner has a brightness and contrast of its own."""
    n = len(scanner)
    yy, xx = np.mgrid[:EDGE, :EDGE]
    label = rng.integers(0, 3, n)
    cy, cx = rng.uniform(4, EDGE - 4, (2, n, 1, 1))
    d = np.sqrt((yy - cy) ** 2 + (xx - cx) ** 2)
    image = np.where(label[:, None, None] == 0, d < 3, np.where(label[:, None, None] == 1, np.abs(d - 3) < 1, np.abs(yy - cy) < 1))
    scanner = scanner[:, None, None]
    image = image * (1.0 + 0.2 * scanner) + 0.25 * scanner + 0.4 * rng.standard_normal(image.shape)
    return {"image": image[:, None].astype(np.float32), "label": label}


def write_scans(folder, n=320):
    rng = np.random.default_rng(17)
    for site in range(SITES):
        np.savez(os.path.join(folder, f"site{site}.npz"), **scans(rng, np.full(n, site)))
    np.savez(os.path.join(folder, "test.npz"), **scans(rng, rng.permutation(np.arange(160) % SITES)))


def load(folder, name):
    with np.load(os.path.join(folder, name)) as f:
        return torch.from_numpy(f["image"]), torch.from_numpy(f["label"])


def convnet(c=16):
    def layer(cin, cout):
        return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(layer(1, c), layer(c, 2 * c), nn.Flatten(), nn.Linear(2 * c * (EDGE // 4) ** 2, 3))


@torch.no_grad()
def average(net):
    for t in itertools.chain(net.parameters(), (b for b in net.buffers() if b.is_floating_point())):
        dist.all_reduce(t)
        t /= SITES


def batches(image, label, size, gen):
    order = torch.randperm(len(label), generator=gen)
    for part in order.split(size):
        yield image[part], label[part]


@torch.no_grad()
def accuracy(net, image, label):
    net.eval()
    right = torch.tensor([(net(image).argmax(1) == label).sum().item(), len(label)], dtype=torch.float64)
    dist.all_reduce(right)
    net.train()
    return (right[0] / right[1]).item()


def site_main(rank, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.folder}/rendezvous", rank=rank, world_size=SITES)
    torch.manual_seed(args.seed)
    net = convnet()
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    image, label = load(args.folder, f"site{rank}.npz")
    test = [t.chunk(SITES)[rank] for t in load(args.folder, "test.npz")]
    gen = torch.Generator().manual_seed(args.seed + 100 + rank)
    steps = itertools.count(1)

    for epoch in range(args.epochs):
        total, count = torch.zeros(1), 0
        for x, y in batches(image, label, args.batch, gen):
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total, count = total + loss.detach(), count + 1
            if next(steps) % args.every == 0:
                average(net)
        score = accuracy(net, *test)
        dist.all_reduce(total)
        if rank == 0:
            print(f"round {epoch}: loss {total.item() / count / SITES:.4f}, test accuracy {score:.3f}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), os.path.join(args.folder, "global.pt"))
    dist.barrier()
    dist.destroy_process_group()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--every", type=int, default=5, help="local steps between two averages")
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--folder", default=os.path.abspath("work"))
    args = ap.parse_args()
    os.makedirs(args.folder, exist_ok=True)
    write_scans(args.folder)
    ctx = mp.get_context("spawn")
    sites = [ctx.Process(target=site_main, args=(rank, args)) for rank in range(SITES)]
    for p in sites:
        p.start()
    for p in sites:
        p.join()
    if any(p.exitcode for p in sites):
        raise SystemExit(f"a site failed: {[p.exitcode for p in sites]}")


if __name__ == "__main__":
    main()
