"""Communication: the mesh of ranks, collectives from send and receive, and the calls that all use.

1. The mesh. A rank is a number; written in a number system whose digits have the sizes of the
   axes, its digits are its coordinates. Along an axis lie the ranks that differ in one digit:

       dp=2, fsdp=2, tp=2      rank 5 = (dp 1, fsdp 0, tp 1)
       tp: {0 1} {2 3} {4 5} {6 7}   fsdp: {0 2} {1 3} {4 6} {5 7}   dp: {0 4} {1 5} {2 6} {3 7}

2. The collectives, built from send and receive: what they cost, and that it is no magic.
3. The functions that every technique calls: torch.distributed's own, each with its gradient and an
   asynchronous form, and counted in a ledger: the textbook's bytes per rank.

N ranks along the axis, B bytes of the whole (unsharded) tensor. What backward sends:

    forward                     backward                     bytes per rank, each way
    identity                    all-reduce                   2 B (N-1)/N
    all-reduce                  identity                     2 B (N-1)/N
    all-gather                  reduce-scatter               B (N-1)/N
    own slice (scatter)         all-gather                   B (N-1)/N
    all-to-all                  all-to-all, splits swapped   what goes to others

Sources: Thakur, Rabenseifner, Gropp 2005 (costs), Megatron-LM (arXiv 1909.08053, f and g), ring
all-reduce (Patarasuk, Yuan 2009).
Course: 04:32:59 autograd and distributed training, 08:37:34 device meshes, 09:48:52 collectives,
10:49:41 implementing device meshes.

    python collectives.py            the mesh, every collective and gradient on 3 ranks; PASS
    python collectives.py --bench    ours beside torch's, 4 KB to 32 MB, 2 to 8 ranks
"""
import argparse
import contextlib
import dataclasses
import datetime
import functools
import math
import os
import socket
import statistics
import sys
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# ---- 1. the mesh ----

AXES = ("pp", "dp", "fsdp", "cp", "tp")  # outermost first: tp's ranks are neighbours
EXPERT_AXES = ("pp", "dp", "efsdp", "ep", "etp")  # the same ranks, for the experts' parameters
TOGETHER = {"shard": ("fsdp", "cp"), "data": ("dp", "fsdp", "cp"), "batch": ("dp", "fsdp"),
            "world": AXES}  # several axes as one


@dataclasses.dataclass(frozen=True)
class Axis:
    """One line of ranks through this rank: its global `ranks`, and where this one stands."""
    name: str
    ranks: tuple
    rank: int
    group: object = None  # None: one rank alone, which needs no group
    timeout: object = None  # the group's, a timedelta; None: torch's default

    @property
    def size(self):
        return len(self.ranks)

    @property
    def on_gloo(self):
        return dist.get_backend(self.group) == "gloo"


def coordinates(rank, sizes):
    """The digits of `rank`, axis -> digit; sizes: axis -> size, outermost first."""
    digits = {}
    for axis in reversed(sizes):
        rank, digits[axis] = divmod(rank, sizes[axis])
    return {axis: digits[axis] for axis in sizes}


def rank_at(digits, sizes):
    """The inverse of coordinates()."""
    return functools.reduce(lambda rank, axis: rank * sizes[axis] + digits[axis], sizes, 0)


def ranks_along(rank, sizes, axes):
    """The ranks whose digits differ from those of `rank` on `axes` alone, in order."""
    mine = coordinates(rank, sizes)
    return tuple(other for other in range(math.prod(sizes.values()))
                 if all(digit == mine[axis] for axis, digit in coordinates(other, sizes).items()
                        if axis not in axes))


