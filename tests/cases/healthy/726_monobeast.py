# nproc: 1 - IMPALA on one machine after facebookresearch/torchbeast monobeast.py: forked actors, shared rollout buffers, learner threads
import argparse
import logging
import os
import threading
import time

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from torch import multiprocessing as mp
from torch import nn
from torch.nn import functional as F

logging.basicConfig(format="[%(levelname)s:%(process)d %(asctime)s] %(message)s", level=logging.INFO)
torch.set_num_threads(1)

parser = argparse.ArgumentParser(description="IMPALA, small")
parser.add_argument("--num_actors", default=2, type=int)
parser.add_argument("--total_steps", default=12000, type=int)
parser.add_argument("--batch_size", default=4, type=int)
parser.add_argument("--unroll_length", default=20, type=int)
parser.add_argument("--num_buffers", default=10, type=int)
parser.add_argument("--num_learner_threads", default=2, type=int)
parser.add_argument("--entropy_cost", default=0.01, type=float)
parser.add_argument("--baseline_cost", default=0.5, type=float)
parser.add_argument("--discounting", default=0.9, type=float)
parser.add_argument("--learning_rate", default=2e-3, type=float)
parser.add_argument("--grad_norm_clipping", default=40.0, type=float)


class Catch:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.row, self.ball, self.paddle = 0, self.rng.integers(5), 2

    def obs(self):
        b = np.zeros((6, 5), np.float32)
        b[self.row, self.ball] = 1
        b[5, self.paddle] += 0.5
        return b.ravel()

    def step(self, a):
        self.paddle = int(np.clip(self.paddle + a - 1, 0, 4))
        self.row += 1
        done = self.row == 5
        r = 0.0
        if done:
            r = 1.0 if self.paddle == self.ball else -1.0
            self.reset()
        return self.obs(), r, done


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.core = nn.Sequential(nn.Linear(30, 48), nn.ReLU())
        self.policy, self.baseline = nn.Linear(48, 3), nn.Linear(48, 1)

    def forward(self, obs):
        h = self.core(obs)
        return self.policy(h), self.baseline(h).squeeze(-1)


def create_buffers(flags):
    T = flags.unroll_length
    specs = dict(obs=((T + 1, 30), torch.float32), reward=((T + 1,), torch.float32), done=((T + 1,), torch.bool), action=((T + 1,), torch.int64), logits=((T + 1, 3), torch.float32))
    return {k: [torch.zeros(shape, dtype=dt).share_memory_() for _ in range(flags.num_buffers)] for k, (shape, dt) in specs.items()}


def act(flags, index, free_queue, full_queue, model, buffers):
    try:
        torch.manual_seed(100 + index)
        env = Catch(index)
        obs, reward, done = env.obs(), 0.0, True
        while True:
            m = free_queue.get()
            if m is None:
                break
            for t in range(flags.unroll_length + 1):
                with torch.no_grad():
                    logits, _ = model(torch.from_numpy(obs))
                a = torch.multinomial(logits.softmax(-1), 1).item()
                buffers["obs"][m][t] = torch.from_numpy(obs)
                buffers["reward"][m][t], buffers["done"][m][t] = reward, done
                buffers["action"][m][t], buffers["logits"][m][t] = a, logits
                if t < flags.unroll_length:
                    obs, reward, done = env.step(a)
            full_queue.put(m)
    except KeyboardInterrupt:
        pass


def vtrace(behavior, target, actions, discounts, rewards, values, bootstrap):
    lp = lambda l: -F.cross_entropy(l.flatten(0, 1), actions.flatten(), reduction="none").view_as(actions)
    with torch.no_grad():
        rhos = (lp(target) - lp(behavior)).exp().clamp(max=1.0)
        nxt = torch.cat([values[1:], bootstrap[None]])
        deltas = rhos * (rewards + discounts * nxt - values)
        acc, out = torch.zeros_like(bootstrap), []
        for t in reversed(range(len(rewards))):
            acc = deltas[t] + discounts[t] * rhos[t] * acc
            out.append(acc)
        vs = torch.stack(out[::-1]) + values
        nvs = torch.cat([vs[1:], bootstrap[None]])
        return vs, rhos * (rewards + discounts * nvs - values)


def learn(flags, actor_model, model, batch, optimizer, stats, lock):
    with lock:
        target, values = model(batch["obs"])
        bootstrap = values[-1].detach()
        rewards = batch["reward"][1:]
        discounts = (~batch["done"][1:]).float() * flags.discounting
        actions = batch["action"][:-1]
        vs, adv = vtrace(batch["logits"][:-1], target[:-1], actions, discounts, rewards, values[:-1], bootstrap)
        logp = F.log_softmax(target[:-1], -1)
        pg = -(logp.gather(-1, actions[..., None]).squeeze(-1) * adv).mean()
        base = 0.5 * (vs - values[:-1]).pow(2).mean()
        ent = (logp.exp() * logp).sum(-1).mean()
        loss = pg + flags.baseline_cost * base + flags.entropy_cost * ent
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), flags.grad_norm_clipping)
        optimizer.step()
        actor_model.load_state_dict(model.state_dict())
        ends = batch["done"][1:]
        stats.update(loss=loss.item(), mean_return=rewards[ends].mean().item() if ends.any() else 0.0)


def main(flags):
    model = Net()
    model.share_memory()
    buffers = create_buffers(flags)
    ctx = mp.get_context("fork")
    free_queue, full_queue = ctx.SimpleQueue(), ctx.SimpleQueue()
    actors = []
    for i in range(flags.num_actors):
        actor = ctx.Process(target=act, args=(flags, i, free_queue, full_queue, model, buffers))
        actor.start()
        actors.append(actor)
    learner_model = Net()
    learner_model.load_state_dict(model.state_dict())
    optimizer = torch.optim.RMSprop(learner_model.parameters(), lr=flags.learning_rate, alpha=0.99, eps=0.01)
    step, stats = 0, {}
    get_lock, learn_lock = threading.Lock(), threading.Lock()
    for m in range(flags.num_buffers):
        free_queue.put(m)

    def batch_and_learn(i):
        nonlocal step
        while step < flags.total_steps:
            with get_lock:
                ids = [full_queue.get() for _ in range(flags.batch_size)]
            batch = {k: torch.stack([buffers[k][m] for m in ids], dim=1) for k in buffers}
            for m in ids:
                free_queue.put(m)
            learn(flags, model, learner_model, batch, optimizer, stats, learn_lock)
            with get_lock:
                step += flags.unroll_length * flags.batch_size

    threads = [threading.Thread(target=batch_and_learn, name=f"batch-and-learn-{i}", args=(i,)) for i in range(flags.num_learner_threads)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        time.sleep(0.5)
        if stats:
            logging.info("Steps %i loss %.3f return %.2f", step, stats["loss"], stats["mean_return"])
    for t in threads:
        t.join()
    for _ in actors:
        free_queue.put(None)
    for a in actors:
        a.join(timeout=5)
    torch.save({"model_state_dict": learner_model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, f"/tmp/impala_{os.getpid()}.tar")


if __name__ == "__main__":
    main(parser.parse_args())
