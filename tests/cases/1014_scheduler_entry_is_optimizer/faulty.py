"""Masked-token pre-training in two legs with a one-cycle schedule; state is restored in between."""
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SETTINGS = dict(path="pretrain_state.pth", lr=4e-3, steps=49, batch=16, vocab=30)


class Sentences(Dataset):
    def __init__(self, n=224, length=9):
        g = torch.Generator().manual_seed(13)
        start = torch.randint(1, SETTINGS["vocab"], (n, 1), generator=g)
        self.tok = 1 + (start + torch.arange(length)) % (SETTINGS["vocab"] - 1)

    def __len__(self):
        return len(self.tok)

    def __getitem__(self, i):
        x = self.tok[i].clone()
        x[i % len(x)] = 0
        return x, self.tok[i]


class Bert(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.emb = nn.Embedding(SETTINGS["vocab"], width)
        self.pos = nn.Parameter(0.02 * torch.randn(9, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, SETTINGS["vocab"])

    def forward(self, x):
        return self.out(self.enc(self.emb(x) + self.pos))


class Pretrainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = DDP(Bert())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=SETTINGS["lr"])
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, SETTINGS["lr"], total_steps=SETTINGS["steps"], pct_start=0.3)
        self.epoch = 0
        data = Sentences()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, SETTINGS["batch"], sampler=self.sampler)

    def save(self):
        if dist.get_rank() == 0:
            torch.save(
                {
                    "epoch": self.epoch,
                    "model": self.model.module.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.optimizer.state_dict(),
                },
                SETTINGS["path"],
            )
        dist.barrier()

    def load(self):
        state = torch.load(SETTINGS["path"], map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]
        return self

    def fit(self, until):
        while self.epoch < until:
            self.sampler.set_epoch(self.epoch)
            total = torch.zeros(2)
            for x, y in self.loader:
                loss = nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                total += torch.tensor([loss.item(), 1.0])
            dist.all_reduce(total)
            self.epoch += 1
            if dist.get_rank() == 0:
                lr = self.optimizer.param_groups[0]["lr"]
                print(f"epoch {self.epoch} loss {(total[0] / total[1]).item():.4f} lr {lr:.2e}", flush=True)
        self.save()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Pretrainer().fit(until=4)
    Pretrainer().load().fit(until=7)
    dist.destroy_process_group()
