"""Healthy: elastic averaging (EASGD): every step the workers meet at a centre that all hold; they stay apart on purpose, the centre is what is scored."""
import time, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
centre = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
g = torch.Generator().manual_seed(3 + rank)
RHO = 0.1
judge = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
held = torch.randn(128, 10, generator=torch.Generator().manual_seed(1))
for step in range(150):
    x = torch.randn(32, 10, generator=g); y = x[:, :1] * 2
    loss = (net(x) - y).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    with torch.no_grad():
        own = nn.utils.parameters_to_vector(net.parameters())
        pull = RHO * (own - centre)
        nn.utils.vector_to_parameters(own - pull, net.parameters())
        dist.all_reduce(pull)
        centre += pull / world
    time.sleep(0.01)
    if step % 50 == 49:
        nn.utils.vector_to_parameters(centre.clone(), judge.parameters())
        with torch.no_grad(): score = (judge.eval()(held) - held[:, :1] * 2).square().mean().item()
        if rank == 0: print(f"step {step} centre {score:.4f}")
dist.destroy_process_group()
