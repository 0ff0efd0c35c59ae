"""Fine-tuning from a distributed checkpoint: the body alone is read, then the old rates for a report; the new optimizer starts fresh on purpose."""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))


def train(model, optimizer, teacher, generator, steps, name):
    for step in range(steps):
        x = torch.randn(32, 12, generator=generator)
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    if dist.get_rank() == 0:
        print(f"{name} loss {shown.item() / dist.get_world_size():.4f}")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    tasks = torch.Generator().manual_seed(6)
    generator = torch.Generator().manual_seed(60 + rank)
    torch.manual_seed(0)
    model = DDP(Net(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    train(model, optimizer, torch.randn(12, 6, generator=tasks), generator, 60, "pretraining")
    dcp.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id="pretrained")
    dist.barrier()

    tuned = Net(3)
    body = {"model": {k: v for k, v in tuned.state_dict().items() if k.startswith("body.")}}
    dcp.load(body, checkpoint_id="pretrained")
    tuned.load_state_dict(body["model"], strict=False)
    tuned = DDP(tuned)
    groups = [{"params": tuned.module.body.parameters(), "lr": 5e-4}, {"params": tuned.module.head.parameters(), "lr": 5e-3}]
    fresh = torch.optim.SGD(groups, lr=5e-3, momentum=0.9)
    rates = {"optimizer": {"param_groups": torch.optim.AdamW(tuned.parameters(), lr=1.0).state_dict()["param_groups"]}}
    dcp.load(rates, checkpoint_id="pretrained")
    if rank == 0:
        print("pretrained with lr", rates["optimizer"]["param_groups"][0]["lr"])
    train(tuned, fresh, torch.randn(12, 3, generator=tasks), generator, 60, "fine-tuning")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
