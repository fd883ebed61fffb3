"""Context parallelism: every rank holds a part of each sequence; keys and values come round a ring.

Attention is a weighted mean of values, and means can be merged. A block of keys gives a query

    lse = log sum exp(q k scale)        out = sum exp(q k scale - lse) v

and blocks a and b together

    lse = log(exp lse_a + exp lse_b)    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

so a rank keeps its queries and has the blocks of all ranks come by, one at a time. Backward needs
the final lse and out alone: with P = exp(Q K^T scale - lse), the probabilities of the whole
softmax, each block by itself gives

    dV = P^T dO    dS = P (dO V^T - D) scale    dQ += dS K    dK = dS^T Q      D = rowsum(dO out)

since the softmax's own gradient, P (dP - sum P dP), has sum P dP = dO (P V) = dO out = D.

    step      0         1         2         3       The ring: a rank passes on the block that it
    rank 0  own 0  ->  of 3  ->  of 2  ->  of 1     has while it attends to it; in backward a
    rank 1  own 1  ->  of 0  ->  of 3  ->  of 2     block's gradient follows it from rank to rank,
    rank 2  own 2  ->  of 1  ->  of 0  ->  of 3     and its last hop leads home.

What travels is what the layer would cache. MLA: the latent and the rotated k_pe; keys and values
are made from them at every rank, one block at a time, and again in backward. GQA: keys and values.

Causal work is uneven if rank r holds the r-th part: rank 0 sees its own block alone. Zig-zag: of
2 cp chunks rank r holds r and 2 cp - 1 - r, an early and a late one; then every step after the
first is half a block for all: all queries with the early keys, or the late queries with all keys.
What lies above the diagonal, or in documents that a query does not belong to, is skipped; packed
documents make the work as uneven as they lie. Where seq_len does not divide, some ranks hold a
token more: no token is padding.

Numbers that a rank sends a layer and sequence, forward / backward (bytes_sent() is exact). s: its
length, n: cp, w: numbers a token of what travels; gradients in float32:

    ring        (n-1)/n s w / twice that: each block once, its gradient once
    allgather   the same in one call before the first block is used, and one behind (Llama 3)
    ulysses     (n-1)/n s/n (h + g) (dk + dv) / the same: all-to-all, positions for heads, and
                back; g: key heads, repeated until n divides them. MLA's latents are gathered
                instead, (n-1)/n (s w + s/n h (dk + dv)), and kept whole for backward: s w numbers
                a layer, where the ring keeps s/n w

Break-even. Moving latents in place of h (dk + dv) numbers a token saves the wire those, twice, and
their gradients, and costs 4 products with wkv_b at every rank that a token comes to (2 forward, 2
for gradients) of 2 c h (nope + dv) FLOPs. With F FLOP/s and B bytes/s a rank latents win up to
about c = 1.5 F / B numbers in float32, F / B in bf16: for H100s of 400 TFLOP/s 8,000 at 50 GB/s and
900 over NVLink (450 GB/s). DeepSeek-V3's c is 512, and 576 numbers travel in place of 40,960.

Under tp each rank sends 1/tp of a latent block, which is put together on arrival inside the node.

Sources: Ring attention (arXiv 2310.01889), FlashAttention-2 (2307.08691, section 3.1), Llama 3
(2407.21783, 3.3.2), Ulysses (2309.14509); zig-zag: github.com/zhuzilin/ring-flash-attention.
Course: 14:47:43 context parallelism and ring attention.

    python ring_attention.py            who attends to what, step by step; parity on 4 ranks; PASS
    python ring_attention.py --bench    beside gathered full keys and values, 2 and 4 ranks
"""
import argparse
import dataclasses
import functools
import itertools
import math
import sys

import torch
import torch.nn.functional as F

from collectives import (Axis, Mesh, Pair, all_gather, all_reduce, difference, divisors,
                         exchange_rows, ledger, one_of, paired_ratio, parts_along, reduce_scatter,
                         ring_shift, spawn, verdict)

ALONE = Axis("alone", (0,), 0)
ALL = slice(None)
SCORES = 2 ** 22  # numbers that the plain path has at a time


# ---- who holds which positions ----

def check(config, cp, tp, seq_len, method):
    """Raises ValueError, with the legal values, for what can't be divided over cp ranks."""
    heads = config.n_heads // tp
    if cp > seq_len:
        raise ValueError(f"cp={cp} leaves a rank without any of seq_len={seq_len} positions; use "
                         f"at most {seq_len}")
    if method == "ulysses" and heads % cp:
        legal = [n for n in divisors(heads)[1:] if n <= seq_len]
        instead = f"--cp {one_of(legal)}, or " if legal else ""
        raise ValueError(f"cp={cp} does not divide n_heads / tp = {heads}, the heads of a rank, as "
                         f"ulysses needs; use {instead}--cp-method ring")


