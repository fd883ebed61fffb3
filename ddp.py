"""Data parallelism: every rank holds the whole model and works on its own part of the batch.

    rank 0   sequences 0..3   forward, backward -> gradients \\
    rank 1   sequences 4..7   forward, backward -> gradients  > all-reduce -> the same sums -> step
    rank 2   sequences 8..11  forward, backward -> gradients /

Gradients are summed, never averaged: each rank's backward is seeded with 1 / (valid tokens of the
global batch), so the sum over ranks is the gradient of one process.

Reducing each gradient by itself would pay a start-up time per parameter, reducing all at the end
would leave the network idle during backward. So gradients live in a few flat buckets, filled in the
order in which backward makes them (the reverse of the order of use), and a bucket is reduced while
backward goes on with the next one. With several microbatches a step only the last one reduces.

Bytes per rank and step: 2 P (N-1)/N, P the bytes of all gradients (float32, also under bf16: sums
in 16 bits round at every hop). Memory: everything N times over, which is what fsdp.py is about.

Source: PyTorch Distributed (arXiv 2006.15704). Course: 05:04:19 distributed computation graphs and
DDP, 10:49:41 implementing DDP; course C: data parallelism.

    python ddp.py            3 ranks, gradients and weights beside one process; PASS
    python ddp.py --bench    a step beside torch's DistributedDataParallel, 2 and 4 ranks
"""
import argparse
import math
import sys

import torch
from torch import nn

from collectives import (Mesh, all_reduce, broadcast, difference, label_of, ledger, on_grad_ready,
                         paired_ratio, spawn, verdict)

BUCKET_BYTES = 25 * 2 ** 20  # large enough that start-up times vanish, small enough to overlap
FIRST_BUCKET_BYTES = 2 ** 20  # backward has only begun when it is full, and the network is idle


class Bucket:
    """A flat stretch of gradients that is reduced in one call."""

    def __init__(self, parameters, axis, dtype):
        size, self.axis = sum(p.numel() for p in parameters), axis
        self.flat = parameters[0].new_zeros(size + -size % axis.size, dtype=dtype)  # what is sent
        pieces = self.flat[:size].split([p.numel() for p in parameters])
        self.views = {p: piece.view_as(p) for p, piece in zip(parameters, pieces)}
        self.missing, self.pending = {}, None


def fill_buckets(parameters, kind_of):
    """[((axis, type), parameters)]: buckets in the order in which backward finishes the parameters,
    each of one type and of one axis, which kind_of(parameter) tells."""
    buckets, filling = [], {}  # kind -> the bucket's parameters so far
    for p in parameters:
        kind = kind_of(p)
        waiting = filling.setdefault(kind, [])
        waiting.append(p)
        limit = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
        if sum(map(even_size, waiting)) * kind[1].itemsize >= limit:
            buckets.append((kind, filling.pop(kind)))
    return buckets + list(filling.items())


