"""Two-stage pipeline (fill and drain) for a sensor autoencoder, several pipeline rounds per optimizer step."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

SENSORS, LATENT, HIDDEN = 40, 8, 64


def build_stage(stage):
    torch.manual_seed(21 + stage)
    if stage == 0:
        return nn.Sequential(nn.Linear(SENSORS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, LATENT))
    return nn.Sequential(nn.Tanh(), nn.Linear(LATENT, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, SENSORS))


class SensorStream:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        tg = torch.Generator().manual_seed(3)
        self.mix = torch.randn(5, SENSORS, generator=tg)

    def next(self, n):
        z = torch.randn(n, 5, generator=self.gen)
        return torch.sin(z @ self.mix * 0.5) + 0.02 * torch.randn(n, SENSORS, generator=self.gen)


class PipelineTrainer:
    def __init__(self, args):
        self.args = args
        self.stage = dist.get_rank()
        self.peer = 1 - self.stage
        self.module = build_stage(self.stage)
        self.opt = torch.optim.SGD(self.module.parameters(), lr=args.lr, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, args.steps)
        self.stream = SensorStream(1234)

    def pipeline_round(self, batch):
        micros = batch.chunk(self.args.n_micro)
        if self.stage == 0:
            outs = []
            for mb in micros:
                out = self.module(mb)
                dist.send(out.detach(), self.peer)
                outs.append(out)
            for out in outs:
                grad = torch.empty_like(out)
                dist.recv(grad, self.peer)
                out.backward(grad)
            total = torch.zeros(())
        else:
            saved = []
            for mb in micros:
                act = torch.empty(len(mb), LATENT)
                dist.recv(act, self.peer)
                act.requires_grad_(True)
                saved.append((act, nn.functional.mse_loss(self.module(act), mb)))
            total = torch.zeros(())
            for act, loss in saved:
                loss.backward()
                dist.send(act.grad, self.peer)
                total += loss.detach()
        return total / len(micros)

    def scale_grads(self, factor):
        for p in self.module.parameters():
            p.grad.div_(factor)

    def train_step(self):
        self.opt.zero_grad()
        loss = torch.zeros(())
        for _ in range(self.args.rounds):
            batch = self.stream.next(self.args.n_micro * self.args.micro_size)
            loss += self.pipeline_round(batch)
        self.scale_grads(self.args.n_micro)
        self.scale_grads(self.args.rounds)
        self.opt.step()
        self.sched.step()
        return loss / self.args.rounds

    def grad_norm(self):
        sq = sum(p.grad.pow(2).sum() for p in self.module.parameters())
        dist.all_reduce(sq)
        return sq.sqrt().item()

    @torch.no_grad()
    def evaluate(self, n=1024):
        x = SensorStream(777).next(n)
        err = torch.zeros(())
        if self.stage == 0:
            dist.send(self.module(x), self.peer)
        else:
            act = torch.empty(n, LATENT)
            dist.recv(act, self.peer)
            err = nn.functional.mse_loss(self.module(act), x)
        dist.broadcast(err, 1)
        return err.item()

    def fit(self):
        for step in range(self.args.steps):
            loss = self.train_step()
            if step % 50 == 0 or step == self.args.steps - 1:
                norm = self.grad_norm()
                if self.stage == 1:
                    print(f"step {step} recon {loss.item():.5f} grad_norm {norm:.5f}", flush=True)
        err = self.evaluate()
        if self.stage == 0:
            print(f"held-out reconstruction error {err:.5f}", flush=True)
        os.makedirs("stages", exist_ok=True)
        torch.save(self.module.state_dict(), f"stages/stage{self.stage}.pt")
        dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--rounds", type=int, default=4)
    ap.add_argument("--n-micro", type=int, default=4)
    ap.add_argument("--micro-size", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    PipelineTrainer(args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
