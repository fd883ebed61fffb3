"""Expert parallelism: each rank has some of the experts, and tokens travel to theirs and back.

    4 ranks, 8 experts: rank 0 has experts 0 1, rank 1 has 2 3, rank 2 has 4 5, rank 3 has 6 7

    token a on rank 0, whose router chose experts 1, 6, 7 with gate weights .5, .3, .2
      dispatch   rank 0 keeps a copy for (1: .5); one copy goes to rank 3 for (6: .3, 7: .2)
      experts    rank 0: .5 E1(a)                 rank 3: .3 E6(a) + .2 E7(a), one row
      combine    rank 3 sends its row back; rank 0 adds the rows of all copies

A token goes to a rank once, however many of its experts are there, with their local numbers and
gate weights beside it; the rank adds its experts' weighted results up and sends one row back.
Backward is the same way: gradients of the rows go out as the tokens did, gradients of tokens and
gate weights come back as the results did. The ranks first tell each other how many rows they will
send. While tokens travel, the shared experts compute; in backward too, as autograd goes back
through the nodes in the opposite order. Sums have a fixed order, so that runs repeat bit for bit.

Where the ranks come from: fsdp x cp x tp = efsdp x ep x etp. With etp = 1 each rank sends its own
sequence shard (tp cuts the sequence), and an expert is whole on its rank. With etp = tp an expert's
hidden width is cut over tp's ranks: each sends its own shard over ep, the tp ranks at the
destination gather what has come (as many rows as the fullest got), compute partial sums and
reduce-scatter them before the way back. Ranks that differ in dp or efsdp hold the same experts and
see other tokens: gradients are summed over those, "edata".

How many copies? With E experts in G groups of which a token may use M, a rank without any of its k
experts is one whose experts are all among those not chosen. All within the token's groups are
equally likely, S = M E / G of them; if the rank has s of these, C(S - s, k) / C(S, k) is that
chance. expected_copies() averages over the choice of groups. V3 (E 256, k 8, G 8, M 4) over 8
ranks: 3.63 copies a token in place of 8, at most 4 with any routing; without groups 5.29.

Bytes that a rank sends for C copies sent to others and R received from them, w bytes a number, v
bytes a gate weight, k' = min(k, experts a rank), forward and backward:

    C (2 d w + k' (v + w)) + R (2 d w + k' v) + 8 (ep - 1), the counts       over ep
    (etp - 1) (Rmax (4 d w + k' (2 v + w)) + 8)                             over etp = tp

Sources: GShard (arXiv 2006.16668), DeepSeek-V2 (2405.04434, 2.2.2: device-limited routing),
DeepSeek-V3 (2412.19437, 2.1.2 node-limited routing, 3.2.2 all-to-all), folding (2504.14960).
Course: 18:36:24 expert parallelism, 19:01:56 all-to-all dispatch and combine, 19:27:38 expert TP.

    python expert_parallel.py            8 tokens to their experts and back on 4 ranks; PASS
    python expert_parallel.py --bench    beside once per expert, and beside all experts everywhere
"""
import argparse
import collections
import dataclasses
import functools
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

from collectives import (Axis, Cut, Label, Mesh, Pending, all_gather, all_reduce, all_to_all,
                         difference, divisors, exchange_rows, label_of, ledger, local_part, one_of,
                         paired_ratio, reduce_scatter, reduce_scatter_along, spawn, verdict)

# Stacked experts (e, ...) are cut along e over ep; over etp along the dimension of their hidden
# width: a column-parallel w1 and w3, a row-parallel w2.
CUTS = {"w1": 1, "w3": 1, "w2": 2}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # as wide as a number of the message


# ---- which expert is where ----