def bytes_sent(parameters, kind_of):
    """Bytes that a rank sends a step: {axis name: bytes}, each bucket padded to the axis' size.
    Arguments as fill_buckets() has them."""
    sent = {}
    for (axis, dtype), held in fill_buckets(parameters, kind_of):
        part = -(-sum(p.numel() for p in held) // axis.size)
        sent[axis.name] = sent.get(axis.name, 0) + 2 * (axis.size - 1) * part * dtype.itemsize
    return sent


class Replicas:
    """Gradients of `model` summed over the ranks of `axis`, in buckets, while backward runs.

    masters: parameter -> the tensor that the optimizer updates (itself, or its float32 master);
    after finish() its .grad is the sum, a view of a bucket. Ranks start equal:
    parameters, masters and buffers are broadcast from the axis' first rank. A parameter that no
    rank used has a gradient of zeros; one that some did not use is reduced after backward.
    twice: parameters that get two contributions a microbatch, a tied weight whose uses lie in two
    stages of a pipeline.
    Experts whose label names "edata" are summed over `expert_axis`, in buckets of their own.
    """

    def __init__(self, model, axis, masters=None, twice=(), expert_axis=None):
        named = [p for p in model.parameters() if p.requires_grad]  # a tied weight comes once
        self.masters = masters or {p: p for p in named}
        self.axis, self.expert_axis, self.twice = axis, expert_axis, set(twice)
        # in float32 a parameter is its own master: once is enough
        for tensor in dict.fromkeys([*model.parameters(), *self.masters.values(),
                                     *model.buffers()]):
            broadcast(tensor.detach(), self.axis_of(tensor))
        self.buckets = [Bucket(parameters, *kind) for kind, parameters in fill_buckets(
            named[::-1], lambda p: (self.axis_of(p), self.masters[p].dtype))]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        for p in named:
            on_grad_ready(p, self.add)
        self.touched, self.launched = set(), 0

    def axis_of(self, tensor):
        """The ranks that hold the same part of a tensor and see other tokens."""
        return self.expert_axis if "edata" in label_of(tensor).partial else self.axis

    def start(self, microbatches):
        """Before a step of so many microbatches: each parameter gets as many contributions."""
        self.launched = 0
        for bucket in self.buckets:
            bucket.missing = {p: microbatches * (2 if p in self.twice else 1)
                              for p in bucket.views}

    @torch.no_grad()
    def add(self, parameter):
        """A microbatch's gradient is complete: put it into the bucket, or add it, and free it. With
        the last one of all the bucket's parameters the bucket goes.

        The first is copied, since zeros would have to be written before it could be added.
        """
        bucket = self.bucket_of[parameter]
        if parameter in self.touched:
            bucket.views[parameter].add_(parameter.grad)
        else:
            bucket.views[parameter].copy_(parameter.grad)
            self.touched.add(parameter)
        parameter.grad = None
        bucket.missing[parameter] -= 1
        while self.launched < len(self.buckets) and not any(
                self.buckets[self.launched].missing.values()):
            self._launch()

    def _launch(self):
        """Reduce the next bucket; always in the same order, or ranks would mix up their buckets."""
        bucket = self.buckets[self.launched]
        for parameter, view in bucket.views.items():
            if parameter not in self.touched:
                view.zero_()
        bucket.pending = all_reduce(bucket.flat, bucket.axis, asynchronous=True)
        self.launched += 1

    def finish(self):
        """After the step's last microbatch: reduce what is left; the masters' .grad become the
        sums."""
        while self.launched < len(self.buckets):
            self._launch()
        for bucket in self.buckets:
            bucket.pending.wait()
            for parameter, view in bucket.views.items():
                self.masters[parameter].grad = view
        self.touched.clear()


def even_size(parameter):
    """Numbers of a rank's part if cuts were even: the same on every rank, as the bounds of buckets
    must be. Ranks that share experts may differ in tp, and so in the sizes of their parts."""
    label = label_of(parameter)
    return math.prod(label.shape) // math.prod(cut.parts for cut in label.cuts)


# ---- demonstration ----

class Toy(nn.Module):
    """A small network with everything that is awkward: a tied weight, one that only some ranks
    use, one that none uses, and sizes that do not divide."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.sometimes = nn.Linear(5, 5)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, tokens, use):
        x = torch.tanh(self.hidden(self.embed(tokens)))
        x = x + self.sometimes(x) if use else x
        return x @ self.embed.weight.T


def toy_loss(model, tokens, labels, use):
    return nn.functional.cross_entropy(model(tokens, use).flatten(0, 1), labels.flatten(),
                                       reduction="sum")


def show(rank, n):
    """Two SGD steps of two microbatches on n ranks, beside the same in one process."""
    def made():
        torch.manual_seed(0)
        return Toy().double()
    batch = torch.randint(7, (2, 2, n, 4, 6), generator=torch.Generator().manual_seed(1))
    model, alone = made(), made()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)  # as if started differently: the broadcast must mend it
    replicas = Replicas(model, Mesh(n, rank)["dp"])
    worst = {"starts equal": max(difference(a, b) for a, b in zip(model.parameters(),
                                                                  alone.parameters()))}
    ledger.clear()
    for step, microbatches in enumerate(batch):
        replicas.start(len(microbatches))
        for tokens in microbatches:  # (n, b, s)
            toy_loss(model, tokens[rank], tokens[rank].flip(-1), use=rank == step).backward()
            for r in range(n):
                toy_loss(alone, tokens[r], tokens[r].flip(-1), use=r == step).backward()
        replicas.finish()
        for (name, p), q in zip(model.named_parameters(), alone.parameters()):
            expected = torch.zeros_like(q) if q.grad is None else q.grad
            worst[f"step {step}, gradient of {name}"] = difference(p.grad, expected)
            p.data -= 0.1 * p.grad
            q.data -= 0.1 * expected
            p.grad = q.grad = None
    worst["weights"] = max(difference(a, b) for a, b in zip(model.parameters(),
                                                            alone.parameters()))
    size = sum(b.flat.numel() * 8 for b in replicas.buckets)
    sent = ledger.by_axis().get("dp", 0)
    worst["bytes are the textbook's"] = float(sent != 2 * 2 * size * (n - 1) // n)
    if rank == 0:
        print(f"{n} ranks, 2 steps of 2 microbatches; gradient buckets, in the order of backward:")
        names = {p: name for name, p in model.named_parameters()}
        for bucket in replicas.buckets:
            print("  " + ", ".join(names[p] for p in bucket.views))
        print(f"bytes sent per step: {sent // 2:,} = 2 P (N-1)/N of P = {size:,}")
    return verdict(rank, worst)


def bench_step(model, batch, masters, reducer=None):
    """One SGD step of `masters` on this rank's batch; without a reducer the model has its own."""
    if reducer:
        reducer.start(1)
    model(batch).square().mean().backward()
    if reducer:
        reducer.finish()
    with torch.no_grad():
        used = [p for p in masters if p.grad is not None]
        torch._foreach_add_(used, [p.grad for p in used], alpha=-1e-6)
    for p in used:
        p.grad = None


def dense_blocks():
    """About 10 M parameters in 10 blocks of two layers."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 1024, bias=False), nn.SiLU(),
                                         nn.Linear(1024, 512, bias=False)) for _ in range(10)))


def bench(rank, n, rounds):
    """Whole steps beside torch's DDP on the same model and data."""
    torch.manual_seed(0)
    ours, theirs = dense_blocks(), nn.parallel.DistributedDataParallel(dense_blocks())
    replicas = Replicas(ours, Mesh(n, rank)["dp"])
    batch = torch.randn(256, 512)
    ratio, seconds = paired_ratio(
        lambda: bench_step(ours, batch, list(ours.parameters()), replicas),
        lambda: bench_step(theirs, batch, list(theirs.parameters())), rounds)
    if rank == 0:
        print(f"{n} ranks: {seconds * 1e3:.0f} ms a step, {ratio} x torch's DDP", flush=True)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    if flags.parse_args().bench:
        sys.exit(max(spawn(bench, n, 15) for n in (2, 4)))
    sys.exit(spawn(show, 3))
