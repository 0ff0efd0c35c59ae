"""A script from the days of torch.distributed.launch."""
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def set_seed(args):
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)


def load_examples(args):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (320, 10), generator=g)
    labels = (ids.float().mean(1) > 25).long()
    return TensorDataset(ids, labels)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.pooler = nn.Linear(16, 16)
        self.classifier = nn.Linear(16, 2)

    def forward(self, ids, labels):
        logits = self.classifier(torch.tanh(self.pooler(self.embedding(ids).mean(1))))
        return nn.functional.cross_entropy(logits, labels), logits


def train(args, train_dataset, model):
    distributed = args.local_rank != -1
    train_sampler = DistributedSampler(train_dataset) if distributed else RandomSampler(train_dataset)
    train_dataloader = DataLoader(train_dataset, sampler=train_sampler, batch_size=args.per_gpu_train_batch_size)
    if distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, eps=args.adam_epsilon)
    global_step, tr_loss = 0, 0.0
    for epoch in range(args.num_train_epochs):
        if distributed:
            train_sampler.set_epoch(epoch)
        for batch in train_dataloader:
            model.train()
            loss, _ = model(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            model.zero_grad()
            tr_loss += loss.item()
            global_step += 1
    return global_step, tr_loss / global_step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_gpu_train_batch_size", default=16, type=int)
    parser.add_argument("--learning_rate", default=1e-2, type=float)
    parser.add_argument("--adam_epsilon", default=1e-8, type=float)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    parser.add_argument("--num_train_epochs", default=3, type=int)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", -1)), help="for distributed training")
    args = parser.parse_args()
    if args.local_rank != -1:
        torch.distributed.init_process_group(backend="gloo")
    set_seed(args)
    global_step, tr_loss = train(args, load_examples(args), Model())
    print(f" local_rank = {args.local_rank}, global_step = {global_step}, average loss = {tr_loss:.4f}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
