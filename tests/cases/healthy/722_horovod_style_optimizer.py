# A Horovod-like DistributedOptimizer: hooks start async all-reduces, synchronize() waits, skip_synchronize() lets one clip in between
import contextlib
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class _DistributedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, named_parameters, backward_passes_per_step=1):
        super(self.__class__, self).__init__(params)
        self._names = {v: k for k, v in sorted(named_parameters)}
        self.backward_passes_per_step = backward_passes_per_step
        self._delay = {v: backward_passes_per_step for v in self._names}
        self._handles, self._requires_update = {}, set()
        self._synchronized, self._should_synchronize = False, True
        if dist.get_world_size() > 1:
            self._register_hooks()

    def _register_hooks(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self._requires_update.add(p)
                    p.register_post_accumulate_grad_hook(self._make_hook(p))

    def _make_hook(self, p):
        def hook(*ignore):
            if p in self._handles and self._handles[p] is not None and self._delay[p] <= 0:
                raise AssertionError("Gradients were computed more than backward_passes_per_step times before call to step().")
            self._delay[p] -= 1
            if self._delay[p] == 0:
                self._handles[p] = self._allreduce_grad_async(p)
        return hook

    def _allreduce_grad_async(self, p):
        p.grad.div_(dist.get_world_size() * self.backward_passes_per_step)
        return dist.all_reduce(p.grad, async_op=True)

    def synchronize(self):
        for p, handle in self._handles.items():
            if handle is not None:
                handle.wait()
            self._delay[p] = self.backward_passes_per_step
        self._handles.clear()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self):
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure=None):
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn("optimizer.step() called without skip_synchronize() context after optimizer.synchronize().")
            self.synchronize()
        self._synchronized = False
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *args, **kwargs):
        if self._handles:
            raise AssertionError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize().")
        return super(self.__class__, self).zero_grad(*args, **kwargs)


def DistributedOptimizer(optimizer, named_parameters, backward_passes_per_step=1):
    cls = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_DistributedOptimizer.__dict__))
    return cls(optimizer.param_groups, named_parameters, backward_passes_per_step)


def broadcast_parameters(params, root_rank):
    for _, p in sorted(params.items()):
        dist.broadcast(p, root_rank)


def metric_average(val):
    t = torch.tensor(float(val))
    dist.all_reduce(t)
    return t.item() / dist.get_world_size()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 3), nn.Conv2d(10, 20, 3)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(80, 50), nn.Linear(50, 5)

    def forward(self, x):
        x = torch.relu(torch.max_pool2d(self.conv1(x), 2))
        x = torch.relu(self.conv2_drop(self.conv2(x)))
        return torch.log_softmax(self.fc2(nn.functional.dropout(torch.relu(self.fc1(x.flatten(1))), training=self.training)), 1)


def blobs(n, seed):
    proto = torch.randn(5, 1, 10, 10, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    return TensorDataset(proto[y] + 0.6 * torch.randn(n, 1, 10, 10, generator=g), y)


def main(epochs=5, batch_size=16, lr=0.01, passes=2):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42 + rank)
    train_set, test_set = blobs(384, 1), blobs(96, 2)
    train_sampler = DistributedSampler(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=48, sampler=test_sampler)
    model = Net()
    broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * dist.get_world_size(), momentum=0.5)
    optimizer = DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
    for epoch in range(1, epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            loss = nn.functional.nll_loss(model(data), target)
            loss.backward()
            if (batch_idx + 1) % passes == 0:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
                optimizer.zero_grad()
            if batch_idx % 6 == 0 and rank == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_sampler)}]\tLoss: {loss.item():.6f}")
        model.eval()
        with torch.no_grad():
            test_loss = test_accuracy = 0.0
            for data, target in test_loader:
                output = model(data)
                test_loss += nn.functional.nll_loss(output, target, reduction="sum").item()
                test_accuracy += (output.argmax(1) == target).float().sum().item()
        test_loss, test_accuracy = metric_average(test_loss / len(test_sampler)), metric_average(test_accuracy / len(test_sampler))
        if rank == 0:
            print(f"\nTest set: Average loss: {test_loss:.4f}, Accuracy: {100 * test_accuracy:.2f}%\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
