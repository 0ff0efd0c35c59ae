"""Noam-style optimizer wrapper around Adam, as in many translation code bases."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ScheduledOptim:
    """Warms up linearly, then decays with the inverse square root."""

    def __init__(self, optimizer, factor, d_model, warmup):
        self._optimizer = optimizer
        self.factor, self.d_model, self.warmup = factor, d_model, warmup
        self.n_steps = 0

    def step_and_update_lr(self):
        self._update_learning_rate()
        self._optimizer.step()

    def zero_grad(self):
        """Clears the gradients of the inner optimizer."""
        return self._optimizer.zero_grad

    def state_dict(self):
        return {"inner": self._optimizer.state_dict(), "n_steps": self.n_steps}

    def _update_learning_rate(self):
        self.n_steps += 1
        lr = self.factor * self.d_model**-0.5 * min(self.n_steps**-0.5, self.n_steps * self.warmup**-1.5)
        for group in self._optimizer.param_groups:
            group["lr"] = lr


class Reverser(nn.Module):
    def __init__(self, vocab=14, d=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Parameter(0.1 * torch.randn(1, 10, d))
        layer = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        return self.out(self.enc(self.tok(x) + self.pos))


def sequences(n):
    x = torch.randint(0, 14, (n, 10), generator=torch.Generator().manual_seed(20))
    return TensorDataset(x, x.flip(1))


def train_epoch(model, loader, optimizer):
    model.train()
    total = torch.zeros(3)
    for src, trg in loader:
        optimizer.zero_grad()
        pred = model(src)
        loss = nn.functional.cross_entropy(pred.flatten(0, 1), trg.flatten())
        loss.backward()
        optimizer.step_and_update_lr()
        total += torch.tensor([loss.item() * trg.numel(), float((pred.argmax(-1) == trg).sum()), trg.numel()])
    dist.all_reduce(total)
    return (total[0] / total[2]).item(), (total[1] / total[2]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = DDP(Reverser())
    optimizer = ScheduledOptim(torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9), 0.4, 32, 25)
    data = sequences(640)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        loss, acc = train_epoch(model, loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f} accuracy {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