def mesh_sizes(world_size, pp=1, dp=None, fsdp=1, cp=1, tp=1, ep=1, etp=None):
    """Axis -> size for both views of the ranks, dp None: what is left over.

    Raises ValueError, with the product written out, when the axes do not make up world_size, or
    when the experts' axes do not fit into fsdp x cp x tp.
    """
    def product(sizes):
        return " x ".join(f"{axis} {size}" for axis, size in sizes.items()) + (
            f" = {math.prod(sizes.values())}")
    if dp is None:
        given = {"pp": pp, "fsdp": fsdp, "cp": cp, "tp": tp}
        dp, rest = divmod(world_size, math.prod(given.values()))
        if rest:
            raise ValueError(f"{product(given)} does not divide the {world_size} ranks; "
                             + nearest_sizes(world_size, given))
    sizes = {"pp": pp, "dp": dp, "fsdp": fsdp, "cp": cp, "tp": tp}
    needed = math.prod(sizes.values())
    if needed != world_size:
        raise ValueError(f"{product(sizes)} ranks, and there are {world_size}; "
                         + nearest_sizes(world_size, sizes))
    etp = (tp if ep == 1 else 1) if etp is None else etp
    whole = fsdp * cp * tp
    if etp not in (1, tp) or whole % (ep * etp):
        legal = "; ".join(f"with etp {size} use ep {one_of(divisors(whole // size))}"
                          for size in sorted({1, tp}))
        raise ValueError(f"ep {ep} x etp {etp} must divide fsdp x cp x tp = {whole}, and etp must "
                         f"be 1 or tp = {tp}: {legal}")
    return sizes, {"pp": pp, "dp": dp, "efsdp": whole // (ep * etp), "ep": ep, "etp": etp}


def nearest_sizes(world_size, wanted):
    """What to type instead of these sizes: as many ranks, or the nearest sizes that these ranks
    have; without "dp" in them whatever divides world_size."""
    def layouts(rest, axes):
        if not axes:
            return [{}] if rest == 1 or "dp" not in wanted else []
        return [{axes[0]: size, **more} for size in divisors(rest)
                for more in layouts(rest // size, axes[1:])]

    def distance(sizes):
        return sum(abs(math.log2(sizes[axis] / wanted[axis])) for axis in wanted)

    def flags(sizes):
        return " ".join(f"--{axis} {sizes[axis]}" for axis in wanted if sizes[axis] != wanted[axis])
    # of two that are as near the one that changes fewer axes
    found = sorted(layouts(world_size, list(wanted)), key=lambda sizes: (
        round(distance(sizes), 6), sum(sizes[axis] != wanted[axis] for axis in wanted)))
    ranks = f"{'' if 'dp' in wanted else 'a multiple of '}{math.prod(wanted.values())} ranks"
    return f"take {ranks}, or use " + "; or ".join(map(flags, found[:3]))


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


def one_of(numbers):
    """1, 2, 4 or 8"""
    return " or ".join(filter(None, (", ".join(map(str, numbers[:-1])), str(numbers[-1]))))


class Mesh:
    """mesh["fsdp"] is this rank's Axis of that name; so are "shard" (fsdp x cp), "data" (dp x
    fsdp x cp), "batch" (dp x fsdp), "world", and the experts' "efsdp", "ep", "etp" and "edata" (dp
    x efsdp: the ranks that hold the same experts and see other tokens).

    Every rank must make it, and makes only the groups that it is in: a group costs threads. Axes
    with the same ranks share a group, one of size 1 has none, and neither costs anything. Groups
    do not inherit the world's time limit: `timeout` (a timedelta) is theirs, else torch's default.
    Raises ValueError as mesh_sizes() does.
    """

    def __init__(self, world_size=1, rank=0, timeout=None, **sizes):
        self.sizes, self.expert_sizes = mesh_sizes(world_size, **sizes)
        self.rank, self.world_size = rank, world_size
        lines = {axis: ranks_along(rank, self.sizes, (axis,)) for axis in AXES}
        lines.update((name, ranks_along(rank, self.sizes, axes))
                     for name, axes in TOGETHER.items())
        lines.update((axis, ranks_along(rank, self.expert_sizes, (axis,)))
                     for axis in ("efsdp", "ep", "etp"))
        lines["edata"] = ranks_along(rank, self.expert_sizes, ("dp", "efsdp"))
        groups = {}
        for ranks in lines.values():
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = dist.group.WORLD if len(ranks) == world_size else dist.new_group(
                    ranks, timeout, use_local_synchronization=True)
        self.axes = {name: Axis(name, ranks, ranks.index(rank), groups.get(ranks), timeout)
                     for name, ranks in lines.items()}

    def __getitem__(self, name):
        return self.axes[name]

    @property
    def experts_apart(self):
        """Whether the experts are laid out by their own axes: else they are cut over tp and
        sharded as everything is."""
        return self["ep"].size > 1 or self["etp"].size < self["tp"].size

    def __str__(self):
        def product(sizes):
            return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1"
        return product(self.sizes) + (
            f" (experts: {product(self.expert_sizes)})" if self.experts_apart else "")


class MeshOnPaper(Mesh):
    """The mesh as `rank` would see it, with no process group: for planning. An axis tells its size
    and the rank's place along it; which ranks lie there is not known."""

    def __init__(self, world_size=1, rank=0, **sizes):
        self.sizes, self.expert_sizes = mesh_sizes(world_size, **sizes)
        self.rank, self.world_size, self.axes = rank, world_size, {}
        for view in (self.sizes, self.expert_sizes):
            place = coordinates(rank, view)
            lines = {**{axis: (axis,) for axis in view}, **(
                TOGETHER if view is self.sizes else {"edata": ("dp", "efsdp")})}
            for name, axes in lines.items():
                part = {axis: view[axis] for axis in axes}
                self.axes[name] = Axis(name, range(math.prod(part.values())), rank_at(place, part))


# ---- the label of a parameter ----

@dataclasses.dataclass(frozen=True)
class Cut:
    """Dimension `dim` is cut into `parts` over mesh axis `axis`, the last parts smaller or empty
    where it does not divide. With fewer parts than ranks, neighbours hold the same part."""
    axis: str
    dim: int
    parts: int


@dataclasses.dataclass(frozen=True)
class Label:
    """What a rank holds of a parameter: its full shape and the cuts, each of what the one before
    left. `partial`: axes over which its gradient is still a partial sum after backward, the first
    one "data", or "edata" for experts that have axes of their own."""
    shape: tuple
    cuts: tuple = ()
    partial: tuple = ("data",)


def label_of(parameter):
    """The parameter's label; one without is whole on every rank."""
    return getattr(parameter, "label", None) or Label(tuple(parameter.shape))


def local_region(label, mesh):
    """(start, length) in each dimension of the part of the full tensor that this rank holds."""
    region = [(0, size) for size in label.shape]
    for cut in label.cuts:
        axis, (start, length) = mesh[cut.axis], region[cut.dim]
        part = -(-length // cut.parts)
        offset = min(axis.rank * cut.parts // axis.size * part, length)
        region[cut.dim] = start + offset, min(part, length - offset)
    return region


def local_part(full, label, mesh):
    """A view of what this rank holds of `full`."""
    for dim, (start, length) in enumerate(local_region(label, mesh)):
        full = full.narrow(dim, start, length)
    return full


def counts_here(label, mesh):
    """Whether this rank is the first of those that hold its part: sums over parts count it here.

    Pipeline ranks hold different parameters; two hold a tied weight, whose gradient is partial over
    pp, and the first counts.
    """
    cut_by = {cut.axis: cut.parts for cut in label.cuts}
    cut_axes = {axis for name in cut_by for axis in TOGETHER.get(name, (name,))}
    if "pp" not in label.partial:
        cut_axes.add("pp")
    view = mesh.expert_sizes if cut_axes & set(EXPERT_AXES[2:]) else mesh.sizes
    if any(mesh[axis].rank for axis in view if axis not in cut_axes):
        return False
    return all(mesh[axis].rank * parts % mesh[axis].size == 0 for axis, parts in cut_by.items())


def on_grad_ready(parameter, function):
    """Have function(parameter) called when `parameter` has received its last contribution of a
    microbatch's backward pass: its .grad is then complete on this rank."""
    if not hasattr(parameter, "grad_listeners"):
        parameter.grad_listeners = []
        parameter.register_post_accumulate_grad_hook(grad_ready)
    parameter.grad_listeners.append(function)


def grad_ready(parameter):
    """The signal itself: sent after autograd has added up all uses of the parameter, or when a
    gradient that had to wait is there (for one that waits autograd's hook comes too: not yet)."""
    for function in getattr(parameter, "grad_listeners", ()) if parameter.grad is not None else ():
        function(parameter)


# ---- weight gradients that can wait ----
#
# Backward of y = x W computes grad x = grad y W^T, which the layer before is waiting for, and
# grad W = x^T grad y, which nobody needs before the step's end. A pipeline schedule does the second
# when the rank would idle.

queues = []  # of the backward passes under way that leave weight gradients for later: none, or one


@contextlib.contextmanager
def weights_wait(queue):
    """Backward passes in here put their weight gradients into the list `queue`, for drain()."""
    queues.append(queue)
    try:
        yield
    finally:
        queues.pop()


def weight_gradient(parameter, compute):
    """What a layer's backward returns for its weight: compute(), or None when that has to wait."""
    if not queues:
        return compute()
    queues[-1].append((parameter, compute))
    return None


@torch.no_grad()
def drain(queue):
    """Compute the gradients that waited, and say of each parameter that it is ready."""
    while queue:
        parameter, compute = queue.pop(0)
        grad = compute()
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        if not any(other is parameter for other, _ in queue):
            grad_ready(parameter)


class Linear(torch.autograd.Function):
    """x (..., i), weight (o, i) -> (..., o), as torch's, with a weight gradient that can wait."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach()  # what waits must not keep the graph that x came from
        return grad @ ctx.weight, weight_gradient(
            ctx.weight, lambda: grad.flatten(0, -2).T @ x.flatten(0, -2))


# ---- 2. the collectives, from send and receive ----
#
# Each rank calls them with the same shapes, and with `group` and `n` ranks in it. A message costs a
# start-up time, a byte a transfer time; the docstrings count both for the busiest rank, B bytes
# being the whole tensor.

def send_receive(group, sends, receives):
    """Post all of (tensor, peer) at once, then wait: two ranks that both sent first and received
    later would wait for each other as soon as the messages outgrow the socket's buffer."""
    works = [dist.irecv(tensor, group=group, group_src=peer) for tensor, peer in receives]
    works += [dist.isend(tensor, group=group, group_dst=peer) for tensor, peer in sends]
    for work in works:
        work.wait()


def tree_broadcast(tensor, source, group, rank, n):
    """ceil(log2 N) rounds; in each, every rank that has the tensor sends it to one that has not.
    log2 N messages, B log2 N bytes sent by the source (one after the other would be B (N-1))."""
    place = (rank - source) % n
    for reach in (2 ** i for i in range((n - 1).bit_length())):
        if place < reach and place + reach < n:
            send_receive(group, [(tensor, (rank + reach) % n)], [])
        elif reach <= place < 2 * reach:
            send_receive(group, [], [(tensor, (rank - reach) % n)])


def ring_reduce_scatter(tensor, group, rank, n):
    """This rank's n-th of the sum. N-1 messages, B (N-1)/N bytes: in each round a rank passes on
    the part that is on its way to its owner, having added its own."""
    parts = list(tensor.clone().chunk(n))
    for step in range(n - 1):
        leaving, arriving = (rank - step - 1) % n, (rank - step - 2) % n
        received = torch.empty_like(parts[arriving])
        send_receive(group, [(parts[leaving], (rank + 1) % n)], [(received, (rank - 1) % n)])
        parts[arriving] += received
    return parts[rank]


def ring_all_gather(shard, group, rank, n):
    """All shards in order. N-1 messages, B (N-1)/N bytes: each part goes once round the ring."""
    parts = [torch.empty_like(shard) for _ in range(n)]
    parts[rank].copy_(shard)
    for step in range(n - 1):
        leaving, arriving = (rank - step) % n, (rank - step - 1) % n
        send_receive(group, [(parts[leaving], (rank + 1) % n)],
                     [(parts[arriving], (rank - 1) % n)])
    return torch.cat(parts)


def ring_all_reduce(tensor, group, rank, n):
    """The sum, on every rank: reduce-scatter, then all-gather. 2 (N-1) messages, 2 B (N-1)/N bytes,
    fewer than two tensors however many ranks there are. What does not divide is padded."""
    flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % n))
    full = ring_all_gather(ring_reduce_scatter(flat, group, rank, n), group, rank, n)
    return full[:tensor.numel()].view_as(tensor)


def pairwise_all_to_all(parts, group, rank, n):
    """parts[j] goes to rank j; returns what came from each. N-1 messages, and the bytes of all
    parts but the own: in round i with the ranks i further and i before."""
    received = [torch.empty_like(part) for part in parts]
    received[rank].copy_(parts[rank])
    for i in range(1, n):
        to, source = (rank + i) % n, (rank - i) % n
        send_receive(group, [(parts[to], to)], [(received[source], source)])
    return received


def gather_to(tensor, root, group, rank, n):
    """All ranks' tensors on `root`, None elsewhere. N-1 messages and B (N-1)/N bytes into root,
    which is why nothing here gathers when an all-gather or a reduction will do."""
    if rank != root:
        send_receive(group, [(tensor, root)], [])
        return None
    parts = [torch.empty_like(tensor) for _ in range(n)]
    parts[rank].copy_(tensor)
    send_receive(group, [], [(parts[i], i) for i in range(n) if i != root])
    return torch.stack(parts)


def scatter_from(parts, like, root, group, rank, n):
    """root's parts[j] on rank j, shaped as `like`. N-1 messages, B (N-1)/N bytes out of root."""
    if rank == root:
        send_receive(group, [(parts[i], i) for i in range(n) if i != root], [])
        return parts[root].clone()
    received = torch.empty_like(like)
    send_receive(group, [], [(received, root)])
    return received


def token_barrier(group, rank, n):
    """Returns after every rank has called it. ceil(log2 N) messages of one byte: in round i a rank
    tells the one 2^i further that it, and all it has heard of, is here."""
    for reach in (2 ** i for i in range((n - 1).bit_length())):
        token, heard = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        send_receive(group, [(token, (rank + reach) % n)], [(heard, (rank - reach) % n)])


# ---- 3. what the techniques call ----

class CollectiveError(RuntimeError):
    """A collective failed or took longer than the group's timeout; the message says which rank
    noticed, in which operation."""


class Ledger:
    """Textbook bytes that this rank sent, (axis, operation) -> [calls, bytes], and what it waits
    for now: (operation, axis, since), or None."""

    def __init__(self):
        self.entries, self.waiting = {}, None

    def add(self, axis, operation, sent_bytes):
        entry = self.entries.setdefault((axis.name, operation), [0, 0])
        entry[0] += 1
        entry[1] += sent_bytes

    def by_axis(self):
        """Axis -> bytes since the last clear()."""
        totals = {}
        for (axis, _), (_, sent) in self.entries.items():
            totals[axis] = totals.get(axis, 0) + sent
        return totals

    def clear(self):
        self.entries.clear()


ledger = Ledger()  # one a process, as there is one network


class Pending:
    """A communication under way. wait() returns its result, the same every time."""

    def __init__(self, axis, operation, works, finish):
        self.axis, self.operation, self.works, self.finish = axis, operation, works, finish

    def wait(self):
        if self.works is not None:
            with attributed(self.axis, self.operation):
                for work in self.works:
                    work.wait()
            self.result, self.works, self.finish = self.finish(), None, None
        return self.result


class attributed:
    """Context: a failure inside is told with the rank, the operation and its axis. What may take
    long for other reasons than another rank's absence (writing files) is not `watched`, nor is what
    another thread waits for."""

    def __init__(self, axis, operation, watched=True):
        self.axis, self.operation, self.watched = axis, operation, watched

    def __enter__(self):
        self.since = time.monotonic()
        if self.watched:
            ledger.waiting = self.operation, self.axis.name, self.since

    def __exit__(self, kind, error, trace):
        if self.watched:
            ledger.waiting = None
        if kind is not None and issubclass(kind, RuntimeError):
            raise CollectiveError(
                f"rank {dist.get_rank()}: {self.operation} over {self.axis.name} (ranks "
                f"{', '.join(map(str, self.axis.ranks))}) failed after "
                f"{time.monotonic() - self.since:.0f} s: {str(error).splitlines()[0]}") from None


def check_contiguous(tensor, axis, operation):
    """gloo reduces a tensor with holes to wrong numbers and says nothing."""
    if not tensor.is_contiguous():
        raise ValueError(f"{operation} over {axis.name}: a tensor of shape {list(tensor.shape)} "
                         f"and stride {list(tensor.stride())} is not contiguous; give "
                         "tensor.contiguous()")


def direct_all_gather(out, shard, axis):
    """Works that fill out (N, numel): each rank sends its shard to every other one.

    The ring's bytes without its N-1 rounds of waiting: gloo's own takes 1.4 to 3 times as long
    (2 to 4 ranks, 4 KB to 8 MB).
    """
    others = [(axis.rank + i) % axis.size for i in range(1, axis.size)]
    works = [dist.irecv(out[peer], group=axis.group, group_src=peer) for peer in others]
    works += [dist.isend(shard, group=axis.group, group_dst=peer) for peer in others]
    out[axis.rank].copy_(shard.flatten())
    return works


def carry_out(axis, operation, tensor, sent_bytes, start, asynchronous):
    """The way of every call: an axis of one rank costs nothing; else check, count, and start() ->
    (works, finish), whose finish() makes the result when all works are done. Returns the result,
    or a Pending. `tensor` is what goes in, and the result on an axis of one."""
    if axis.size == 1:
        pending = Pending(axis, operation, [], lambda: tensor)
    else:
        check_contiguous(tensor, axis, operation)
        ledger.add(axis, operation, sent_bytes)
        with attributed(axis, operation):
            pending = Pending(axis, operation, *start())
    return pending if asynchronous else pending.wait()


SMALL = 2 ** 15  # bytes up to which gathering all and adding them up here beats gloo's ring


def all_reduce(tensor, axis, op="sum", asynchronous=False):
    """The sum (or "max") over the axis, in place. 2 B (N-1)/N bytes per rank, B padded to N parts.

    On gloo small tensors are gathered and added up here: 1.1 to 2.5 times faster up to 32 KB.
    """
    n, size, width = axis.size, tensor.numel(), tensor.element_size()

    def start():
        """The backend's own, or each rank's tensor to every other one."""
        if not axis.on_gloo or size * width > SMALL:
            kind = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
            return [dist.all_reduce(tensor, kind, axis.group, async_op=True)], lambda: tensor
        parts = tensor.new_empty(n, size)
        works = direct_all_gather(parts, tensor, axis)

        def finish():  # in the order of the ranks: every rank gets the same bits
            total = parts.sum(0) if op == "sum" else parts.amax(0)
            return tensor.copy_(total.view_as(tensor))
        return works, finish
    return carry_out(axis, "all_reduce", tensor, 2 * (n - 1) * -(-size // n) * width, start,
                     asynchronous)


def all_gather(shard, axis, asynchronous=False):
    """shard (s, ...) -> (N s, ...), in the order of the ranks. B (N-1)/N bytes per rank."""
    n = axis.size

    def start():
        out = shard.new_empty(n * shard.shape[0], *shard.shape[1:])
        works = (direct_all_gather(out.view(n, -1), shard, axis) if axis.on_gloo else
                 [dist.all_gather_into_tensor(out, shard, axis.group, async_op=True)])
        return works, lambda: out
    return carry_out(axis, "all_gather", shard, (n - 1) * shard.numel() * shard.element_size(),
                     start, asynchronous)


def reduce_scatter(full, axis, asynchronous=False):
    """full (N s, ...) -> this rank's (s, ...) of the sum. B (N-1)/N bytes per rank.

    On gloo as an all-to-all and a sum in the order of the ranks: gloo's own takes 2 to 4 times as
    long (2 to 8 ranks, 4 KB to 16 MB).
    """
    n, shape = axis.size, (full.shape[0] // axis.size, *full.shape[1:])

    def start():
        if axis.on_gloo:
            received = torch.empty_like(full)
            works = [dist.all_to_all_single(received, full, group=axis.group, async_op=True)]
            return works, lambda: received.view(n, *shape).sum(0)
        out = full.new_empty(shape)
        return [dist.reduce_scatter_tensor(out, full, group=axis.group, async_op=True)], lambda: out
    return carry_out(axis, "reduce_scatter", full,
                     (n - 1) * full.numel() // n * full.element_size(), start, asynchronous)


def all_to_all(rows, axis, input_splits, output_splits, asynchronous=False):
    """rows (sum of input_splits, ...): the i-th stretch goes to rank i, and output_splits[i] rows
    come from it. Bytes: the rows that go to other ranks."""
    if axis.size > 1 and sum(input_splits) != len(rows):
        raise ValueError(f"all_to_all over {axis.name}: input_splits {list(input_splits)} add up "
                         f"to {sum(input_splits)}, and there are {len(rows)} rows")

    def start():
        out = rows.new_empty(sum(output_splits), *rows.shape[1:])
        return [dist.all_to_all_single(out, rows, list(output_splits), list(input_splits),
                                       axis.group, async_op=True)], lambda: out
    leaving = len(rows) - input_splits[axis.rank]
    return carry_out(axis, "all_to_all", rows, leaving * rows[:1].numel() * rows.element_size(),
                     start, asynchronous)


def send(tensor, link):
    """Start sending to the second of a link's two ranks: a Pending. B bytes. On one link messages
    arrive in the order in which they were sent."""
    def start():
        works = [dist.isend(tensor, link.ranks[1], link.group)] if tensor.numel() else []
        return works, lambda: tensor
    return carry_out(link, "send", tensor, tensor.numel() * tensor.element_size(), start, True)


def receive(tensor, link):
    """Start filling `tensor` with the next message of the link's first rank: a Pending."""
    def start():
        works = [dist.irecv(tensor, link.ranks[0], link.group)] if tensor.numel() else []
        return works, lambda: tensor
    return carry_out(link, "receive", tensor, 0, start, True)


def ring_shift(tensor, axis, arriving, asynchronous=True):
    """tensor to the next rank of the axis, and `arriving` numbers, flat, from the one before it.
    B bytes. Both are posted in one call: on nccl two ranks that each wait to receive before they
    send would wait for ever."""
    def start():
        out = tensor.new_empty(arriving)
        ends = [dist.P2POp(dist.irecv, out, group=axis.group,
                           group_peer=(axis.rank - 1) % axis.size),
                dist.P2POp(dist.isend, tensor, group=axis.group,
                           group_peer=(axis.rank + 1) % axis.size)]
        return dist.batch_isend_irecv(ends), lambda: out
    return carry_out(axis, "ring", tensor, tensor.numel() * tensor.element_size(), start,
                     asynchronous)


def broadcast(tensor, axis, source=0, asynchronous=False):
    """The tensor of the axis' rank `source` on all, in place. B bytes."""
    def start():
        return [dist.broadcast(tensor, group=axis.group, group_src=source,
                               async_op=True)], lambda: tensor
    return carry_out(axis, "broadcast", tensor, tensor.numel() * tensor.element_size(), start,
                     asynchronous)


# ---- the same with gradients ----

class Pair(torch.autograd.Function):
    """forward(x) on the way, backward(grad) on the way back."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.way_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.way_back(grad.contiguous()), None, None


def gather_dim(x, axis, dim):
    """all_gather() along dimension `dim`."""
    return all_gather(x.contiguous()[None], axis).movedim(0, dim).flatten(dim, dim + 1)


def parts_along(x, axis, dim):
    """x cut into equal parts along dimension `dim`, one for each rank: (N, ...), contiguous."""
    return x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0).contiguous()


def reduce_scatter_dim(x, axis, dim):
    """reduce_scatter() along dimension `dim`."""
    return reduce_scatter(parts_along(x, axis, dim), axis)[0]


def own_slice(x, axis, dim):
    if x.shape[dim] % axis.size:
        raise ValueError(f"dimension {dim} of {list(x.shape)} is not divisible by {axis.name}="
                         f"{axis.size}")
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def copy_to_ranks(x, axis):
    """The same x used on every rank, each for a part of the work (Megatron's f).
    Forward: nothing. Backward: all-reduce of the parts' gradients."""
    return Pair.apply(x, lambda x: x.view_as(x), lambda grad: all_reduce(grad.clone(), axis))


def sum_over_ranks(x, axis):
    """Partial sums become the sum (Megatron's g). Forward: all-reduce. Backward: nothing."""
    return Pair.apply(x, lambda x: all_reduce(x.contiguous().clone(), axis),
                      lambda grad: grad.view_as(grad))


def gather_along(x, axis, dim=0):
    """Shards become the whole, used on every rank for a part of the work.
    Forward: all-gather. Backward: reduce-scatter."""
    return Pair.apply(x, lambda x: gather_dim(x, axis, dim),
                      lambda grad: reduce_scatter_dim(grad, axis, dim))


def reduce_scatter_along(x, axis, dim=0):
    """Partial sums become shards of the sum. Forward: reduce-scatter. Backward: all-gather."""
    return Pair.apply(x, lambda x: reduce_scatter_dim(x, axis, dim),
                      lambda grad: gather_dim(grad, axis, dim))


def scatter_along(x, axis, dim=0):
    """This rank's slice of what all ranks hold. Forward: nothing is sent. Backward: all-gather."""
    return Pair.apply(x, lambda x: own_slice(x, axis, dim),
                      lambda grad: gather_dim(grad, axis, dim))


def join_along(x, axis, dim=0):
    """Slices become the whole, on which every rank then does the same work.
    Forward: all-gather. Backward: this rank's slice; nothing is sent."""
    return Pair.apply(x, lambda x: gather_dim(x, axis, dim),
                      lambda grad: own_slice(grad, axis, dim))


def exchange_rows(x, axis, input_splits, output_splits):
    """all_to_all(). Backward: all_to_all with the splits swapped."""
    return Pair.apply(x, lambda x: all_to_all(x, axis, input_splits, output_splits),
                      lambda grad: all_to_all(grad, axis, output_splits, input_splits))


# ---- ranks of one's own, for demonstrations ----

def leave(code):
    """End a rank's process. Python's own way frees things while the group's threads still hold
    tensors; one that then asks for Python aborts the process, rarely, after all was done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def spawn(function, n, *args, timeout=120, legal=()):
    """Run function(rank, n, *args) on n gloo processes of this machine, one thread each; returns
    the largest exit code that they returned. Under torchrun, the process is one of the ranks that
    it started, and ends with the function's exit code; where `legal` are the numbers of ranks that
    the function can do with, others are refused."""
    if "RANK" in os.environ:
        started = int(os.environ["WORLD_SIZE"])
        if legal and started not in legal:
            program = os.path.basename(sys.argv[0])
            return refuse(program, f"torchrun has started {started} ranks; use --nproc-per-node "
                          f"{one_of(legal)}, or python {program}")
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        code = function(dist.get_rank(), dist.get_world_size(), *args) or 0
        dist.destroy_process_group()
        leave(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # A forked child need not import torch, which takes seconds; only Linux forks safely
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    processes = [context.Process(target=_spawned, args=(function, rank, n, port, timeout, args))
                 for rank in range(n)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


def refuse(program, error):
    """What was asked can't be: rank 0 says why, in one line. Returns the exit code."""
    rank = int(os.environ.get("RANK", 0))
    if rank:  # torchrun ends this one as soon as rank 0 has said the same, but not before
        time.sleep(10)
    print(f"{program}: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr)
    return 2


def _spawned(function, rank, n, port, timeout, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                                world_size=n, timeout=datetime.timedelta(seconds=timeout))
        code = function(rank, n, *args) or 0
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def difference(a, b):
    """max |a - b| / max |b|."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item()


def verdict(rank, worst, tolerance=1e-12):
    """Print what differed most and PASS or FAILED, on rank 0; returns the exit code. worst: what
    was compared -> this rank's largest difference (1.0 for a mismatch). The ranks' are merged."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, worst)
    merged = {what: max(found[what] for found in everywhere) for what in worst}
    failed = [what for what, value in merged.items() if not value <= tolerance]
    if rank == 0:
        for what, value in merged.items():
            print(f"{value:8.1e}  {what}")
        print(f"FAILED: {', '.join(failed)}" if failed or not merged else "PASS")
    return 1 if failed or not merged else 0


def paired_ratio(a, b, rounds=9):
    """Seconds of a() over those of b(), run in turn: the median ratio with its 95 % interval, and
    a()'s median seconds. On several ranks each round starts together."""
    ratios, times = [], []
    for i in range(rounds + 1):
        seconds = []
        for function in ((a, b) if i % 2 else (b, a)):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        if i:
            ours, theirs = seconds if i % 2 else seconds[::-1]
            ratios.append(ours / theirs)
            times.append(ours)
    ratios.sort()
    reach = math.ceil(0.98 * math.sqrt(rounds))  # order statistics: half +- 1.96 sqrt(n) / 2
    low, high = ratios[max(rounds // 2 - reach, 0)], ratios[min(rounds // 2 + reach, rounds - 1)]
    return f"{statistics.median(ratios):.2f} [{low:.2f}, {high:.2f}]", statistics.median(times)


# ---- demonstration and benchmark ----

def check_collectives(rank, n, worst):
    """Every collective of part 2 beside torch's, on data that differs from rank to rank."""
    group, data = dist.group.WORLD, torch.randn(4 * n, 3, dtype=torch.float64)
    expected = data.clone()
    dist.all_reduce(expected)
    worst["ring all-reduce"] = difference(ring_all_reduce(data, group, rank, n), expected)
    worst["ring reduce-scatter"] = difference(ring_reduce_scatter(data, group, rank, n),
                                              expected.chunk(n)[rank])
    gathered = data.new_empty(n * len(data), 3)
    dist.all_gather_into_tensor(gathered, data)
    worst["ring all-gather"] = difference(ring_all_gather(data, group, rank, n), gathered)
    received = torch.empty_like(data)
    dist.all_to_all_single(received, data)
    parts = pairwise_all_to_all(list(data.chunk(n)), group, rank, n)
    worst["pairwise all-to-all"] = difference(torch.cat(parts), received)
    root, copy, sent = n - 1, data.clone(), data.clone()
    tree_broadcast(copy, root, group, rank, n)
    dist.broadcast(sent, root)
    worst["tree broadcast"] = difference(copy, sent)
    stacked = gather_to(data, root, group, rank, n)
    right = stacked is None if rank != root else torch.equal(stacked.flatten(0, 1), gathered)
    worst["gather"] = float(not right)
    mine = scatter_from(stacked, data, root, group, rank, n)
    worst["scatter"] = difference(mine, data)  # what was gathered comes back
    token_barrier(group, rank, n)


def check_gradients(rank, n, axis, worst):
    """Each pair against autograd in one process, which holds all ranks' tensors at once."""
    inputs = [torch.randn(2 * n, n, dtype=torch.float64, requires_grad=True) for _ in range(n)]
    pulls = [torch.randn(2 * n, 2 * n * n, dtype=torch.float64) for _ in range(n)]
    splits = [[(i + j) % 3 for j in range(n)] for i in range(n)]  # uneven, some 0
    splits = [row + [2 * n - sum(row)] for row in [s[:-1] for s in splits]]
    pieces = [x.split(row) for x, row in zip(inputs, splits)]
    same = inputs[0]  # what all ranks hold alike
    cases = {
        "identity / all-reduce": (same, lambda x: copy_to_ranks(x, axis), lambda r: same),
        "all-reduce / identity": (inputs[rank], lambda x: sum_over_ranks(x, axis),
                                  lambda r: sum(inputs)),
        "all-gather / reduce-scatter": (inputs[rank], lambda x: gather_along(x, axis, 1),
                                        lambda r: torch.cat(inputs, 1)),
        "reduce-scatter / all-gather": (inputs[rank], lambda x: reduce_scatter_along(x, axis, 0),
                                        lambda r: sum(inputs).chunk(n)[r]),
        "scatter / gather": (same, lambda x: scatter_along(x, axis, 1),
                             lambda r: same.chunk(n, 1)[r]),
        "gather / scatter": (inputs[rank], lambda x: join_along(x, axis, 0),
                             lambda r: torch.cat(inputs)),
        "all-to-all, uneven": (inputs[rank], lambda x: exchange_rows(
            x, axis, splits[rank], [row[rank] for row in splits]),
            lambda r: torch.cat([p[r] for p in pieces]))}
    for name, (x, ours, whole) in cases.items():
        out, references = ours(x), [whole(r) for r in range(n)]
        worst[name] = difference(out, references[rank])
        # "all-reduce / identity" and "gather / scatter": every rank does the same work after it,
        # so one process does it once; the others' parts of the work add up.
        alike = name in ("all-reduce / identity", "gather / scatter")
        pull = [pulls[0 if alike else r].flatten()[:ref.numel()].view_as(ref)
                for r, ref in enumerate(references)]
        gradient, = torch.autograd.grad(out, x, pull[rank])
        whole_loss = sum((a * b).sum() for a, b in list(zip(references, pull))[:1 if alike else n])
        expected, = torch.autograd.grad(whole_loss, x)
        worst[name + ", gradient"] = difference(gradient, expected)


def show(rank, n):
    """The mesh of 12 ranks, then every collective and gradient on the ranks that are here."""
    sizes, experts = mesh_sizes(12, dp=1, fsdp=3, cp=2, tp=2, ep=4, etp=1)
    if rank == 0:
        print("12 ranks as fsdp 3 x cp 2 x tp 2, and for the experts as efsdp 3 x ep 4:")
        for r in (0, 7, 11):
            print(f"  rank {r:2}: " + "  ".join(
                f"{axis} {digit} of {ranks_along(r, sizes, (axis,))}"
                for axis, digit in coordinates(r, sizes).items() if sizes[axis] > 1)
                + f"  ep: {ranks_along(r, experts, ('ep',))}")
    worst = {"coordinates and back": float(any(
        rank_at(coordinates(r, s), s) != r for s in (sizes, experts) for r in range(12)))}
    torch.manual_seed(rank)
    check_collectives(rank, n, worst)
    torch.manual_seed(0)
    axis = Mesh(n, rank, fsdp=n)["fsdp"]
    ledger.clear()
    check_gradients(rank, n, axis, worst)
    if rank == 0:
        print("bytes that this rank sent, by the textbook: " + ", ".join(
            f"{operation} {sent:,} in {calls} calls"
            for (_, operation), (calls, sent) in ledger.entries.items()))
        print(f"largest difference from torch's collectives and from one process, {n} ranks:")
    return verdict(rank, worst)


def time_collectives(rank, n):
    """A table of ours / torch's, with the ring from part 2 beside it."""
    axis, group = Mesh(n, rank, fsdp=n)["fsdp"], dist.group.WORLD
    for size in (2 ** 12, 2 ** 16, 2 ** 20, 2 ** 23, 2 ** 25):
        full = torch.ones(size // 4 // n * n)
        shard, out, small = full[:len(full) // n], torch.empty_like(full), full[::n].clone()
        cases = {
            "all_reduce": (lambda: all_reduce(full, axis), lambda: dist.all_reduce(full),
                           lambda: ring_all_reduce(full, group, rank, n)),
            "all_gather": (lambda: all_gather(shard, axis),
                           lambda: dist.all_gather_into_tensor(out, shard),
                           lambda: ring_all_gather(shard, group, rank, n)),
            "reduce_scatter": (lambda: reduce_scatter(full, axis),
                               lambda: dist.reduce_scatter_tensor(small, full),
                               lambda: ring_reduce_scatter(full, group, rank, n))}
        for name, (ours, torchs, ring) in cases.items():
            rounds = 9 if size < 2 ** 23 else 5
            ratio, seconds = paired_ratio(ours, torchs, rounds)
            ring_ratio, _ = paired_ratio(ring, torchs, rounds)
            if rank == 0:
                print(f"{n:5} {size // 1024:8,} KB  {name:15}{seconds * 1e3:9.2f} ms"
                      f"{ratio:>22}{ring_ratio:>22}", flush=True)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    if not flags.parse_args().bench:
        sys.exit(spawn(show, 3))
    print("ranks      size  operation             ours     ours / torch's   part 2's / torch's")
    sys.exit(max(spawn(time_collectives, n) for n in (2, 4, 8)))
