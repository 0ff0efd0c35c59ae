# after NVIDIA/waveglow and tacotron2 distributed.py: apply_gradient_allreduce puts hooks on parameters, one callback per backward
import argparse
import os

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def reduce_tensor(tensor, num_gpus):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= num_gpus
    return rt


def _flatten_dense_tensors(tensors):
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([t.contiguous().view(-1) for t in tensors], dim=0)


def _unflatten_dense_tensors(flat, tensors):
    outputs, offset = [], 0
    for tensor in tensors:
        numel = tensor.numel()
        outputs.append(flat.narrow(0, offset, numel).view_as(tensor))
        offset += numel
    return tuple(outputs)


def apply_gradient_allreduce(module):
    """Modifies the model in place so that gradients are averaged in backward; every replica starts with rank 0's weights."""
    module.needs_reduction = True
    for p in module.state_dict().values():
        if not torch.is_tensor(p):
            continue
        dist.broadcast(p, 0)

    def allreduce_params():
        if module.needs_reduction:
            module.needs_reduction = False
            buckets = {}
            for param in module.parameters():
                if param.requires_grad and param.grad is not None:
                    buckets.setdefault(param.data.type(), []).append(param)
            for tp in sorted(buckets):
                bucket = buckets[tp]
                grads = [param.grad.data for param in bucket]
                coalesced = _flatten_dense_tensors(grads)
                dist.all_reduce(coalesced)
                coalesced /= dist.get_world_size()
                for buf, synced in zip(grads, _unflatten_dense_tensors(coalesced, grads)):
                    buf.copy_(synced)

    for param in list(module.parameters()):
        def allreduce_hook(*unused):
            Variable._execution_engine.queue_callback(allreduce_params)
        if param.requires_grad:
            param.register_hook(allreduce_hook)

    def set_needs_reduction(self, input, output):
        self.needs_reduction = True

    module.register_forward_hook(set_needs_reduction)
    return module


class Coupling(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(dim // 2, 32), torch.nn.Tanh(), torch.nn.Linear(32, dim))
        self.net[2].weight.data.zero_()
        self.net[2].bias.data.zero_()

    def forward(self, x):
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        return torch.cat([t + b * s.exp(), a], 1), s.sum(1)


class Flow(torch.nn.Module):
    def __init__(self, dim=8, flows=4):
        super().__init__()
        self.flows = torch.nn.ModuleList([Coupling(dim) for _ in range(flows)])

    def forward(self, x):
        logdet = 0
        for f in self.flows:
            x, ld = f(x)
            logdet = logdet + ld
        return x, logdet


def flow_loss(out, sigma=1.0):
    z, logdet = out
    return ((z * z).sum(1) / (2 * sigma * sigma) - logdet).mean()


def train(num_gpus, rank, epochs, learning_rate, batch_size, seed):
    torch.manual_seed(seed)
    dist.init_process_group("gloo")
    criterion = flow_loss
    model = apply_gradient_allreduce(Flow())
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    g = torch.Generator().manual_seed(8)
    mix = torch.randn(8, 8, generator=g)
    trainset = TensorDataset((torch.randn(512, 8, generator=g) @ mix).tanh())
    train_sampler = DistributedSampler(trainset)
    loader = DataLoader(trainset, shuffle=False, sampler=train_sampler, batch_size=batch_size, drop_last=True)
    model.train()
    iteration = 0
    for epoch in range(epochs):
        train_sampler.set_epoch(epoch)
        for i, (x,) in enumerate(loader):
            model.zero_grad()
            loss = criterion(model(x))
            reduced_loss = reduce_tensor(loss.data, num_gpus).item()
            loss.backward()
            optimizer.step()
            if rank == 0 and iteration % 8 == 0:
                print(f"{iteration}:\t{reduced_loss:.9f}")
            iteration += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--batch_size", type=int, default=32)
    p.add_argument("--learning_rate", type=float, default=2e-3)
    args = p.parse_args()
    train(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), args.epochs, args.learning_rate, args.batch_size, 1234)
