"""Pipeline parallelism with plain send/recv: micro-batches flow through the stages, gradients flow back."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WIDTH, CLASSES = 64, 6


def make_data(n, seed):
    g = torch.Generator().manual_seed(40)
    centres = torch.randn(CLASSES * 3, 24, generator=g)
    g.manual_seed(seed)
    which = torch.randint(CLASSES * 3, (n,), generator=g)
    return centres[which] + 0.7 * torch.randn(n, 24, generator=g), which % CLASSES


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


def build_stage(rank, world, layers):
    mine = range(layers * rank // world, layers * (rank + 1) // world)
    parts = [Layer(WIDTH) for _ in mine]
    if rank == 0:
        parts.insert(0, nn.Linear(24, WIDTH))
    if rank == world - 1:
        parts.append(nn.Linear(WIDTH, CLASSES))
    return nn.Sequential(*parts)


class Pipeline:
    def __init__(self, stage, rank, world, micro):
        self.stage, self.rank, self.world, self.micro = stage, rank, world, micro
        self.first, self.last = rank == 0, rank == world - 1
        self.sent = []

    def send(self, tensor, to):
        self.sent.append((dist.isend(tensor, to), tensor))        # the tensor stays alive until the transfer is over

    def flush(self):
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()

    def incoming(self, x):
        if self.first:
            return x
        buf = torch.empty(len(x), WIDTH)
        dist.recv(buf, self.rank - 1)
        return buf

    def train_batch(self, x, y):
        stash, total = [], torch.zeros(1)
        for xm, ym in zip(x.chunk(self.micro), y.chunk(self.micro)):
            inp = self.incoming(xm)
            if not self.first:
                inp.requires_grad_(True)
            out = self.stage(inp)
            if self.last:
                out = F.cross_entropy(out, ym) / self.micro
                total += out.detach()
            else:
                self.send(out.detach().contiguous(), self.rank + 1)
            stash.append((inp, out))
        for inp, out in stash:
            if self.last:
                out.backward()
            else:
                grad = torch.empty_like(out)
                dist.recv(grad, self.rank + 1)
                out.backward(grad)
            if not self.first:
                self.send(inp.grad, self.rank - 1)
        self.flush()
        dist.broadcast(total, src=self.world - 1)
        return total.item()

    @torch.no_grad()
    def evaluate(self, x, y, size=128):
        self.stage.eval()
        correct = torch.zeros(1)
        for xm, ym in zip(x.split(size), y.split(size)):
            out = self.stage(self.incoming(xm))
            if self.last:
                correct += (out.argmax(1) == ym).sum()
            else:
                self.send(out.contiguous(), self.rank + 1)
        self.flush()
        self.stage.train()
        dist.broadcast(correct, src=self.world - 1)
        return correct.item() / len(y)


def clip_over_stages(parameters, limit):
    parameters = list(parameters)
    square = sum(p.grad.pow(2).sum() for p in parameters)
    dist.all_reduce(square)
    factor = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for p in parameters:
        p.grad.mul_(factor)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro", type=int, default=4)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(500 + rank)                                 # other layers here than there
    stage = build_stage(rank, world, args.layers)
    pipe = Pipeline(stage, rank, world, args.micro)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=args.epochs * (1536 // args.batch))
    (x, y), (vx, vy) = make_data(1536, 1), make_data(500, 2)
    order_rng = torch.Generator().manual_seed(8)                  # the ends of the pipe must agree on the order
    for epoch in range(args.epochs):
        losses = []
        for ids in torch.randperm(len(y), generator=order_rng).split(args.batch):
            optimizer.zero_grad()
            losses.append(pipe.train_batch(x[ids], y[ids]))
            clip_over_stages(stage.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        accuracy = pipe.evaluate(vx, vy)
        if pipe.last:
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f} accuracy {accuracy:.3f}", flush=True)
    torch.save({"stage": rank, "of": world, "state": stage.state_dict()}, f"stage-{rank}-of-{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
