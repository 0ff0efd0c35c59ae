"""Pre-training with a compiled encoder, then fine-tuning from the file that the first stage wrote."""
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def save_weights(model, path):
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()


def load_matching(model, path):
    """Takes over whatever fits; heads may differ between the stages."""
    own = model.state_dict()
    stored = torch.load(path, weights_only=True)
    usable = {k: v for k, v in stored.items() if k in own and own[k].shape == v.shape}
    model.load_state_dict(usable, strict=False)
    return model


class Encoder(nn.Module):
    def __init__(self, dim=20, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())

    def forward(self, x):
        return self.body(x)


class WithHead(nn.Module):
    def __init__(self, encoder, out):
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(64, out)

    def forward(self, x):
        return self.head(self.encoder(x))


def make(n, out, seed):
    mix = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 20, generator=g)
    z = torch.tanh(x @ mix)
    return TensorDataset(x, z if out == 5 else z.argmax(1) % 2)


def stage(model, data, loss_fn, epochs, lr, name):
    ddp = DDP(model)
    opt = torch.optim.AdamW(ddp.parameters(), lr=lr)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = loss_fn(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{name} epoch {epoch}: {(total[0] / total[1]).item():.4f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    path = os.path.join(tempfile.gettempdir(), f"encoder_{os.environ['MASTER_PORT']}.pt")
    encoder = torch.compile(Encoder(), backend="eager")
    stage(WithHead(encoder, 5), make(600, 5, 3), nn.functional.mse_loss, 4, 3e-3, "pretrain")
    save_weights(encoder, path)

    encoder = load_matching(Encoder(), path)
    stage(WithHead(encoder, 2), make(80, 2, 4), nn.functional.cross_entropy, 6, 1e-3, "finetune")
    if dist.get_rank() == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
