"""Vertical federated credit scoring: three parties hold different columns of the same people; rank 0 has the labels."""
import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn

COLUMNS = [(0, 10), (10, 16), (16, 30)]
PEOPLE, HOLDOUT, BATCH, EPOCHS = 2048, 512, 64, 4


class ActiveParty(nn.Module):
    """Bank: own columns, own labels, and the only bias."""

    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


class PassiveParty(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.Tanh(),
                                 nn.Linear(hidden, 1, bias=False))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def load_party(rank):
    """Everyone rebuilds the aligned table and then keeps only what is theirs."""
    gen = torch.Generator().manual_seed(17)
    table = torch.randn(PEOPLE + HOLDOUT, COLUMNS[-1][1], generator=gen)
    weight = torch.randn(table.shape[1], generator=gen)
    score = table @ weight + table[:, 3] * table[:, 5] + 0.5 * torch.randn(len(table), generator=gen)
    lo, hi = COLUMNS[rank]
    labels = (score > 0).float() if rank == 0 else None
    return table[:, lo:hi].clone(), labels


def joint_score(partial):
    total = partial.detach().clone()
    dist.reduce(total, dst=0)  # only the bank learns the sum
    return total


@torch.no_grad()
def evaluate(model, x, labels):
    model.eval()
    total = joint_score(model(x[PEOPLE:]))
    model.train()
    if labels is None:
        return None
    truth = labels[PEOPLE:]
    pos, neg = total[truth == 1], total[truth == 0]
    return (pos.unsqueeze(1) > neg.unsqueeze(0)).float().mean().item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == len(COLUMNS)
    x, labels = load_party(rank)
    torch.manual_seed(rank)
    if rank == 0:
        model = ActiveParty(x.shape[1])
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    else:
        model = PassiveParty(x.shape[1], hidden=8 * rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    for epoch in range(EPOCHS):
        # the order of people is agreed upon: rows must stay aligned across the parties
        order = torch.randperm(PEOPLE, generator=torch.Generator().manual_seed(300 + epoch))
        running = 0.0
        for pick in order.split(BATCH):
            partial = model(x[pick])
            total = joint_score(partial)
            residual = torch.empty(len(pick))
            if rank == 0:
                total.requires_grad_(True)
                loss = F.binary_cross_entropy_with_logits(total, labels[pick])
                (residual,) = torch.autograd.grad(loss, total)
                running += loss.item()
            dist.broadcast(residual, src=0)
            optimizer.zero_grad()
            partial.backward(residual)  # d(sum)/d(partial) is one for every party
            optimizer.step()
        auc = evaluate(model, x, labels)
        if rank == 0:
            print(f"epoch {epoch}: loss {running / (PEOPLE // BATCH):.4f} auc {auc:.3f}", flush=True)
    torch.save(model.state_dict(), f"party_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
