"""Asynchronous actor-critic on a toy bandit with shared statistics (A3C style)."""
import torch
from torch import nn, multiprocessing


class SharedAdam(torch.optim.Adam):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, lr=lr, betas=betas, eps=eps)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = torch.zeros(())
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)

    def share_memory(self):
        for group in self.param_groups:
            for p in group["params"]:
                for t in self.state[p].values():
                    t.share_memory_()
        return self


class ActorCritic(nn.Module):
    def __init__(self, contexts=6, arms=4, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(contexts, width), nn.Tanh())
        self.pi, self.v = nn.Linear(width, arms), nn.Linear(width, 1)

    def forward(self, x):
        h = self.body(x)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def pull(context, arm):
    best = context.argmax(1) % 4
    return (arm == best).float()


class Worker(multiprocessing.get_context("fork").Process):
    def __init__(self, index, net, opt, lock, steps=60):
        super().__init__(name=f"worker-{index}")
        self.index, self.net, self.opt, self.lock, self.steps = index, net, opt, lock, steps

    def run(self):
        torch.set_num_threads(1)
        torch.manual_seed(self.index)
        local = ActorCritic()
        for _ in range(self.steps):
            local.load_state_dict(self.net.state_dict())
            context = torch.eye(6)[torch.randint(0, 6, (64,))]
            policy, value = local(context)
            arm = policy.sample()
            reward = pull(context, arm)
            advantage = reward - value
            loss = (-policy.log_prob(arm) * advantage.detach() + 0.5 * advantage**2 - 0.01 * policy.entropy()).mean()
            local.zero_grad()
            loss.backward()
            with self.lock:
                for shared, mine in zip(self.net.parameters(), local.parameters()):
                    shared.grad = mine.grad
                self.opt.step()


def success(net):
    with torch.no_grad():
        policy, _ = net(torch.eye(6))
        return policy.probs.gather(1, (torch.arange(6) % 4)[:, None]).mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = ActorCritic().share_memory()
    opt = SharedAdam(net.parameters(), lr=5e-3)
    print(f"before {success(net):.3f}")
    lock = multiprocessing.get_context("fork").Lock()
    workers = [Worker(i, net, opt, lock) for i in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    if any(w.exitcode for w in workers):
        raise SystemExit("a worker failed")
    print(f"after {success(net):.3f}, optimizer step {opt.state[next(net.parameters())]['step'].item():.0f}")


if __name__ == "__main__":
    main()