@dataclasses.dataclass(frozen=True)
class Slices:
    """How sequences of seq_len positions lie on the ranks of an axis."""
    axis: Axis
    seq_len: int
    zigzag: bool = True

    def chunks(self, owner):
        """[(start, stop), ...]: a rank's positions, rising; chunks differ by a token at most."""
        parts = 2 * self.axis.size if self.zigzag else self.axis.size
        size, longer = divmod(self.seq_len, parts)
        return [(i * size + min(i, longer), (i + 1) * size + min(i + 1, longer))
                for i in ((owner, parts - 1 - owner) if self.zigzag else (owner,))]

    def positions(self, owner):
        """(s/cp,): the positions of a rank's tokens."""
        return torch.cat([torch.arange(*chunk) for chunk in self.chunks(owner)])

    def length(self, owner):
        return sum(stop - start for start, stop in self.chunks(owner))

    def rows(self):
        """position -> its row where the ranks' tokens stand one rank behind the other."""
        return torch.cat([self.positions(owner) for owner in range(self.axis.size)]).argsort()


# ---- which keys a rank's queries attend to ----
#
# A piece is (sequences, queries, keys, causal): slices of the batch, of this rank's rows and of the
# owner's, in which every query sees every key or, when causal, the i-th query the keys 0..i.

def plan(slices, document_ids=None):
    """owner -> pieces of its block that this rank's queries attend to, all or within documents.

    document_ids (b, seq_len) on the CPU: of whole sequences; made once a microbatch and stage.
    """
    owners = range(slices.axis.size)
    if document_ids is None:
        return [causal_pieces(slices, owner) for owner in owners]
    pieces = [[] for _ in owners]
    for sequence, ids in enumerate(document_ids.tolist()):
        stretches = [document_stretches(ids, slices.chunks(owner)) for owner in owners]
        for owner, (document, start, queries) in itertools.product(
                owners, stretches[slices.axis.rank]):
            pieces[owner] += [(slice(sequence, sequence + 1), queries, keys, first == start)
                              for other, first, keys in stretches[owner]
                              if other == document and first <= start]
    return pieces


def causal_pieces(slices, owner):
    """The piece of a block without documents; [] for nothing."""
    rank = slices.axis.rank
    mine, theirs = slices.length(rank), slices.length(owner)
    my_early, their_early = (stop - start for start, stop in (slices.chunks(rank)[0],
                                                              slices.chunks(owner)[0]))
    if owner == rank:  # positions rise along the rows, so one triangle covers both chunks
        return [(ALL, slice(0, mine), slice(0, theirs), True)]
    if owner < rank:  # its early chunk lies before both of mine, its late one behind them
        first, keys = 0, their_early
    else:  # both of its chunks lie between mine
        first, keys = my_early, theirs
    return [(ALL, slice(first, mine), slice(0, keys), False)] if first < mine and keys else []


def document_stretches(ids, chunks):
    """[(document, first position, rows)] for each stretch of one document in a rank's chunks."""
    found, row = [], 0
    for chunk in chunks:
        for document, places in itertools.groupby(range(*chunk), ids.__getitem__):
            places = list(places)
            found.append((document, places[0], slice(row, row + len(places))))
            row += len(places)
    return found


def pairs(pieces):
    """How many pairs of query and key a sequence has in these pieces."""
    sizes = [(q.stop - q.start, k.stop - k.start, causal) for _, q, k, causal in pieces]
    return sum(s * (s + 1) // 2 if causal else s * t for s, t, causal in sizes)


# ---- attention of some queries to one block of keys ----
#
# Here heads come before positions, as kernels want it: q (b, h, s, dk), k (b, g, t, dk),
# v (b, g, t, dv), each key head serving h/g query heads.

def for_kernel(*tensors):
    """The tensors with heads as wide as the widest, on CUDA rounded up to 8, which flash attention
    asks for: zeros behind change no score. None when torch has no such kernel for them."""
    q, width = tensors[0], max(t.shape[-1] for t in tensors)
    if q.is_cuda:
        width += -width % 8
    if q.device.type != "cpu" and not (q.is_cuda and q.dtype.itemsize == 2 and width <= 256):
        return None
    return [F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in tensors]


def attend_block(q, k, v, scale, causal):
    """out (b, h, s, dv) and lse (b, h, s) over these keys alone; fused where torch can."""
    inputs = for_kernel(q, k, v)
    if not inputs:
        return plain_block(q, k, v, scale, causal)
    kernel = (torch.ops.aten._scaled_dot_product_flash_attention if q.is_cuda else
              torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
    out, lse = kernel(*inputs, 0.0, causal, scale=scale)[:2]
    return out[..., :v.shape[-1]], lse


def attend_block_backward(grad_out, q, k, v, out, lse, scale, causal):
    """Gradients of q, k, v through these keys; out and lse are those over all keys."""
    inputs = for_kernel(grad_out, q, k, v, out)
    if not inputs:
        return plain_block_backward(grad_out, q, k, v, out, lse, scale, causal)
    if q.is_cuda:
        unused = torch.empty(2, dtype=torch.int64, device=q.device)  # random state of dropout
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *inputs, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, unused,
            unused, scale=scale)
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, lse, 0.0, causal, scale=scale)
    return [grad[..., :t.shape[-1]] for grad, t in zip(grads, (q, k, v))]


