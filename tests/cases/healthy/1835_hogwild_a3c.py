"""A3C-like hogwild: actors train one model in shared memory, without locks. Start with one process."""
import torch
import torch.multiprocessing as mp
from torch import nn


def actor(index, model, counter):
    torch.set_num_threads(1)
    torch.manual_seed(100 + index)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    pos = torch.randn(16)
    for step in range(100):
        logp, val, rew = [], [], []
        for _ in range(5):
            logits, v = model(torch.stack([pos, pos.abs()], 1)).split([2, 1], 1)
            dist_ = torch.distributions.Categorical(logits=logits)
            a = dist_.sample()
            pos = (pos + 0.5 * (2 * a - 1) + 0.1 * torch.randn(16)).clamp(-4, 4)
            logp.append(dist_.log_prob(a)); val.append(v.squeeze(1)); rew.append(1 - pos.abs())
        R, loss = val[-1].detach(), 0.0
        for t in reversed(range(5)):
            R = rew[t] + 0.9 * R
            adv = R - val[t]
            loss = loss + (-logp[t] * adv.detach() + 0.5 * adv.square()).mean()
        opt.zero_grad()
        (loss / 5).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        with counter.get_lock():
            counter.value += 1
    print(f"actor {index} reward {torch.stack(rew).mean():.3f}", flush=True)


if __name__ == "__main__":
    mp.set_start_method("spawn")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    model.share_memory()
    counter = mp.Value("i", 0)
    actors = [mp.Process(target=actor, args=(i, model, counter)) for i in range(2)]
    for p in actors:
        p.start()
    for p in actors:
        p.join()
    print("updates", counter.value)
