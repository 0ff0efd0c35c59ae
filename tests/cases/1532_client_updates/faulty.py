"""One-shot federated averaging on one machine: a process for each client."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def build():
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 1))


def client_data(client, n=96):
    g = torch.Generator().manual_seed(n + client)
    x = torch.randn(n, 12, generator=g) + 0.3 * client
    y = x[:, :6].sum(1, keepdim=True) - x[:, 6:].abs().sum(1, keepdim=True)
    return x, y + 0.1 * torch.randn(n, 1, generator=g)


def local_update(client, rnd, start, args, results):
    torch.set_num_threads(1)
    net = build()
    vector_to_parameters(start.clone(), net.parameters())
    x, y = client_data(client)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 * rnd + client))
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    for rows in order.split(16) * args.passes:
        loss = nn.functional.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    weights = parameters_to_vector(net.parameters()).detach()
    results.put((client, loss.item(), weights))


@torch.no_grad()
def validate(net, x, y):
    """Per-sample scores, as the report wants the median and the tail too."""
    errors = torch.stack([(net(row) - target).abs().squeeze() for row, target in zip(x, y)])
    return errors.median().item(), errors.quantile(0.95).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rounds", type=int, default=1, help="more than one needs spawn")
    ap.add_argument("--clients", type=int, default=3)
    ap.add_argument("--passes", type=int, default=8)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()

    torch.manual_seed(0)
    ctx = mp.get_context("fork")
    results = ctx.Queue()
    net = build()
    val_x, val_y = client_data(1, n=3000)
    for rnd in range(args.rounds):
        start = parameters_to_vector(net.parameters()).detach().clone()
        procs = [ctx.Process(target=local_update, args=(c, rnd, start, args, results)) for c in range(args.clients)]
        for p in procs:
            p.start()
        median, tail = validate(net, val_x, val_y)
        updates = {}
        for _ in procs:
            client, loss, weights = results.get()
            updates[client] = torch.as_tensor(weights)
        for p in procs:
            p.join()
        mean = torch.stack([updates[c] for c in sorted(updates)]).mean(0)
        vector_to_parameters(mean, net.parameters())
        print(f"round {rnd}: before it median error {median:.3f}, 95% {tail:.3f}", flush=True)
    torch.save(net.state_dict(), "global.pt")


if __name__ == "__main__":
    main()