def widened(*tensors):
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def scores_of(q, k, scale, causal):
    """Yield (rows, q (b, g, h/g, n, dk), scores (b, g, h/g, n, t)) for n queries at a time, so that
    never more than SCORES numbers exist."""
    (b, h, s, _), t = q.shape, k.shape[2]
    step = max(SCORES // (b * h * t), 1)
    for first in range(0, s, step):
        rows = slice(first, min(first + step, s))
        part = q[:, :, rows].unflatten(1, (k.shape[1], -1))
        scores = part @ k[:, :, None].mT * scale
        if causal:
            query = torch.arange(first, rows.stop, device=q.device)[:, None]
            scores.masked_fill_(torch.arange(t, device=q.device) > query, -math.inf)
        yield rows, part, scores


def plain_block(q, k, v, scale, causal):
    """attend_block() written out."""
    q, k, v = widened(q, k, v)
    out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])
    for rows, _, scores in scores_of(q, k, scale, causal):
        lse[:, :, rows] = scores.logsumexp(-1).flatten(1, 2)
        out[:, :, rows] = (scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)
    return out, lse


def plain_block_backward(grad_out, q, k, v, out, lse, scale, causal):
    """attend_block_backward() written out: the formulas above, line by line."""
    grad_out, q, k, v, out = widened(grad_out, q, k, v, out)
    grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (q, k, v))
    for rows, part, scores in scores_of(q, k, scale, causal):
        d_out, o, log_sum = (t[:, :, rows].unflatten(1, (k.shape[1], -1))
                             for t in (grad_out, out, lse[..., None]))
        p = (scores - log_sum).exp()
        d = (d_out * o).sum(-1, keepdim=True)
        ds = p * (d_out @ v[:, :, None].mT - d) * scale
        grad_v += (p.mT @ d_out).sum(2)
        grad_q[:, :, rows] = (ds @ k[:, :, None]).flatten(1, 2)
        grad_k += (ds.mT @ part).sum(2)
    return grad_q, grad_k, grad_v


def merge(out, lse, new_out, new_lse):
    """Add a block's attention to that of the blocks before, in place: (b, h, s, dv), (b, h, s)."""
    both = torch.logaddexp(lse, new_lse)
    out.mul_((lse - both).exp_()[..., None]).add_(new_out * (new_lse - both).exp_()[..., None])
    lse.copy_(both)


# ---- how blocks come and gradients go home ----
#
# A block (b, s/cp, ...) that all ranks of a tp group have alike (MLA's latents) crosses the axis in
# tp shares and is put together on arrival. Without tp a share is the whole, and nothing is sent.