def check(config, ep, etp=1, tp=1, ranks=0):
    """Raises ValueError, with the legal values, for experts that can't be cut over ep x etp, which
    are carved from so many ranks: fsdp x cp x tp."""
    if (ep > 1 or etp < tp) and not config.n_moe_layers():
        raise ValueError(f"ep={ep}, etp={etp}: this model has no experts (num_experts="
                         f"{config.num_experts}, {config.n_dense_layers} of {config.n_layers} "
                         "blocks are dense); use ep=1, and leave --etp out")
    if ep > 1 and config.num_experts % ep:
        legal = [n for n in divisors(config.num_experts) if ranks // etp % n == 0]
        raise ValueError(f"ep={ep} does not divide num_experts={config.num_experts}; use "
                         f"{one_of(legal)}")
    width = config.moe_inter_dim
    if ep > 1 and -(-width // etp) * (etp - 1) >= width:
        raise ValueError(f"etp={etp} leaves a rank without any of moe_inter_dim={width}; use etp=1")


def cut_parameters(experts, mesh):
    """Keep this rank's experts, and of their hidden width this rank's part."""
    for name, dim in CUTS.items():
        whole = getattr(experts, name)
        label = Label(label_of(whole).shape, (
            Cut("ep", 0, mesh["ep"].size), Cut("etp", dim, mesh["etp"].size)), ("edata",))
        local = nn.Parameter(local_part(whole.detach(), label, mesh).clone())
        local.label = label
        setattr(experts, name, local)


# ---- who goes where ----

@dataclasses.dataclass
class Copies:
    """Copies of n items on their way to t targets, the targets one after the other and for each
    its items in order. `owner` (c,): whose copy each is; `target` (c,): where it goes. The copies
    of item i stand at places[starts[i]:starts[i + 1]]; `counts` (t,): how many each target gets."""
    owner: torch.Tensor
    target: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor


def arrange(goes):
    """Copies for goes (n, t), whether item i goes to target j: tokens to ranks, where they are sent
    from, and rows to experts, where they arrive."""
    target, owner = goes.T.nonzero(as_tuple=True)
    counts, many = goes.sum(0), goes.sum(1)
    places = (goes.cumsum(0) - 1 + counts.cumsum(0) - counts)[goes]  # item by item
    return Copies(owner, target, places, many.cumsum(0) - many, counts)


def add_up(rows, copies, weights=None):
    """Rows of copies (c, d), each times its weight (c,), added up item by item -> (n, d)."""
    if weights is not None:
        weights = weights.index_select(0, copies.places)
    return F.embedding_bag(copies.places, rows, copies.starts, mode="sum",
                           per_sample_weights=weights)


class Take(torch.autograd.Function):
    """A row for each copy (c, d) of the items' rows (n, d). Backward: the copies' sum."""

    @staticmethod
    def forward(ctx, rows, copies):
        ctx.copies = copies
        return rows.index_select(0, copies.owner)

    @staticmethod
    def backward(ctx, grad):
        return add_up(grad, ctx.copies), None


class AddUp(torch.autograd.Function):
    """add_up(). Backward: each copy takes its item's gradient."""

    @staticmethod
    def forward(ctx, rows, weights, copies):
        ctx.copies, ctx.weighted = copies, weights is not None
        if ctx.weighted:
            ctx.save_for_backward(rows, weights)
        return add_up(rows, copies, weights)

    @staticmethod
    def backward(ctx, grad):
        grad_rows = grad.index_select(0, ctx.copies.owner)
        if not ctx.weighted:
            return grad_rows, None, None
        rows, weights = ctx.saved_tensors
        grad_weights = (grad_rows * rows).sum(-1)
        return grad_rows.mul_(weights[:, None]), grad_weights, None


# ---- on the wire ----

@dataclasses.dataclass
class Trip:
    """What one dispatch and its ways back have to know; d, slots (k') and the type of gate weights
    say how to read a message."""
    axis: Axis
    etp: Axis
    d: int
    slots: int
    wide: torch.dtype
    input_splits: list   # copies for each rank
    output_splits: list  # copies from each rank
    longest: int         # of the etp ranks, the most rows that one got
    pending: Pending | None = None

    def land(self):
        """What is on the way, once it is here; the trip keeps no hold of it."""
        message, self.pending = self.pending.wait(), None
        return message


def start_trip(copies, axis, etp, d, slots, wide):
    """Tell the other ranks how many rows they will get: a Trip."""
    received = all_to_all(copies.counts, axis, [1] * axis.size, [1] * axis.size)
    sent, received = copies.counts.tolist(), received.tolist()
    longest = int(all_gather(copies.counts.new_tensor([sum(received)]), etp).max())
    return Trip(axis, etp, d, slots, wide, sent, received, longest)


def pack(rows, gates, ids=None):
    """One message, in the type of the rows: rows (c, d), gate weights (c, k') in their own wider
    type and numbers of experts (c, k') as the bits that they are. Backward has no ids."""
    parts = [rows, gates.contiguous().view(rows.dtype)]
    if ids is not None:
        parts.append(ids.to(INTEGERS[rows.itemsize]).view(rows.dtype))
    return torch.cat(parts, 1)


def unpack(message, trip):
    """The parts of a message: rows, gates and, where there are any, ids."""
    end = trip.d + trip.slots * trip.wide.itemsize // message.itemsize
    # copies, since contiguous() would leave a single row where it lies, at an odd place for `wide`
    gates, ids = (part.clone(memory_format=torch.contiguous_format)
                  for part in (message[:, trip.d:end], message[:, end:]))
    gates, ids = gates.view(trip.wide), ids.view(INTEGERS[message.itemsize]).long()
    return message[:, :trip.d], gates, ids


def pad_rows(rows, length):
    """rows (r, ...) -> (length, ...), zeros behind: a row of zeros asks for no expert."""
    return F.pad(rows, (0, 0, 0, length - len(rows)))


class Send(torch.autograd.Function):
    """Rows (c, d), gate weights and local numbers of experts (c, k') set out. What it returns is
    empty: a thread from here to Receive along which autograd finds its way.

    Backward, called last: the gradients of rows and gate weights have come.
    """

    @staticmethod
    def forward(ctx, rows, gates, ids, trip):
        ctx.trip = trip
        trip.pending = all_to_all(pack(rows, gates, ids), trip.axis, trip.input_splits,
                                  trip.output_splits, asynchronous=True)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx, _):
        grad_rows, grad_gates, _ = unpack(ctx.trip.land(), ctx.trip)
        return grad_rows, grad_gates, None, None


class Receive(torch.autograd.Function):
    """What the ranks sent here, once it is here: rows (r, d), gate weights and ids (r, k'); with
    etp > 1 what all etp ranks got, gathered, and r is etp times that of the fullest.

    Backward, called first: the gradients set out, with etp > 1 the sums of the ranks' parts.
    """

    @staticmethod
    def forward(ctx, _, trip):
        ctx.trip, message = trip, trip.land()
        if trip.etp.size > 1:
            message = all_gather(pad_rows(message, trip.longest), trip.etp)
        rows, gates, ids = unpack(message, trip)
        ctx.mark_non_differentiable(ids)
        return rows, gates, ids

    @staticmethod
    def backward(ctx, grad_rows, grad_gates, _):
        """Gradients of what forward gave. They set out; nothing is returned but the thread."""
        trip = ctx.trip
        if trip.etp.size > 1:
            grad_rows, grad_gates = (
                reduce_scatter(grad.contiguous(), trip.etp)[:sum(trip.output_splits)]
                for grad in (grad_rows, grad_gates))
        trip.pending = all_to_all(pack(grad_rows, grad_gates), trip.axis, trip.output_splits,
                                  trip.input_splits, asynchronous=True)
        return grad_rows.new_empty(0), None


# ---- dispatch, experts, combine ----

def experts_of_copies(copies, gate_weights, expert_ids, local):
    """Which of its token's k experts a copy is for: gate weights and local numbers from 1 on, both
    (c, k'), numbers 0 where there are fewer. gate_weights and expert_ids (n, k)."""
    k, ids = expert_ids.shape[1], expert_ids[copies.owner]  # (c, k)
    here = ids // local == copies.target[:, None]
    first = (~here).int().argsort(dim=1, stable=True)[:, :min(k, local)]  # (c, k'): those in front
    ids = (ids % local + 1).where(here, 0).gather(1, first)
    places = copies.owner[:, None] * k + first
    return gate_weights.flatten().gather(0, places.flatten()).view_as(places), ids


def run_experts(experts, rows, gates, ids):
    """The weighted sum of each row's experts here: rows (r, d), gates and ids (r, k') -> (r, d)."""
    width = len(experts.w1) + 1  # column 0 takes what is no expert
    weights = gates.new_zeros(len(rows), width).scatter(1, ids, gates)
    goes = torch.zeros_like(weights, dtype=torch.bool).scatter(1, ids, True)[:, 1:]
    copies = arrange(goes)
    results = experts(Take.apply(rows, copies), copies.counts)  # (copies, d), sorted by expert
    weights = weights.flatten().gather(0, copies.owner * width + copies.target + 1)
    return AddUp.apply(results, weights.to(results.dtype), copies)


def routed(moe, axis, etp, x, gate_weights, expert_ids):
    """In place of MoE.routed: x (n, d), gate_weights and expert_ids (n, k), this rank's own tokens
    and global numbers of experts -> (n, d)."""
    local = len(moe.experts.w1)
    goes = expert_ids.new_zeros(len(x), axis.size, dtype=torch.bool)
    copies = arrange(goes.scatter(1, expert_ids // local, True))  # once a rank
    gates, ids = experts_of_copies(copies, gate_weights, expert_ids, local)
    trip = start_trip(copies, axis, etp, x.shape[1], ids.shape[1], gates.dtype)
    if moe.sends is not None:
        moe.sends.append(trip.input_splits)

    wire = Send.apply(Take.apply(x, copies), gates, ids, trip)
    shared = None if moe.shared_experts is None else moe.shared_experts(x).reshape(x.shape)
    sums = run_experts(moe.experts, *Receive.apply(wire, trip))
    if etp.size > 1:
        sums = reduce_scatter_along(sums, etp)[:sum(trip.output_splits)]
    # From here to the end nothing is kept for backward: --recompute full need not combine again
    rows = exchange_rows(sums, axis, trip.output_splits, trip.input_splits)
    out = AddUp.apply(rows, None, copies)
    return out if shared is None else out + shared


def routed_once_per_expert(moe, axis, x, gate_weights, expert_ids):
    """The plain form: a copy for each of a token's experts, weighted when it is back. What is
    needed there is told by how many rows each expert gets from each rank."""
    local, experts = len(moe.experts.w1), len(moe.experts.w1) * axis.size
    goes = expert_ids.new_zeros(len(x), experts, dtype=torch.bool)
    copies = arrange(goes.scatter(1, expert_ids, True))  # (n k,) sorted by expert
    coming = all_to_all(copies.counts, axis, [local] * axis.size, [local] * axis.size)
    input_splits = copies.counts.view(axis.size, local).sum(1).tolist()
    output_splits = coming.view(axis.size, local).sum(1).tolist()

    rows = exchange_rows(Take.apply(x, copies), axis, input_splits, output_splits)
    expert = torch.arange(local, device=x.device).repeat(axis.size).repeat_interleave(coming)
    by_expert = arrange(F.one_hot(expert, local).bool())  # they came rank by rank
    results = moe.experts(Take.apply(rows, by_expert), by_expert.counts)
    results = AddUp.apply(results, None, by_expert)  # and go back as they came
    results = exchange_rows(results, axis, output_splits, input_splits)
    weights = gate_weights.new_zeros(len(x), experts).scatter(1, expert_ids, gate_weights)
    weights = weights.flatten().gather(0, copies.owner * experts + copies.target)
    out = AddUp.apply(results, weights.to(x.dtype), copies)
    return out if moe.shared_experts is None else out + moe.shared_experts(x).reshape(x.shape)


# ---- the model ----

def parallelize(model, mesh):
    """Cut the experts of a model over mesh["ep"] and mesh["etp"], and send tokens to them.

    After tensor_parallel.parallelize, which leaves experts with axes of their own alone. Nothing
    is done where they have none. Raises ValueError as check() does.
    """
    if not mesh.experts_apart:
        return
    check(model.config, mesh["ep"].size, mesh["etp"].size)
    for block in model.blocks.values():
        if block.is_moe:
            cut_experts(block.ffn, mesh)


def cut_experts(moe, mesh):
    """One MoE layer. Its `sends` is None, or a list to which each forward adds how many rows this
    rank sends to each: a row of the send matrix."""
    cut_parameters(moe.experts, mesh)
    moe.routed = functools.partial(routed, moe, mesh["ep"], mesh["etp"])
    moe.sends = None


def send_matrix(sends, axis, device="cpu"):
    """One forward's rows from rank to rank, a list of ep lists, from all ranks' `sends` of it."""
    return all_gather(torch.tensor([sends], device=device), axis).tolist()


# ---- how many bytes ----

def expected_copies(config, ep):
    """Ranks that a token is sent to, its own counted when it has one of the experts, on average
    over all choices that the router could make: the derivation is in the module docstring."""
    c, local = config, config.num_experts // ep
    size, total = c.num_experts // c.n_group, 0.0
    reach = size * c.topk_group
    for rank in range(ep):
        mine = collections.Counter(e // size for e in range(rank * local, (rank + 1) * local))
        ways = collections.Counter({(0, 0): 1})  # (groups chosen, this rank's experts in them)
        for group in range(c.n_group):
            for (chosen, experts), number in list(ways.items()):
                ways[chosen + 1, experts + mine[group]] += number
        total += sum(number * (1 - math.comb(reach - experts, c.top_k) / math.comb(reach, c.top_k))
                     for (chosen, experts), number in ways.items() if chosen == c.topk_group)
    return total / math.comb(c.n_group, c.topk_group)


def rows_got(matrix, rank):
    """Rows that a rank has to work on, its own included."""
    return sum(row[rank] for row in matrix)


def bytes_sent(config, matrix, rank, width=4, wide=4, etp=1, longest=0, repeated=False):
    """Bytes that a rank of ep sends for a MoE layer's forward and backward, over ep and over etp.

    matrix: the send matrix; longest: the most rows that one of the etp ranks got; width, wide:
    bytes of a number and of a gate weight. repeated: --recompute full dispatches again, but has no
    use for what a combine would bring.
    """
    ep, again = len(matrix), 1 if repeated else 0
    slots = min(config.top_k, config.num_experts // ep)
    row, gates, ids = config.dim * width, slots * wide, slots * width
    sent = sum(matrix[rank]) - matrix[rank][rank]
    received = rows_got(matrix, rank) - matrix[rank][rank]
    over_ep = ((1 + again) * (8 * (ep - 1) + sent * (row + gates + ids)) + sent * row
               + received * (2 * row + gates))
    over_etp = (etp - 1) * ((1 + again) * (8 + longest * (row + gates + ids))
                            + longest * (3 * row + gates))
    return over_ep, over_etp


# ---- demonstration ----

def made(experts=8, **options):
    """A MoE layer in float64, the same on every rank."""
    from moe import MoE
    torch.manual_seed(0)
    moe = MoE(16, 12, experts, 1, **{"top_k": 3, **options}).double()
    for p in moe.parameters():
        nn.init.normal_(p, std=0.3)
    return moe


def compare(what, mesh, x, worst, bias=None, plain=False, shares=None, **options):
    """A layer cut over the ranks, each with its share of the tokens x (n, d), beside one process:
    outputs, gradients of tokens and of all parameters. Returns the bytes that this rank sent, and
    how many rows it sent to each."""
    cut, alone = made(**options), made(**options)
    for moe in (cut, alone):
        moe.expert_bias += 0 if bias is None else torch.tensor(bias)
    cut_experts(cut, mesh)
    cut.sends = []
    if plain:
        cut.routed = functools.partial(routed_once_per_expert, cut, mesh["ep"])
    torch.manual_seed(1)
    pull = torch.randn_like(x)
    pieces = shares or [len(part) for part in x.tensor_split(mesh.world_size)]
    whole, mine = x.clone().requires_grad_(), x.split(pieces)[mesh.rank].clone().requires_grad_()
    ledger.clear()
    out = cut(mine[None])[0]
    out.backward(pull.split(pieces)[mesh.rank])
    sent = ledger.by_axis()
    expected = alone(whole[None])[0]
    expected.backward(pull)
    def differ(found, whole, part):
        return ((found - part).abs().amax() / whole.abs().max()).item() if len(part) else 0.0
    worst[f"{what}: outputs, gradients of tokens"] = max(
        differ(a, b, b.split(pieces)[mesh.rank]) for a, b in ((out, expected),
                                                              (mine.grad, whole.grad)))
    found = []
    for p, q in zip(cut.parameters(), alone.parameters()):
        axis = mesh["edata" if "edata" in label_of(p).partial else "world"]
        found.append(differ(all_reduce(p.grad.contiguous(), axis), q.grad,
                            local_part(q.grad, label_of(p), mesh)))
    worst[f"{what}: gradients of {len(found)} parameters"] = max(found)
    return sum(sent.values()), cut.sends


def follow(rank, mesh, x, worst):
    """Say where 8 named tokens, 2 on each rank, go, what each expert gets, and how a's result comes
    about. The first number of a token tells who it is."""
    moe, alone, names = made(), made(), "abcdefgh"
    cut_experts(moe, mesh)
    moe.sends, seen, plain = [], {}, moe.experts.forward

    def experts(rows, counts):
        seen.update((rank * 2 + e, part[:, 0].tolist()) for e, part in enumerate(
            rows.detach().split(counts.tolist())))
        return plain(rows, counts)
    moe.experts.forward = experts
    out = moe(x[None, 2 * rank:2 * rank + 2])[0]
    everywhere = [None] * mesh.world_size
    torch.distributed.all_gather_object(everywhere, seen)
    matrix = send_matrix(moe.sends[0], mesh["ep"])
    scores = alone.router(x)
    ids = alone.router.select(scores, alone.expert_bias)
    gates = alone.router.gate(scores, ids)
    due = {e: [t / 8 for t in range(8) if e in ids[t].tolist()] for e in range(8)}
    arrived = {e: tokens for part in everywhere for e, tokens in part.items()}
    worst["every expert got its tokens"] = float(due != arrived)
    goes = torch.zeros(8, 4).scatter(1, ids // 2, 1.0)
    worst["the send matrix counts a copy a rank"] = float(
        matrix != goes.view(4, 2, 4).sum(1).tolist())
    if rank:
        return
    print("4 ranks with 2 experts each")
    print("token  rank  experts (gate weights)                copies to")
    for t, name in enumerate(names):
        chosen = "  ".join(f"{e} ({g:.2f})" for e, g in zip(ids[t].tolist(), gates[t].tolist()))
        print(f"{name:7}{t // 2:<6}{chosen:38}" + " ".join(
            str(r) for r in range(4) if goes[t, r]))
    print("experts got  " + "   ".join(
        f"{e}: {''.join(names[round(v * 8)] for v in arrived[e]) or '-'}" for e in range(8)))
    print("send matrix, rows from rank (down) to rank (across):")
    for r, row in enumerate(matrix):
        print(f"  {r} " + "".join(f"{n:4}" for n in row))
    result, parts = torch.zeros(16, dtype=torch.float64), []
    for r in sorted(set((ids[0] // 2).tolist())):
        here = [(e, g) for e, g in zip(ids[0].tolist(), gates[0]) if e // 2 == r]
        parts.append(f"rank {r}: " + " + ".join(f"{g:.2f} E{e}(a)" for e, g in here))
        for e, g in here:
            w1, w3, w2 = (w[e] for w in (alone.experts.w1, alone.experts.w3, alone.experts.w2))
            result = result + g * (w2 @ (F.silu(w1 @ x[0]) * (w3 @ x[0])))
    print("a's routed result = " + "  +  ".join(parts))
    worst["a's result by hand"] = difference(out[0], result + alone.shared_experts(x[:1])[0])


def show(rank, n):
    """8 tokens there and back, then outputs, gradients and bytes beside one process."""
    from model import make_config
    worst, mesh = {}, Mesh(n, rank, fsdp=n, ep=n)
    torch.manual_seed(2)
    x = torch.randn(8, 16, dtype=torch.float64)
    x[:, 0] = torch.arange(8) / 8
    worst.update({"a's result by hand": 0.0})
    follow(rank, mesh, x, worst)
    many = torch.randn(64, 16, dtype=torch.float64)
    groups = dict(n_group=4, topk_group=2)
    once, (sends,) = compare("once a rank", mesh, many, worst, **groups)
    config = make_config("tiny", ["dim=16", "num_experts=8", "top_k=3"])
    formula, _ = bytes_sent(config, send_matrix(sends, mesh["ep"]), rank, 8, 8)
    worst["once a rank: bytes sent are the formula's"] = float(once != formula)
    each, _ = compare("once an expert", mesh, many, worst, plain=True, **groups)
    compare("all tokens to rank 1", mesh, many, worst, bias=[0, 0, 9, 9, 0, 0, 0, 0], top_k=2)
    compare("one token in all", mesh, many[:1], worst)
    compare("ep 2 x efsdp 2", Mesh(n, rank, fsdp=n, ep=2), many, worst, score_func="softmax")
    compare("ep 2 x etp 2", Mesh(n, rank, fsdp=2, tp=2, ep=2, etp=2), many, worst, **groups)
    if rank == 0:
        print(f"bytes that rank 0 sent for 16 tokens of 16 numbers, 3 of 8 experts, forward and "
              f"backward: {once:,} once a rank, {each:,} once an expert")
        for name in ("deepseek-v2", "deepseek-v3"):
            c = make_config(name)
            print(f"{name} over 8 ranks: {expected_copies(c, 8):.2f} copies a token expected, at "
                  f"most {min(c.topk_group, 8)}, in place of {c.top_k}")
    return verdict(rank, worst)


# ---- benchmark ----

def bench(rank, n, rounds, tokens=4096):
    """A MoE layer forward and backward beside the plain form, and beside all experts everywhere."""
    from moe import MoE
    from train import keep_freed_memory
    keep_freed_memory()
    layers, mesh = [], Mesh(n, rank, fsdp=n, ep=n)
    for _ in range(3):
        torch.manual_seed(0)
        layers.append(MoE(1024, 256, 64, top_k=8, n_group=8, topk_group=4))
    ours, plain, everywhere = layers
    for moe in (ours, plain):
        cut_experts(moe, mesh)
    plain.routed = functools.partial(routed_once_per_expert, plain, mesh["ep"])
    torch.manual_seed(rank)
    x = torch.randn(1, tokens, 1024, requires_grad=True)
    pull = torch.randn_like(x)

    def sent(moe):
        ledger.clear()
        moe(x).backward(pull)
        return ledger.by_axis()["ep"]
    share = sent(ours) / sent(plain)
    held, whole = (sum(p.numel() for p in moe.experts.parameters()) for moe in (ours, everywhere))
    for name, other, beside in (
            ("once per expert", plain, f"{share:.2f} x its bytes"),
            ("all experts on every rank", everywhere, f"{held / whole:g} x its experts' memory")):
        ratio, seconds = paired_ratio(lambda: ours(x).backward(pull),
                                      lambda: other(x).backward(pull), rounds)
        if rank == 0:
            print(f"{n} ranks, {tokens} tokens each: {seconds:.2f} s, {ratio} x {name}, with "
                  f"{beside}", flush=True)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    if flags.parse_args().bench:
        sys.exit(spawn(bench, 4, 9, timeout=600))
    sys.exit(spawn(show, 4, legal=[4]))
