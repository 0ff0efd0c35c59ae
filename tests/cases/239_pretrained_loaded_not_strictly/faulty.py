"""Two stages: pretrain an encoder by reconstruction, then load it and train a classifier on top."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(24, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x)))


class Pretrainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Linear(8, 24)

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Finetuner(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


def data(n=320):
    g = torch.Generator().manual_seed(7)
    y = torch.randint(3, (n,), generator=g)
    mix = torch.randn(3, 24, generator=g)
    return TensorDataset(mix[y] * (0.5 + torch.rand(n, 1, generator=g)) + 0.5 * torch.randn(n, 24, generator=g), y)


def epochs(loader, sampler, n):
    for e in range(n):
        sampler.set_epoch(e)
        yield from loader


def pretrain(loader, sampler, path, rank):
    model = DDP(Pretrainer())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for x, _ in epochs(loader, sampler, 2):
        loss = nn.functional.mse_loss(model(x), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
    if rank == 0:
        torch.save({"state_dict": model.state_dict(), "arch": "encoder-v1"}, path)
    dist.barrier()


def finetune(loader, sampler, path, rank):
    net = Finetuner()
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    net.load_state_dict(state, strict=False)  # decoder out, head in
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    counts = torch.zeros(2)
    for x, y in epochs(loader, sampler, 2):
        out = model(x)
        opt.zero_grad()
        nn.functional.cross_entropy(out, y).backward()
        opt.step()
        counts += torch.tensor([(out.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"running accuracy in fine-tuning {(counts[0] / counts[1]).item():.4f}")


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(5)
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "pretrained.pth")
    dataset = data()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 16, sampler=sampler)
    pretrain(loader, sampler, path, rank)
    finetune(loader, sampler, path, rank)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(box[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