@dataclasses.dataclass(frozen=True)
class Shares:
    """Of the ranks' blocks; shape: of this rank's, (b, s/cp, ...)."""
    slices: Slices
    tp: Axis
    shape: tuple

    def block_shape(self, owner):
        return self.shape[0], self.slices.length(owner), *self.shape[2:]

    def size(self, owner):
        """Numbers of an owner's block that one tp rank sends."""
        return -(-math.prod(self.block_shape(owner)) // self.tp.size)

    def longest(self):
        return max(self.size(owner) for owner in range(self.slices.axis.size))

    def cut(self, block):
        """(tp, size): the shares of a block, the last one padded."""
        return F.pad(block.flatten(), (0, -block.numel() % self.tp.size)).view(self.tp.size, -1)

    def join(self, share, owner):
        shape = self.block_shape(owner)
        return all_gather(share, self.tp)[:math.prod(shape)].view(shape)

    def sum(self, grad):
        """This rank's share of the sum over tp: each rank has its heads' part of the gradient."""
        return reduce_scatter(self.cut(grad), self.tp).flatten()

    def spread(self, share):
        """The share among zeros, as a partial sum: the layer before adds it up over tp."""
        full = share.new_zeros(self.tp.size, len(share))
        full[self.tp.rank] = share
        return full.flatten()[:math.prod(self.shape)].view(self.shape)


class Ring:
    """One pass of blocks, or of blocks and gradients, from rank to rank."""

    def __init__(self, slices, tp, shape):
        self.axis, self.shares = slices.axis, Shares(slices, tp, shape)
        self.own = self.travelling = None

    def blocks(self, block):
        """Yield (owner, block), this rank's own first; the next one travels meanwhile."""
        n, share = self.axis.size, self.shares.cut(block)[self.shares.tp.rank]
        arriving = None
        for step in range(n):
            owner = (self.axis.rank - step) % n
            if step:
                share = arriving.wait()
                block = self.shares.join(share, owner)
            if step < n - 1:
                arriving = ring_shift(share, self.axis, self.shares.size((owner - 1) % n))
            yield owner, block

    def add(self, owner, grad):
        """The gradient of the block at hand: with what ranks before have added, on to the next. It
        began with the owner's neighbour; the owner's part stays at home."""
        if owner == self.axis.rank:
            self.own = grad
            return
        share = self.shares.sum(grad)
        if self.travelling is not None:
            share += self.travelling.wait()
        self.travelling = ring_shift(share, self.axis,
                                     self.shares.size((owner - 1) % self.axis.size))

    def home(self):
        """The gradient of this rank's block, when every block's has been added."""
        if self.travelling is None:
            return self.own
        return self.own + self.shares.spread(self.travelling.wait())


class Gather:
    """The same with one all-gather before and one reduce-scatter behind. On the wire blocks are
    padded to the longest."""

    def __init__(self, slices, tp, shape):
        self.axis, self.shares, self.grads = slices.axis, Shares(slices, tp, shape), []

    def padded(self, share):
        return F.pad(share, (0, self.shares.longest() - len(share)))

    def blocks(self, block):
        """Yield (owner, block) in the order of the ranks."""
        share = self.padded(self.shares.cut(block)[self.shares.tp.rank])
        for owner, share in enumerate(all_gather(share[None], self.axis)):
            yield owner, (block if owner == self.axis.rank else
                          self.shares.join(share[:self.shares.size(owner)], owner))

    def add(self, owner, grad):
        """The gradient of the next owner's block; this rank's own part stays at home."""
        if owner == self.axis.rank:
            self.own = grad
            self.grads.append(grad.new_zeros(self.shares.longest()))
        else:
            self.grads.append(self.padded(self.shares.sum(grad)))

    def home(self):
        """The gradient of this rank's block, when every block's has been added."""
        share = reduce_scatter(torch.stack(self.grads), self.axis)[0]
        return self.own + self.shares.spread(share[:self.shares.size(self.axis.rank)])


# ---- blockwise attention ----

class BlockwiseAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks' blocks.

    expand(block, weight) -> keys and values of one block, which exist while it is at hand; weight
    may be None. Backward has all blocks come by again, expands them again, and sends gradients
    home. What is added up over blocks is in float32, or float64. The weight's gradient never waits
    for a pipeline's W: the keys' gradients of all blocks would have to be kept until then.
    """

    @staticmethod
    def forward(ctx, q, block, weight, expand, carrier, pieces, scale, dv):
        """q (b, s/cp, h, dk), block (b, s/cp, ...) -> (b, s/cp, h, dv)."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(*q.shape[:3], dv, dtype=wide).transpose(1, 2)  # (b, h, s/cp, dv)
        lse = q.new_full(out.shape[:3], -math.inf, dtype=wide)
        for owner, arrived in carrier(block.shape).blocks(block):
            if pieces[owner]:
                attend_pieces(out, lse, q, *expand(arrived, weight), pieces[owner], scale)
        out = out.to(q.dtype).transpose(1, 2)
        ctx.save_for_backward(q, block, weight, out, lse)
        ctx.rest = expand, carrier, pieces, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        """grad_out (b, s/cp, h, dv)."""
        q, block, weight, out, lse = ctx.saved_tensors
        expand, carrier, pieces, scale = ctx.rest
        queries = [t.transpose(1, 2) for t in (grad_out, q, out)] + [lse]
        way = carrier(block.shape)
        sums = [None if t is None else torch.zeros_like(t, dtype=lse.dtype) for t in (q, weight)]
        for owner, arrived in way.blocks(block):
            grad = torch.zeros_like(arrived, dtype=lse.dtype)
            if pieces[owner]:
                attend_pieces_backward(grad, sums, queries, arrived, weight, expand, pieces[owner],
                                       scale)
            way.add(owner, grad)
        grad_q, grad_weight = (s if s is None else s.to(q.dtype) for s in sums)
        return (grad_q, way.home().to(block.dtype), grad_weight) + (None,) * 5


def attend_pieces(out, lse, q, k, v, pieces, scale):
    """Add a block's attention to out (b, h, s/cp, dv) and lse (b, h, s/cp); q, k, v (b, s, h, .).
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    for rows, queries, keys, causal in pieces:
        at, there = (rows, ALL, queries), (rows, ALL, keys)
        merge(out[at], lse[at], *attend_block(q[at], k[there], v[there], scale, causal))


def attend_pieces_backward(grad_block, sums, queries, block, weight, expand, pieces, scale):
    """Put the gradient of `block` (b, t, ...) into grad_block, and add to sums, those of the
    queries (b, s/cp, h, dk) and of the weight. queries: [grad_out, q, out, lse], heads first."""
    inputs = [t.detach().requires_grad_() for t in (block, weight) if t is not None]
    with torch.enable_grad():
        k, v = (t.transpose(1, 2) for t in expand(*inputs, *[None] * (weight is None)))
    grad_k, grad_v = (torch.zeros_like(t, dtype=grad_block.dtype) for t in (k, v))
    grad_q, keys_and_values = sums[0].transpose(1, 2), (k.detach(), v.detach())
    for rows, places, keys, causal in pieces:
        at, there = (rows, ALL, places), (rows, ALL, keys)
        grad_out, q, out, lse = (t[at] for t in queries)
        new = attend_block_backward(grad_out, q, *(t[there] for t in keys_and_values), out, lse,
                                    scale, causal)
        for total, part in zip((grad_q[at], grad_k[there], grad_v[there]), new):
            total += part
    found = torch.autograd.grad((k, v), inputs, (grad_k.to(k.dtype), grad_v.to(v.dtype)))
    for total, part in zip((grad_block, sums[1]), found):
        total += part


def split_heads(block, weight):
    """Keys and values as GQA's travel, side by side: (b, t, g, 2 head_dim) -> two of head_dim."""
    return block.chunk(2, -1)


def expand_latents(attn, block, weight):
    """[latent | k_pe] (b, t, c + r), rows of wkv_b -> k (b, t, h, nope + r), v (b, t, h, v)."""
    latent, k_pe = block.split([attn.kv_lora_rank, attn.qk_rope_head_dim], -1)
    return attn.keys_and_values(F.linear(latent, weight), k_pe)


def latent_core(attn, slices, tp, method, q_nope, q_pe, latent, k_pe, pieces):
    """MLA.core() of this rank's tokens, (b, s/cp, ...) all."""
    q, block = torch.cat([q_nope, q_pe], -1), torch.cat([latent, k_pe], -1)
    weight = attn.wkv_b.weight
    if method == "ulysses":  # all latents, but only this rank's heads of them
        block = gather_blocks(block, slices, tp).index_select(1, slices.rows().to(q.device))
        weight = weight.unflatten(0, (slices.axis.size, -1))[slices.axis.rank]
    return across_ranks(slices, tp, method, q, block, weight, pieces, attn.scale, attn.v_head_dim,
                        functools.partial(expand_latents, attn))


def head_core(attn, slices, method, q, k, v, pieces):
    """GQA.core() of this rank's tokens, (b, s/cp, ...) all. Under tp each rank has heads of its
    own, and a ring of its own."""
    block = torch.cat([k, v], -1)
    if method == "ulysses":  # key heads are repeated until cp divides their number
        repeat = math.lcm(k.shape[2], slices.axis.size) // k.shape[2]
        block = to_heads(block.repeat_interleave(repeat, 2), slices)
    return across_ranks(slices, ALONE, method, q, block, None, pieces, attn.scale, v.shape[-1],
                        split_heads)


def across_ranks(slices, tp, method, q, block, weight, pieces, scale, dv, expand):
    """BlockwiseAttention with blocks that come by, or on all positions of some heads."""
    scope = attended(slices, method)
    pieces = pieces or plan(scope)
    if method != "ulysses":
        carrier = functools.partial({"ring": Ring, "allgather": Gather}[method], slices, tp)
        return BlockwiseAttention.apply(q, block, weight, expand, carrier, pieces, scale, dv)
    carrier = functools.partial(Ring, scope, ALONE)
    return to_positions(BlockwiseAttention.apply(
        to_heads(q, slices), block, weight, expand, carrier, pieces, scale, dv), slices)


def attended(slices, method):
    """The slices among which attention itself goes on: Ulysses has whole sequences by then."""
    return Slices(ALONE, slices.seq_len, False) if method == "ulysses" else slices


# ---- Ulysses: positions for heads ----

def to_heads(x, slices):
    """Some positions of all heads (b, s/cp, h, d) -> all of some heads (b, s, h/cp, d)."""
    axis, b = slices.axis, len(x)
    rows = [b * slices.length(owner) for owner in range(axis.size)]
    x = exchange_rows(parts_along(x, axis, 2).flatten(0, 2), axis, [rows[axis.rank]] * axis.size,
                      rows)
    x = torch.cat([part.unflatten(0, (b, -1)) for part in x.split(rows)], 1)
    return x.index_select(1, slices.rows().to(x.device))


def to_positions(x, slices):
    """The way back: (b, s, h/cp, d) -> (b, s/cp, h, d)."""
    axis, b = slices.axis, len(x)
    parts = [x.index_select(1, slices.positions(owner).to(x.device)).flatten(0, 1)
             for owner in range(axis.size)]
    mine = [b * slices.length(axis.rank)] * axis.size
    x = exchange_rows(torch.cat(parts), axis, [len(part) for part in parts], mine)
    return x.unflatten(0, (axis.size, b, -1)).movedim(0, 2).flatten(2, 3)


def gather_blocks(block, slices, tp):
    """This rank's tokens (b, s/cp, ...) -> all, one rank's behind the other's (b, s, ...)."""
    def forward(block):
        return torch.cat([other for _, other in Gather(slices, tp, block.shape).blocks(block)], 1)

    def backward(grad):
        way = Gather(slices, tp, block.shape)
        parts = grad.to(torch.promote_types(grad.dtype, torch.float32)).split(
            [slices.length(owner) for owner in range(slices.axis.size)], 1)
        for owner, part in enumerate(parts):
            way.add(owner, part)
        return way.home().to(grad.dtype)
    return Pair.apply(block, forward, backward)


# ---- the model ----

def parallelize(model, mesh, seq_len, method="ring", zigzag=True):
    """Have a model attend over mesh["cp"]: at the attention core, and in sums over a sequence.

    It is then given this rank's tokens, labels and positions (Slices.positions) of sequences of
    seq_len, and document ids of whole sequences. Raises ValueError as check() does.
    """
    axis, tp = mesh["cp"], mesh["tp"]
    if axis.size == 1:
        return
    check(model.config, axis.size, tp.size, seq_len, method)
    slices = Slices(axis, seq_len, zigzag)
    scope = attended(slices, method)
    model.attention_scope = lambda document_ids, device: plan(scope, document_ids)
    for block in model.blocks.values():
        attn = block.attn
        attn.core = (functools.partial(latent_core, attn, slices, tp, method)
                     if hasattr(attn, "wkv_b") else
                     functools.partial(head_core, attn, slices, method))
        if block.is_moe:
            block.ffn.sum_over_sequence = functools.partial(
                sum_over_cp, axis, block.ffn.sum_over_sequence)


def sum_over_cp(axis, sum_here, counts):
    """A MoE layer's counts over whole sequences: over tp, if that has set sum_here, and cp."""
    return all_reduce(sum_here(counts), axis)


# ---- how many bytes ----

def bytes_sent(config, cp, rank, batch, seq_len, method="ring", zigzag=True, tp=1, width=4, wide=4,
               repeated=False):
    """Bytes that a cp rank sends for a microbatch, forward and backward: over cp by part of the
    model, and over tp, where latents are put together.

    width: bytes of the compute type; wide: of the type of sums. repeated: --recompute full attends
    twice forward.
    """
    c, n = config, cp
    slices = Slices(Axis("cp", tuple(range(n)), rank), seq_len, zigzag)
    mine, kv_heads = slices.length(rank), max(c.n_kv_heads // tp, 1)
    latent, value = c.kv_lora_rank + c.qk_rope_head_dim, c.v_head_dim
    shape = (batch, mine, latent) if c.is_mla else (batch, mine, kv_heads, 2 * value)
    shares = Shares(slices, Axis("tp", tuple(range(tp if c.is_mla else 1)), 0), shape)
    sizes = [shares.size(owner) for owner in range(n)]
    others, over_tp = sum(sizes) - sizes[rank], [width, width + wide]  # a number's bytes each way
    if method == "ring":  # the block that arrives last, the next rank's, is not passed on
        forward = (sum(sizes) - sizes[(rank + 1) % n]) * width
        backward = forward + others * wide
    else:
        forward = (n - 1) * shares.longest() * width
        backward = forward + (n - 1) * shares.longest() * wide
    if method == "ulysses":
        going, coming = (n - 1) * batch * mine, batch * (seq_len - mine)  # rows
        in_width = c.n_heads // tp // n * (c.qk_nope_head_dim + c.qk_rope_head_dim)
        out_width = c.n_heads // tp // n * value
        over_tp, backward = [width, wide], backward - forward  # gathered latents are kept
        if not c.is_mla:
            in_width += math.lcm(kv_heads, n) // n * 2 * value
            forward = backward = 0
        forward += (going * in_width + coming * out_width) * width
        backward += (coming * in_width + going * out_width) * width
    times = [c.n_layers * (2 if repeated else 1), c.n_layers]
    balanced = c.n_moe_layers() * bool(c.seq_balance_coeff or c.aux_loss_coeff)
    return {"attention": times[0] * forward + times[1] * backward,
            "balance": balanced * 2 * (n - 1) * -(-batch * (c.num_experts + 1) // n) * wide,
            "over tp": (tp - 1) * others * c.is_mla * sum(a * b for a, b in zip(times, over_tp))}


# ---- demonstration ----

def draw(n, seq_len):
    """Print who attends to which block at each step; returns the pairs of each rank, placed in
    order and zig-zag."""
    print(f"{n} ranks, {seq_len} positions: the owner of each step's block, and of it \\ own, "
          "causal  # all  < early keys  v late queries  . nothing")
    print(f"{'in order':>19}{'pairs':>9}{'zig-zag':>15}{'pairs':>9}")
    work = [], []
    for rank in range(n):
        line = f"  rank {rank}"
        for zigzag, found in enumerate(work):
            slices = Slices(Axis("cp", tuple(range(n)), rank), seq_len, bool(zigzag))
            owners = [(rank - step) % n for step in range(n)]
            marks = ["\\" if owner == rank else "." if not causal_pieces(slices, owner) else
                     "#" if not zigzag else "<" if owner < rank else "v" for owner in owners]
            found.append(sum(pairs(causal_pieces(slices, owner)) for owner in owners))
            line += "  " + " ".join(f"{o}{m}" for o, m in zip(owners, marks)) + f"{found[-1]:9,}"
        print(line + "   " + ", ".join(f"{a}..{b - 1}" for a, b in slices.chunks(rank)))
    return work


def layers(heads=4, seq_len=45):
    """name -> a layer, its configuration, and inputs (b, s, ...) of its attention core."""
    from model import built, make_config
    torch.manual_seed(0)
    found = {}
    for name, model, shapes in (("MLA", "tiny", [(heads, 16), (heads, 8), (16,), (8,)]),
                                ("GQA", "tiny-dense", [(heads, 16), (2, 16), (2, 16)])):
        config = make_config(model, ["n_layers=1", "n_dense_layers=1", "init_std=0.3",
                                     f"n_heads={heads}"])
        found[name] = (built(config, dtype=torch.float64).blocks["0"].attn, config,
                       [torch.randn(2, seq_len, *shape, dtype=torch.float64) for shape in shapes])
    return found


def compare(layer, config, inputs, mesh, method, zigzag, document_ids=None):
    """A core over the ranks beside the same on one: the largest difference of outputs and all
    gradients, and of bytes from the formula's."""
    from mla import document_mask
    axis, seq_len = mesh["cp"], inputs[0].shape[1]
    slices = Slices(axis, seq_len, zigzag)
    mine = slices.positions(axis.rank)
    pull = torch.randn(2, seq_len, config.n_heads, 16, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(1))
    mask, pieces, weights = None, None, [layer.wkv_b.weight] if config.is_mla else []
    if document_ids is not None:
        mask = document_mask(document_ids)
        pieces = plan(attended(slices, method), document_ids)
    whole = [t.clone().requires_grad_() for t in inputs]
    expected = layer.core(*whole, mask)
    expected_grads = torch.autograd.grad(expected, whole + weights, pull)
    local = [t[:, mine].clone().requires_grad_() for t in inputs]
    ledger.clear()
    out = (latent_core(layer, slices, mesh["tp"], method, *local, pieces) if config.is_mla else
           head_core(layer, slices, method, *local, pieces))
    grads = torch.autograd.grad(out, local + weights, pull[:, mine])
    formula = bytes_sent(config, axis.size, axis.rank, 2, seq_len, method, zigzag, 1, 8, 8)
    found = [difference(out, expected[:, mine]), float(
        ledger.by_axis().get("cp", 0) != formula["attention"])]
    for ours, one in zip(grads, expected_grads):
        if one.dim() == 2:  # the weight's: each rank has a part of the sum
            found.append(difference(all_reduce(ours.clone(), axis), one))
        else:  # beside the largest of all: a query that sees one key has a gradient of rounding
            found.append(((ours - one[:, mine]).abs().max() / one.abs().max()).item())
    return max(found), formula["attention"]


def show(rank, n):
    """Who attends to what; every method beside one process; bytes."""
    from model import make_config
    worst, mesh, even = {}, Mesh(n, rank, cp=n), 16 * n * (16 * n + 1) // 2
    work = draw(n, 16 * n) if rank == 0 else ([even], [even // n])
    worst["pairs: the causal half, the same for every rank under zig-zag"] = float(
        sum(work[0]) != even or set(work[1]) != {even // n})
    document_ids, sent = torch.tensor([[0] * 9 + [1] * 30 + [2] * 6, [0] * 22 + [1] * 23]), {}
    for (name, layer), method in itertools.product(
            layers(2 * n).items(), ("ring", "allgather", "ulysses")):  # 2 heads a rank, for Ulysses
        found = [compare(*layer, mesh, method, zigzag, ids) for zigzag in (True, False)
                 for ids in (None, document_ids)]
        worst[f"{name}, {method}: in order and zig-zag, with and without documents"] = max(
            value for value, _ in found)
        sent[f"{name} {method}"] = found[0][1]
    q, k, v = (t.transpose(1, 2) for t in layer[2])
    worst["fused kernel beside the plain formulas"] = max(map(
        difference, attend_block(q, k, v, 0.4, True), plain_block(q, k, v, 0.4, True)))
    if rank == 0:
        v3 = make_config("deepseek-v3")
        latents = v3.kv_lora_rank + v3.qk_rope_head_dim
        full = v3.n_heads * (v3.qk_nope_head_dim + v3.qk_rope_head_dim + v3.v_head_dim)
        print("bytes that rank 0 sent, 2 sequences of 45: "
              + ", ".join(f"{what} {size:,}" for what, size in sent.items()))
        print(f"DeepSeek-V3, numbers a token and layer: {latents} travel in place of {full:,}, "
              f"{full / latents:.1f} times less")
        print("largest difference of outputs, gradients and bytes from one process's, the "
              "formula's:")
    return verdict(rank, worst)


# ---- benchmark ----

def bench(rank, n, rounds):
    """Attention forward and backward within documents of 512, so that bytes weigh more than
    products: latents on the ring beside gathered keys and values."""
    from mla import MLA
    from train import keep_freed_memory
    keep_freed_memory()
    # torch's own context_parallel has no CPU kernel (2.13), so it is not among those compared
    mesh, a, message = Mesh(n, rank, cp=n), torch.ones(512, 512), torch.ones(2 ** 21)
    slices, tp = Slices(mesh["cp"], 4096), mesh["tp"]
    product, shift = (paired_ratio(work, lambda: None, 5)[1] for work in (
        lambda: a @ a, lambda: ring_shift(message, slices.axis, len(message)).wait()))
    break_even = 1.5 * (2 * 512 ** 3 / product) / (4 * len(message) / shift)
    if rank == 0:
        print(f"{n} ranks: {2e-9 * 512 ** 3 / product:.0f} GFLOP/s and "
              f"{4e-9 * len(message) / shift:.2f} GB/s each: latents should win up to "
              f"{break_even:.0f} numbers", flush=True)
    pieces = plan(slices, torch.arange(4096)[None] // 512)
    for heads, c in ((16, 16), (2, 2048)):
        attn = MLA(8, heads, 0, c, 48, 16, 64, 1e-6, 0.1)
        inputs = [torch.randn(1, slices.length(rank), *width, requires_grad=True)
                  for width in ((heads, 48), (heads, 16), (c,), (16,))]
        pull = torch.randn(1, slices.length(rank), heads, 64)

        def gather_full():
            q_nope, q_pe, latent, k_pe = inputs
            k, v = attn.keys_and_values(attn.wkv_b(latent), k_pe)
            q = torch.cat([q_nope, q_pe], -1)
            head_core(attn, slices, "allgather", q, k, v, pieces).backward(pull)
        ratio, seconds = paired_ratio(
            lambda: latent_core(attn, slices, tp, "ring", *inputs, pieces).backward(pull),
            gather_full, rounds)
        if rank == 0:
            print(f"  4,096 positions in documents of 512, {heads} heads of 64, latent {c}, "
                  f"expected to {'win' if c < break_even else 'lose'}: {seconds * 1e3:.0f} ms, "
                  f"{ratio} x gathered full keys and values", flush=True)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    if flags.parse_args().bench:
        sys.exit(max(spawn(bench, n, 7) for n in (2, 4)))
    sys.exit(spawn(show, 4))
