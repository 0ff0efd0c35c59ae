"""Asynchronous actor-critic on a line world; a shared network, a copy in every worker."""
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

SIZE, WORKERS, EPISODES = 9, 2, 260


class LineWorld:
    """Start anywhere, reach the goal shown in the observation; a step costs 0.1."""

    def __init__(self, gen):
        self.gen = gen

    def reset(self):
        self.pos, self.goal = torch.randint(0, SIZE, (2,), generator=self.gen).tolist()
        return self.observe()

    def observe(self):
        obs = torch.zeros(2 * SIZE)
        obs[self.pos] = obs[SIZE + self.goal] = 1.0
        return obs

    def step(self, action):
        self.pos = min(SIZE - 1, max(0, self.pos + (1 if action == 1 else -1)))
        done = self.pos == self.goal
        return self.observe(), (1.0 if done else -0.1), done


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * SIZE, 48), nn.ReLU())
        self.actor, self.critic = nn.Linear(48, 2), nn.Linear(48, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.actor(h), self.critic(h).squeeze(-1)


def lend_gradients(local, shared):
    for lp, sp in zip(local.parameters(), shared.parameters()):
        if sp.grad is not None:
            return
        sp.grad = lp.grad


def episode(env, net, gen, limit=20):
    obs, rows, done = env.reset(), [], False
    while not done and len(rows) < limit:
        logits, value = net(obs)
        action = int(torch.multinomial(logits.detach().softmax(0), 1, generator=gen))
        obs, reward, done = env.step(action)
        rows.append((F.log_softmax(logits, 0)[action], value, reward))
    return rows


def a2c_loss(rows, gamma=0.95):
    ret, loss = 0.0, torch.zeros(())
    for logp, value, reward in reversed(rows):
        ret = reward + gamma * ret
        loss = loss - logp * (ret - value.detach()) + 0.5 * (ret - value) ** 2
    return loss / len(rows)


def worker(number, shared, lengths):
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(10 + number)
    env, local = LineWorld(gen), ActorCritic()
    opt = torch.optim.SGD(shared.parameters(), lr=0.3)
    for e in range(EPISODES):
        local.load_state_dict(shared.state_dict())
        rows = episode(env, local, gen)
        local.zero_grad()
        a2c_loss(rows).backward()
        lend_gradients(local, shared)
        opt.step()
        lengths[number, e] = len(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(1)
    shared = ActorCritic().share_memory()
    lengths = torch.zeros(WORKERS, EPISODES).share_memory_()
    ctx = mp.get_context("fork")
    procs = [ctx.Process(target=worker, args=(n, shared, lengths)) for n in range(WORKERS)]
    for p in procs:
        p.start()
    for p in procs:
        p.join()
    assert all(p.exitcode == 0 for p in procs)
    for k, part in enumerate(lengths.chunk(5, dim=1)):
        print(f"episodes {52 * k}-{52 * k + 51}: mean length {part.mean().item():.2f}")
