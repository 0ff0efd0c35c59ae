"""A deep ensemble: each rank trains its own net on its own bootstrap sample, on purpose unsynchronised.

Prediction: dropout stays on at test time (Monte-Carlo dropout, 10 passes) and the probabilities are
averaged over passes and ranks. All ranks predict the same full test set, in the same order.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def blobs():
    g = torch.Generator().manual_seed(50)
    centres = torch.randn(12, 10, generator=g) * 1.3
    comp = torch.randint(12, (2000,), generator=g)
    x = centres[comp] + torch.randn(2000, 10, generator=g)
    y = comp % 4
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def switch_dropout(net, on):
    for m in net.modules():
        if isinstance(m, nn.Dropout):
            m.train(on)


@torch.no_grad()
def mc_predict(net, x, passes):
    net.eval()
    switch_dropout(net, True)
    p = torch.zeros(len(x), 4)
    for _ in range(passes):
        p += F.softmax(net(x), dim=1)
    switch_dropout(net, False)
    return p / passes


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    (xtr, ytr), (xte, yte) = blobs()
    mean, std = xtr.mean(0), xtr.std(0)
    xtr, xte = (xtr - mean) / std, (xte - mean) / std

    torch.manual_seed(1000 + rank)  # members must differ
    width = [64, 96][rank % 2]
    net = nn.Sequential(nn.Linear(10, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2),
                        nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2),
                        nn.Linear(width, 4))
    boot = torch.randint(len(xtr), (len(xtr),))
    loader = DataLoader(TensorDataset(xtr[boot], ytr[boot]), batch_size=35, shuffle=True)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=8e-3, total_steps=8 * len(loader))
    for epoch in range(8):
        net.train()
        s = 0.0
        for x, y in loader:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y, label_smoothing=0.05)
            loss.backward()
            opt.step()
            sched.step()
            s += loss.item()
        print(f"[member {rank}] epoch {epoch} loss {s / len(loader):.4f}", flush=True)

    prob = mc_predict(net, xte, passes=10)
    single = (prob.argmax(1) == yte).float().mean().item()
    dist.all_reduce(prob)
    prob /= world
    both = (prob.argmax(1) == yte).float().mean().item()
    print(f"[member {rank}] own accuracy {single:.3f}, ensemble {both:.3f}", flush=True)
    torch.save({"width": width, "state": net.state_dict()}, f"member{rank}.pt")
    assert both > 0.8
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
