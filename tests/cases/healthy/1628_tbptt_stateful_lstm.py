"""Truncated BPTT: an LSTM over contiguous streams, the hidden state carried from window to window.

No shuffling, on purpose: window k+1 of a stream must follow window k. Each rank owns its own streams
of the training text. The plateau scheduler is fed an all-reduced validation loss.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

V, BPTT, STREAMS = 12, 20, 16  # streams in all


def text(n, seed):
    """A noisy source of order two."""
    g = torch.Generator().manual_seed(seed)
    out = [0, 1]
    noise = torch.rand(n, generator=g)
    rnd = torch.randint(V, (n,), generator=g)
    for i in range(n - 2):
        out.append((out[-1] * 3 + out[-2] + 1) % V if noise[i] < 0.85 else int(rnd[i]))
    return torch.tensor(out)


def batchify(ids, streams):
    keep = len(ids) // streams * streams
    return ids[:keep].view(streams, -1).t().contiguous()  # time x stream


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 24)
        self.lstm = nn.LSTM(24, 64)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(64, V)

    def forward(self, x, state):
        y, state = self.lstm(self.emb(x), state)
        return self.out(self.drop(y)), state


def zero_state(n):
    return torch.zeros(1, n, 64), torch.zeros(1, n, 64)


def windows(data):
    for at in range(0, len(data) - 1, BPTT):
        n = min(BPTT, len(data) - 1 - at)
        yield data[at:at + n], data[at + 1:at + 1 + n]


def valid_loss(net, data):
    net.eval()
    acc = torch.zeros(2)
    state = zero_state(data.size(1))
    with torch.no_grad():
        for x, y in windows(data):
            logits, state = net(x, state)
            acc[0] += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
            acc[1] += y.numel()
    dist.all_reduce(acc)
    return (acc[0] / acc[1]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train = batchify(text(9600, 1), STREAMS)[:, rank::world].contiguous()
    valid = batchify(text(2400, 2), STREAMS)[:, rank::world].contiguous()
    torch.manual_seed(12)
    net = Net()
    ddp = DDP(net)
    torch.manual_seed(100 + rank)
    opt = torch.optim.SGD(ddp.parameters(), lr=2.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=1e-3)
    history = [valid_loss(net, valid)]
    for epoch in range(9):
        ddp.train()
        state = zero_state(train.size(1))
        for x, y in windows(train):
            state = tuple(s.detach() for s in state)
            logits, state = ddp(x, state)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            opt.step()
        history.append(valid_loss(net, valid))
        plateau.step(history[-1])
        if rank == 0:
            print(f"epoch {epoch} valid {history[-1]:.4f} lr {opt.param_groups[0]['lr']:.3f}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "tbptt.pt")
    assert history[-1] < history[0] - 0.4
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
