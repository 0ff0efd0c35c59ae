"""Several players improve one shared policy on a small card game."""
import argparse

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self, cards=8, moves=4):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(cards, 40), nn.ReLU(), nn.Linear(40, moves))

    def forward(self, hand):
        return Categorical(logits=self.net(hand))


def deal(n, cards=8):
    hand = torch.rand(n, cards)
    best = (hand[:, ::2] - hand[:, 1::2]).argmax(1)
    return hand, best


def play(player, args, policy, scores):
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + player)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.lr)
    average = 0.0
    for game in range(args.games):
        hand, best = deal(args.hands)
        moves = policy(hand)
        action = moves.sample()
        reward = (action == best).float()
        loss = -(moves.log_prob(action) * (reward - average)).mean() - 0.01 * moves.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = 0.9 * average + 0.1 * reward.mean().item()
    scores[player] = average


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--players", type=int, default=2)
    ap.add_argument("--games", type=int, default=250)
    ap.add_argument("--hands", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=1)
    args = ap.parse_args()
    torch.manual_seed(args.seed)

    ctx = mp.get_context("fork")
    policy = Policy()
    policy.share_memory()
    scores = ctx.Array("d", args.players)
    crew = [ctx.Process(target=play, args=(k, args, policy, scores)) for k in range(args.players)]
    for p in crew:
        p.start()
    for p in crew:
        p.join()
    print("running scores:", " ".join(f"{s:.3f}" for s in scores))

    torch.manual_seed(10_000)
    with torch.no_grad():
        hand, best = deal(1000)
        rate = (policy.net(hand).argmax(1) == best).float().mean().item()
    print(f"shared policy finds the best move in {100 * rate:.1f}% of the hands")


if __name__ == "__main__":
    main()
