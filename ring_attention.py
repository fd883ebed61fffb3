"""Context parallelism: every rank holds a part of each sequence; keys and values come round a ring.

Attention of a query is a weighted mean, and weighted means can be merged. Over a block of keys

    lse = log sum exp(q k scale)        out = sum exp(q k scale - lse) v

are the block's log-sum-exp and its mean value. Two blocks a, b of keys make one:

    lse = log(exp lse_a + exp lse_b)    out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

so a rank keeps its queries and has the blocks of all ranks come by, one at a time. Backward needs
the final lse and out alone: with P = exp(Q K^T scale - lse), the probabilities of the whole
softmax, block by block

    dV = P^T dO    dS = P (dO V^T - D) scale    dQ += dS K    dK = dS^T Q      D = rowsum(dO out)

since the softmax's own gradient, P (dP - sum P dP), has sum P dP = dO (P V) = dO out = D.

    step      0         1         2         3       The ring: a rank passes on the block that it
    rank 0  own 0  ->  of 3  ->  of 2  ->  of 1     has while it attends to it; in backward a
    rank 1  own 1  ->  of 0  ->  of 3  ->  of 2     block's gradient follows it from rank to rank,
    rank 2  own 2  ->  of 1  ->  of 0  ->  of 3     one hop behind, and its last hop leads home.

What travels is what the layer stores. MLA: the latent and the rotated k_pe; keys and values are
made from them (wkv_b) at every rank, one block at a time, and again in backward. GQA: keys, values.

Causal work is uneven when rank r holds the r-th part: rank 0 sees its own block alone. Zig-zag: of
2 cp chunks rank r holds r and 2 cp - 1 - r, an early one and a late one; then every step but the
first (own block, causal) is half a block for all: all queries with the early keys, or the late
queries with all keys. What lies above the diagonal, or in documents that the queries do not belong
to, is skipped. Where seq_len does not divide, some ranks hold a token more: no token is padding.

Numbers that a rank sends a layer and sequence, forward / backward (bytes_sent() is exact); s the
length, n = cp, w numbers a token of what travels: kv_lora_rank + rope (576 for DeepSeek-V3), or 2 g
head_dim; a gradient counts in float32:

    ring        (n-1)/n s w  /  2 (n-1)/n s w, each block once, its gradient once
    allgather   the same, all blocks at once before the first is used (Llama 3): nothing overlaps
    ulysses     (n-1)/n s/n (h (dk + dv) + what k and v take) / the same: all-to-all, heads for
                positions. GQA's k and v go that way too, MLA's latents are gathered, s w.

Break-even. Moving latents instead of h (dk + v) numbers a token saves the wire their forward and
their gradient (float32), and costs 4 products with wkv_b at every rank that a token comes to (twice
forward, twice for gradients) of 2 c h (nope + v) FLOPs. With F FLOP/s and B bytes/s a rank latents
win up to a latent of about c = (bytes a number + 4) F / (8 B) numbers: F / B in float32, 0.75 F / B
in bf16. For H100s of 400 TFLOP/s that is 6,000 at 50 GB/s and 670 over NVLink (450 GB/s); c is 512.

Under tp each rank rings 1/tp of the latents and gathers them over tp on arrival, inside the node.

Sources: Ring attention (arXiv 2310.01889), FlashAttention-2 (2307.08691, section 3.1), Llama 3
(2407.21783, 3.3.2), Ulysses (2309.14509), zig-zag: github.com/zhuzilin/ring-flash-attention.
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

from collectives import (Axis, Mesh, Pair, all_gather, all_reduce, difference, exchange_rows,
                         ledger, paired_ratio, parts_along, reduce_scatter, ring_shift, spawn,
                         verdict)

METHODS = ("ring", "allgather", "ulysses")
ALONE = Axis("cp", (0,), 0)
SCORES = 2 ** 22  # numbers that the plain path has at a time


# ---- who holds which positions ----

def check(config, cp, tp, seq_len, method):
    """Raises ValueError, with the legal values, for what can't be divided over cp ranks."""
    if cp > seq_len:
        raise ValueError(f"cp={cp} leaves a rank without any of seq_len={seq_len} positions; use "
                         f"at most {seq_len}")
    heads = config.n_heads // tp
    if method == "ulysses" and heads % cp:
        legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"cp={cp} does not divide the {heads} heads that a rank has with tp={tp}; "
                         f"ulysses needs cp to be one of {legal}; use ring or allgather for others")


def chunks_of(rank, cp, seq_len, zigzag=True):
    """[(start, stop), ...]: the positions of a rank, in order; chunks differ by a token at most."""
    parts = 2 * cp if zigzag else cp
    size, longer = divmod(seq_len, parts)
    return [(i * size + min(i, longer), (i + 1) * size + min(i + 1, longer))
            for i in ((rank, parts - 1 - rank) if zigzag else (rank,))]


def positions_of(rank, cp, seq_len, zigzag=True):
    """(s/cp,) the positions of a rank's tokens."""
    return torch.cat([torch.arange(*chunk) for chunk in chunks_of(rank, cp, seq_len, zigzag)])


@dataclasses.dataclass(frozen=True)
class Slices:
    """How sequences of seq_len positions lie on the ranks of an axis."""
    axis: Axis
    seq_len: int
    zigzag: bool = True

    def chunks(self, owner):
        return chunks_of(owner, self.axis.size, self.seq_len, self.zigzag)

    def positions(self, owner):
        return positions_of(owner, self.axis.size, self.seq_len, self.zigzag)

    def length(self, owner):
        return sum(stop - start for start, stop in self.chunks(owner))


# ---- which keys a rank's queries attend to ----
#
# A piece is (sequences, queries, keys, causal): slices of the batch, of this rank's rows and of the
# owner's, within which every query sees every key, or, when causal, the i-th query the keys 0..i.

def plan(slices, document_ids=None):
    """owner -> the pieces of its block that this rank's queries attend to.

    document_ids (b, seq_len): of the whole sequences, known to all ranks; a document is a stretch.
    """
    owners = range(slices.axis.size)
    if document_ids is None:
        return [causal_pieces(slices, owner) for owner in owners]
    pieces = [[] for _ in owners]
    for row, ids in enumerate(document_ids.tolist()):
        stretches = [document_stretches(ids, slices.chunks(owner)) for owner in owners]
        for owner, (document, start, queries) in itertools.product(
                owners, stretches[slices.axis.rank]):
            pieces[owner] += [(slice(row, row + 1), queries, keys, first == start)
                              for other, first, keys in stretches[owner]
                              if other == document and first <= start]
    return pieces


def causal_pieces(slices, owner):
    """The one piece of a rank without documents, or none."""
    rank, everything = slices.axis.rank, slice(None)
    mine, theirs = slice(0, slices.length(rank)), slice(0, slices.length(owner))
    if owner == rank:  # positions rise along the rows: the diagonal of both chunks and between
        return [(everything, mine, theirs, True)]
    start, stop = slices.chunks(owner)[0]
    if owner < rank:  # its early chunk lies before both of mine, its late one behind
        return nonempty([(everything, mine, slice(0, stop - start), False)])
    if not slices.zigzag:
        return []
    start, stop = slices.chunks(rank)[0]  # both of its chunks lie between mine
    return nonempty([(everything, slice(stop - start, mine.stop), theirs, False)])


def nonempty(pieces):
    return [p for p in pieces if p[1].start < p[1].stop and p[2].start < p[2].stop]


def document_stretches(ids, chunks):
    """[(document, first position, rows)] of one document each, in a rank's chunks."""
    found, row = [], 0
    for chunk in chunks:
        for document, places in itertools.groupby(range(*chunk), ids.__getitem__):
            places = list(places)
            found.append((document, places[0], slice(row, row + len(places))))
            row += len(places)
    return found


def pairs(pieces):
    """How many pairs of query and key the pieces have, in one sequence."""
    total = 0
    for _, queries, keys, causal in pieces:
        s, t = queries.stop - queries.start, keys.stop - keys.start
        total += s * (s + 1) // 2 if causal else s * t
    return total


# ---- attention of some queries to one block of keys ----
#
# Here heads come before positions, as the kernels want it: q (b, h, s, dk), k (b, g, t, dk),
# v (b, g, t, dv), each key head serving h/g query heads.

def has_kernel(q):
    """Whether torch has a fused kernel for q that returns the log-sum-exp and takes it back."""
    return q.device.type == "cpu" or (
        q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256
        and q.shape[-1] % 8 == 0)


def widened(width, *tensors):
    """Zeros behind each head: they change no score, and no value that is used."""
    return [F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in tensors]


def attend_block(q, k, v, scale, causal):
    """out (b, h, s, dv) and lse (b, h, s) over these keys alone; fused where torch can."""
    width = max(q.shape[-1], v.shape[-1])  # fused kernels want one width
    wide_q, wide_k, wide_v = widened(width, q, k, v)
    if not has_kernel(wide_q):
        return plain_block(q, k, v, scale, causal)
    kernel = (torch.ops.aten._scaled_dot_product_flash_attention if q.is_cuda else
              torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
    out, lse = kernel(wide_q, wide_k, wide_v, 0.0, causal, scale=scale)[:2]
    return out[..., :v.shape[-1]], lse


def attend_block_backward(grad_out, q, k, v, out, lse, scale, causal):
    """Gradients of q, k, v through these keys; out and lse are those over all keys."""
    width = max(q.shape[-1], v.shape[-1])
    wide = widened(width, grad_out, q, k, v, out)
    if not has_kernel(wide[1]):
        return plain_block_backward(grad_out, q, k, v, out, lse, scale, causal)
    if q.is_cuda:
        unused = torch.empty(2, dtype=torch.int64, device=q.device)  # random state of dropout
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *wide, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, unused,
            unused, scale=scale)
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, lse, 0.0, causal, scale=scale)
    return [grad[..., :t.shape[-1]] for grad, t in zip(grads, (q, k, v))]


def scores_of(q, k, scale, causal):
    """Yield (rows, q (b, g, h/g, n, dk), scores (b, g, h/g, n, t)) for n queries at a time, so that
    never more than SCORES scores exist. In float32, or float64."""
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
    """attend_block() written out; the result is in float32, or float64."""
    q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k, v))
    out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3])
    for rows, _, scores in scores_of(q, k, scale, causal):
        lse_part = scores.logsumexp(-1, keepdim=True)
        out[:, :, rows] = ((scores - lse_part).exp() @ v[:, :, None]).flatten(1, 2)
        lse[:, :, rows] = lse_part[..., 0].flatten(1, 2)
    return out, lse


def plain_block_backward(grad_out, q, k, v, out, lse, scale, causal):
    """attend_block_backward() written out: the module docstring's formulas, line by line."""
    grad_out, q, k, v, out = (t.to(torch.promote_types(t.dtype, torch.float32))
                              for t in (grad_out, q, k, v, out))
    grad_q, grad_k, grad_v = (torch.zeros_like(t) for t in (q, k, v))
    for rows, part, scores in scores_of(q, k, scale, causal):
        d_out, o, log_sum = (t[:, :, rows].unflatten(1, (k.shape[1], -1))
                             for t in (grad_out, out, lse[..., None]))
        p = (scores - log_sum).exp()
        grad_v += (p.mT @ d_out).sum(2)
        d = (d_out * o).sum(-1, keepdim=True)
        ds = p * (d_out @ v[:, :, None].mT - d) * scale
        grad_q[:, :, rows] = (ds @ k[:, :, None]).flatten(1, 2)
        grad_k += (ds.mT @ part).sum(2)
    return grad_q, grad_k, grad_v


def merge(out, lse, new_out, new_lse):
    """Add a block's attention to that of the blocks before, in place: (b, h, s, dv), (b, h, s)."""
    both = torch.logaddexp(lse, new_lse)
    out.mul_((lse - both).exp_()[..., None])
    out.add_(new_out * (new_lse - both).exp_()[..., None])
    lse.copy_(both)


# ---- how blocks come and gradients go home ----
#
# A block (b, s/cp, ...) that all ranks of a tp group hold alike (MLA's latents) crosses the axis in
# tp shares and is put together on arrival. Without tp a share is the whole, and nothing is sent.

def share_of(x, tp):
    """This rank's 1/tp of the numbers of x, padded so that it divides."""
    return F.pad(x.flatten(), (0, -x.numel() % tp.size)).view(tp.size, -1)[tp.rank]


def whole_of(share, tp, shape):
    return all_gather(share, tp)[:math.prod(shape)].view(shape)


def sum_share(x, tp):
    """This rank's share of the sum of x over tp: every rank has the gradient of its heads."""
    return reduce_scatter(F.pad(x.flatten(), (0, -x.numel() % tp.size)), tp)


def spread(share, tp, shape):
    """The share in its place among zeros: the layer's input will be summed over tp."""
    full = share.new_zeros(tp.size, len(share))
    full[tp.rank] = share
    return full.flatten()[:math.prod(shape)].view(shape)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the ranks' blocks and shares; shape: of this rank's block, (b, s/cp, ...)."""
    slices: Slices
    tp: Axis
    shape: tuple

    def block(self, owner):
        return self.shape[0], self.slices.length(owner), *self.shape[2:]

    def share(self, owner):
        """Numbers on the wire."""
        return -(-math.prod(self.block(owner)) // self.tp.size)

    def longest(self):
        return max(self.share(owner) for owner in range(self.slices.axis.size))


class Ring:
    """One pass of blocks, or of blocks and gradients, from rank to rank."""

    def __init__(self, slices, tp, shape):
        self.axis, self.tp, self.sizes = slices.axis, tp, Sizes(slices, tp, shape)
        self.own = self.travelling = None

    def blocks(self, block):
        """Yield (owner, block), this rank's own first; the next one travels meanwhile."""
        n, share = self.axis.size, share_of(block, self.tp)
        for step in range(n):
            owner = (self.axis.rank - step) % n
            if step:
                share = arriving.wait()
                block = whole_of(share, self.tp, self.sizes.block(owner))
            if step < n - 1:
                arriving = ring_shift(share, self.axis, self.sizes.share((owner - 1) % n))
            yield owner, block

    def add(self, owner, grad):
        """The gradient of the block at hand: with what ranks before have added, on to the next. It
        started at the rank behind its owner, whose own part stays at home."""
        if owner == self.axis.rank:
            self.own = grad
            return
        share = sum_share(grad, self.tp)
        if self.travelling is not None:
            share += self.travelling.wait()
        self.travelling = ring_shift(share, self.axis,
                                     self.sizes.share((owner - 1) % self.axis.size))

    def home(self):
        """The gradient of this rank's own block, when all have been added."""
        if self.travelling is None:
            return self.own
        return self.own + spread(self.travelling.wait(), self.tp, self.own.shape)


class Gather:
    """The same with one all-gather before and one reduce-scatter behind. On the wire blocks are
    padded to the longest."""

    def __init__(self, slices, tp, shape):
        self.axis, self.tp, self.sizes, self.grads = slices.axis, tp, Sizes(slices, tp, shape), []

    def padded(self, share):
        return F.pad(share, (0, self.sizes.longest() - len(share)))

    def blocks(self, block):
        """Yield (owner, block) in the order of the ranks."""
        shares = all_gather(self.padded(share_of(block, self.tp))[None], self.axis)
        for owner in range(self.axis.size):
            share = shares[owner, :self.sizes.share(owner)]
            yield owner, (block if owner == self.axis.rank else
                          whole_of(share, self.tp, self.sizes.block(owner)))

    def add(self, owner, grad):
        """The gradient of the next owner's block; this rank's own part stays at home."""
        if owner == self.axis.rank:
            self.own = grad
            self.grads.append(grad.new_zeros(self.sizes.longest()))
        else:
            self.grads.append(self.padded(sum_share(grad, self.tp)))

    def home(self):
        """The gradient of this rank's own block, when all have been added."""
        share = reduce_scatter(torch.stack(self.grads), self.axis)[0]
        share = share[:self.sizes.share(self.axis.rank)]
        return self.own + spread(share, self.tp, self.sizes.shape)


CARRIERS = {"ring": Ring, "allgather": Gather}


# ---- blockwise attention ----

class BlockwiseAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks' blocks.

    expand(block, weight) -> keys and values of one block, which exist while it is at hand; weight
    may be None. Backward has every block come by once more, expands it again, and sends its
    gradient home. Sums over blocks are in float32, or float64: the output, the gradients of the
    queries, of a block and of `weight`.
    """

    @staticmethod
    def forward(ctx, q, block, weight, expand, carrier, pieces, scale):
        """q (b, s/cp, h, dk), block (b, s/cp, ...) -> (b, s/cp, h, dv)."""
        wide, out = torch.promote_types(q.dtype, torch.float32), None
        queries_first = q.transpose(1, 2)  # (b, h, s/cp, dk)
        lse = torch.full(queries_first.shape[:3], -math.inf, dtype=wide, device=q.device)
        for owner, arrived in carrier(block.shape).blocks(block):
            if not pieces[owner]:
                continue
            k, v = (t.transpose(1, 2) for t in expand(arrived, weight))
            if out is None:  # with the positions before the heads in memory, as wo reads it
                out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide,
                                  device=q.device).transpose(1, 2)
            for rows, queries, keys, causal in pieces[owner]:
                new = attend_block(queries_first[rows, :, queries], k[rows, :, keys],
                                   v[rows, :, keys], scale, causal)
                merge(out[rows, :, queries], lse[rows, :, queries], *new)
        out = out.to(q.dtype).transpose(1, 2)
        ctx.save_for_backward(q, block, weight, out, lse)
        ctx.rest = expand, carrier, pieces, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        """grad_out (b, s/cp, h, dv)."""
        q, block, weight, out, lse = ctx.saved_tensors
        expand, carrier, pieces, scale = ctx.rest
        wide = lse.dtype
        grad_q = torch.zeros_like(q, dtype=wide).transpose(1, 2)
        grad_weight = None if weight is None else torch.zeros_like(weight, dtype=wide)
        q, out, grad_out = (t.transpose(1, 2) for t in (q, out, grad_out))
        ring = carrier(block.shape)
        for owner, arrived in ring.blocks(block):
            if not pieces[owner]:
                ring.add(owner, torch.zeros_like(arrived, dtype=wide))
                continue
            with torch.enable_grad():
                inputs = [t.detach().requires_grad_() for t in (arrived, weight) if t is not None]
                k, v = expand(*inputs, *[None] * (weight is None))
            heads_k, heads_v = (t.detach().transpose(1, 2) for t in (k, v))
            grads = [torch.zeros_like(t, dtype=wide).transpose(1, 2) for t in (k, v)]
            for rows, queries, keys, causal in pieces[owner]:
                at, there = (rows, slice(None), queries), (rows, slice(None), keys)
                new = attend_block_backward(grad_out[at], q[at], heads_k[there], heads_v[there],
                                            out[at], lse[at], scale, causal)
                grad_q[at] += new[0]
                grads[0][there] += new[1]
                grads[1][there] += new[2]
            grads = torch.autograd.grad((k, v), inputs, [
                g.transpose(1, 2).to(k.dtype) for g in grads])
            ring.add(owner, grads[0].to(wide))
            if weight is not None:
                grad_weight += grads[1]
        grad_block = ring.home().to(block.dtype)
        if weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_q.transpose(1, 2).to(q.dtype), grad_block, grad_weight, None, None, None, None


def split_heads(block, weight):
    """Keys and values side by side, as GQA's travel: (b, t, g, 2 head_dim) -> two of head_dim."""
    return block.chunk(2, -1)


def expand_latents(attn, block, weight):
    """[latent | k_pe] (b, t, c + r), rows of wkv_b -> k (b, t, h, nope + r), v (b, t, h, v)."""
    latent, k_pe = block.split([attn.kv_lora_rank, attn.qk_rope_head_dim], -1)
    return attn.keys_and_values(F.linear(latent, weight), k_pe)


def latent_core(attn, slices, tp, method, q_nope, q_pe, latent, k_pe, pieces):
    """MLA.core() of this rank's tokens, (b, s/cp, ...) all: latents come to the queries, except
    under ulysses, where queries go to the ranks of their heads and latents to all."""
    q, block = torch.cat([q_nope, q_pe], -1), torch.cat([latent, k_pe], -1)
    weight = attn.wkv_b.weight
    if method != "ulysses":
        return BlockwiseAttention.apply(
            q, block, weight, functools.partial(expand_latents, attn),
            functools.partial(CARRIERS[method], slices, tp), pieces or plan(slices), attn.scale)
    weight = weight.unflatten(0, (slices.axis.size, -1))[slices.axis.rank]  # of this rank's heads
    whole = Slices(ALONE, slices.seq_len, False)
    out = BlockwiseAttention.apply(
        to_heads(q, slices), gather_blocks(block, slices, tp), weight,
        functools.partial(expand_latents, attn), functools.partial(Ring, whole, ALONE),
        pieces or plan(whole), attn.scale)
    return to_positions(out, slices)


def head_core(attn, slices, method, q, k, v, pieces):
    """GQA.core() of this rank's tokens, (b, s/cp, ...) all. Its heads are cut over tp as they are:
    each tp rank has a ring of its own."""
    if method != "ulysses":
        return BlockwiseAttention.apply(
            q, torch.cat([k, v], -1), None, split_heads,
            functools.partial(CARRIERS[method], slices, ALONE), pieces or plan(slices), attn.scale)
    # every rank needs key heads of its own: repeated until cp divides their number
    repeat = math.lcm(k.shape[2], slices.axis.size) // k.shape[2]
    block = torch.cat([k, v], -1).repeat_interleave(repeat, 2)
    whole = Slices(ALONE, slices.seq_len, False)
    out = BlockwiseAttention.apply(
        to_heads(q, slices), to_heads(block, slices), None, split_heads,
        functools.partial(Ring, whole, ALONE), pieces or plan(whole), attn.scale)
    return to_positions(out, slices)


# ---- Ulysses: heads for positions ----

def to_heads(x, slices):
    """Some positions of all heads (b, s/cp, h, d) -> all of some heads (b, s, h/cp, d)."""
    axis, b = slices.axis, len(x)
    rows = [b * slices.length(owner) for owner in range(axis.size)]
    x = exchange_rows(parts_along(x, axis, 2).flatten(0, 2), axis, [rows[axis.rank]] * axis.size,
                      rows)
    x = torch.cat([part.unflatten(0, (b, -1)) for part in x.split(rows)], 1)
    return x.index_select(1, rows_by_position(slices).to(x.device))


def to_positions(x, slices):
    """The way back: (b, s, h/cp, d) -> (b, s/cp, h, d)."""
    axis, b = slices.axis, len(x)
    parts = [x.index_select(1, slices.positions(owner).to(x.device)).flatten(0, 1)
             for owner in range(axis.size)]
    mine = b * slices.length(axis.rank)
    x = exchange_rows(torch.cat(parts), axis, [len(part) for part in parts], [mine] * axis.size)
    return x.unflatten(0, (axis.size, b, -1)).movedim(0, 2).flatten(2, 3)


def rows_by_position(slices):
    """Position -> its row when the ranks' blocks lie one behind the other."""
    return torch.cat([slices.positions(owner) for owner in range(slices.axis.size)]).argsort()


def gather_blocks(block, slices, tp):
    """This rank's tokens (b, s/cp, w) -> all of them by position (b, s, w)."""
    def forward(block):
        blocks = [arrived for _, arrived in Gather(slices, tp, block.shape).blocks(block)]
        return torch.cat(blocks, 1).index_select(1, rows_by_position(slices).to(block.device))

    def backward(grad):
        way = Gather(slices, tp, (len(grad), slices.length(slices.axis.rank), *grad.shape[2:]))
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        for owner in range(slices.axis.size):
            way.add(owner, wide.index_select(1, slices.positions(owner).to(grad.device)))
        return way.home().to(grad.dtype)
    return Pair.apply(block, forward, backward)


# ---- the model ----

def parallelize(model, mesh, seq_len, method="ring", zigzag=True):
    """Have a model attend over mesh["cp"]: at the attention core, and in the sums over sequences.

    It is given this rank's tokens, labels and positions (positions_of) of sequences of seq_len, and
    the document ids of whole sequences. Raises ValueError as check() does.
    """
    axis, tp = mesh["cp"], mesh["tp"]
    if axis.size == 1:
        return
    check(model.config, axis.size, tp.size, seq_len, method)
    slices = Slices(axis, seq_len, zigzag)
    attended = Slices(ALONE, seq_len, False) if method == "ulysses" else slices
    model.document_mask = functools.partial(plan, attended)
    for block in model.blocks.values():
        attn = block.attn
        attn.core = (functools.partial(latent_core, attn, slices, tp, method)
                     if hasattr(attn, "wkv_b") else
                     functools.partial(head_core, attn, slices, method))
        if block.is_moe:
            block.ffn.sum_over_sequence = functools.partial(sum_over_cp, axis,
                                                            block.ffn.sum_over_sequence)


def sum_over_cp(axis, sum_here, counts):
    """A MoE layer's counts over whole sequences: over tp, if that has set sum_here, and cp."""
    return all_reduce(sum_here(counts), axis)


# ---- how many bytes ----

def bytes_sent(config, cp, rank, batch, seq_len, method="ring", zigzag=True, tp=1, width=4, wide=4,
               repeated=False):
    """Bytes that a cp rank sends for a microbatch, forward and backward: over cp by part of the
    model, and over tp, where latents are put together on arrival.

    width: bytes of the compute type; wide: of the type of sums. repeated: --recompute full attends
    twice forward.
    """
    c, n = config, cp
    slices = Slices(Axis("cp", tuple(range(n)), rank), seq_len, zigzag)
    mine, heads, kv_heads = slices.length(rank), c.n_heads // tp, max(c.n_kv_heads // tp, 1)
    shape = (batch, mine, c.kv_lora_rank + c.qk_rope_head_dim) if c.is_mla else (
        batch, mine, kv_heads, 2 * c.v_head_dim)
    sizes = Sizes(slices, Axis("tp", tuple(range(tp if c.is_mla else 1)), 0), shape)
    shares = [sizes.share(owner) for owner in range(n)]
    others = sum(shares) - shares[rank]
    if method == "ring":  # the last block to arrive, the next rank's, is not passed on
        blocks, grads = sum(shares) - shares[(rank + 1) % n], others
    else:
        blocks = grads = (n - 1) * sizes.longest()
    forward, backward = blocks * width, blocks * width + grads * wide
    inside, inside_backward = others * width, others * (width + wide)  # times tp - 1
    if method == "ulysses":
        qk, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
        going, coming = (n - 1) * batch * mine, batch * (seq_len - mine)  # rows
        to_heads_width, to_positions_width = heads // n * qk, heads // n * value
        forward, backward, inside_backward = forward, grads * wide, others * wide
        if not c.is_mla:  # no gathering of latents: keys and values go with the queries
            to_heads_width += math.lcm(kv_heads, n) // n * 2 * value
            forward = backward = 0
        forward += (going * to_heads_width + coming * to_positions_width) * width
        backward += (coming * to_heads_width + going * to_positions_width) * width
    times = c.n_layers * (2 if repeated else 1)
    balanced = c.n_moe_layers() * bool(c.seq_balance_coeff or c.aux_loss_coeff)
    return {"attention": times * forward + c.n_layers * backward,
            "balance": balanced * 2 * (n - 1) * -(-batch * (c.num_experts + 1) // n) * wide,
            "over tp": c.is_mla * (tp - 1) * (times * inside + c.n_layers * inside_backward)}


# ---- demonstration ----

MARKS = {"own": "\\", "all": "#", "early keys": "<", "late queries": "v", "nothing": "."}


def mark(slices, owner):
    """What a rank's queries do with the owner's block."""
    pieces = causal_pieces(slices, owner)
    if not pieces:
        return MARKS["nothing"]
    _, queries, keys, causal = pieces[0]
    return MARKS["own" if causal else "late queries" if queries.start else "early keys"
                 if keys.stop < slices.length(owner) else "all"]


def draw(n, seq_len):
    """Print who attends to which block at each step; returns the pairs of each rank, placed in
    order and zig-zag."""
    print(f"{n} ranks, {seq_len} positions; per step the owner of the block, and of it "
          + ", ".join(f"{sign} {what}" for what, sign in MARKS.items()))
    print(f"{'in order':>27}{'pairs':>9}{'zig-zag':>21}{'pairs':>9}   positions")
    work = [], []
    for rank in range(n):
        line = f"  rank {rank}"
        for zigzag, found in zip((False, True), work):
            slices = Slices(Axis("cp", tuple(range(n)), rank), seq_len, zigzag)
            owners = [(rank - step) % n for step in range(n)]
            found.append(sum(pairs(causal_pieces(slices, owner)) for owner in owners))
            steps = " ".join(f"{owner}{mark(slices, owner)}" for owner in owners)
            line += f"{steps:>{19 if not zigzag else 21}}{found[-1]:9,}"
        print(line + "   " + ", ".join(f"{a}..{b - 1}" for a, b in slices.chunks(rank)))
    return work


def attention_layers():
    """An MLA and a GQA layer of a model, with inputs (b, s, ...) of their cores, in float64."""
    from mla import MLA
    from model import GQA
    torch.manual_seed(0)
    mla = MLA(8, 4, 0, 12, 8, 4, 6, 1e-6, 0.3).double()
    gqa = GQA(8, 4, 2, 6, 0.4, True).double()
    widths = {"MLA": (mla, [(4, 8), (4, 4), (12,), (4,)]), "GQA": (gqa, [(4, 6), (2, 6), (2, 6)])}
    return {name: (layer, [torch.randn(2, 45, *width, dtype=torch.float64) for width in all_widths])
            for name, (layer, all_widths) in widths.items()}


def compare(name, layer, inputs, mesh, method, zigzag, document_ids, worst):
    """A core over the ranks beside the same on one: outputs and gradients of all inputs."""
    from mla import document_mask
    slices = Slices(mesh["cp"], inputs[0].shape[1], zigzag)
    mine = slices.positions(slices.axis.rank)
    pull = torch.randn(2, 45, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = [t.clone().requires_grad_() for t in inputs]
    weights = [layer.wkv_b.weight] if name == "MLA" else []
    expected = layer.core(*whole, None if document_ids is None else document_mask(document_ids))
    expected_grads = torch.autograd.grad(expected, whole + weights, pull)
    local = [t[:, mine].clone().requires_grad_() for t in inputs]
    core = (functools.partial(latent_core, layer, slices, mesh["tp"], method) if name == "MLA" else
            functools.partial(head_core, layer, slices, method))
    attended = Slices(ALONE, 45, False) if method == "ulysses" else slices
    out = core(*local, None if document_ids is None else plan(attended, document_ids))
    grads = torch.autograd.grad(out, local + weights, pull[:, mine])
    found = [difference(out, expected[:, mine])]
    found += [difference(a, b[:, mine]) for a, b in zip(grads, expected_grads[:len(local)])]
    found += [difference(all_reduce(a.clone(), mesh["cp"]), b)
              for a, b in zip(grads[len(local):], expected_grads[len(local):])]
    worst[f"{name} {method}{'' if zigzag else ', in order'}"
          f"{'' if document_ids is None else ', documents'}"] = max(found)


def show(rank, n):
    """Who attends to what; every method beside one process; bytes."""
    work = draw(n, 16 * n) if rank == 0 else None
    mesh, worst = Mesh(n, rank, cp=n), {}
    document_ids = torch.tensor([[0] * 9 + [1] * 30 + [2] * 6, [0] * 22 + [1] * 3 + [2] * 20])
    layers = attention_layers()
    for (name, (layer, inputs)), method, zigzag, ids in itertools.product(
            layers.items(), METHODS, (True, False), (None, document_ids)):
        compare(name, layer, inputs, mesh, method, zigzag, ids, worst)
    q, k, v = (t.transpose(1, 2) for t in layers["GQA"][1])
    for what, ours in (("fused kernel beside the plain formulas", attend_block),):
        worst[what] = max(difference(a, b) for a, b in zip(
            ours(q, k, v, 0.4, True), plain_block(q, k, v, 0.4, True)))
    if rank == 0:
        even = 16 * n * (16 * n + 1) // 2
        worst["pairs: the causal half, shared evenly by zig-zag"] = float(
            sum(work[0]) != even or {even} != {n * pairs for pairs in work[1]})
        print("largest difference of outputs and gradients from one process, 45 positions:")
    else:
        worst["pairs: the causal half, shared evenly by zig-zag"] = 0.0
    show_bytes(rank, n, layers["MLA"], mesh, worst)
    return verdict(rank, worst)


def show_bytes(rank, n, layer_and_inputs, mesh, worst):
    """What a forward and backward of the MLA layer sent, and DeepSeek-V3's bytes a token."""
    from model import make_config
    layer, inputs = layer_and_inputs
    config = make_config("tiny", ["n_layers=1", "n_dense_layers=1", "kv_lora_rank=12",
                                  "qk_nope_head_dim=8", "qk_rope_head_dim=4", "v_head_dim=6"])
    slices, lines = Slices(mesh["cp"], 45), []
    mine = slices.positions(rank)
    for method in METHODS:
        ledger.clear()
        local = [t[:, mine].clone().requires_grad_() for t in inputs]
        latent_core(layer, slices, mesh["tp"], method, *local, None).sum().backward()
        sent = ledger.by_axis()["cp"]
        formula = bytes_sent(config, n, rank, 2, 45, method, width=8, wide=8)["attention"]
        worst[f"bytes of {method} are the formula's"] = float(sent != formula)
        lines.append(f"{method} {sent:,}")
    v3 = make_config("deepseek-v3")
    latents, full = v3.kv_lora_rank + v3.qk_rope_head_dim, v3.n_heads * (
        v3.qk_nope_head_dim + v3.qk_rope_head_dim + v3.v_head_dim)
    if rank == 0:
        print(f"bytes a rank sent for MLA, 2 sequences of 45: {', '.join(lines)}")
        print(f"DeepSeek-V3, numbers a token and layer: latents {latents:,}, expanded {full:,}: "
              f"{full / latents:.1f} times")


# ---- benchmark ----

def full_core(attn, slices, q_nope, q_pe, latent, k_pe, pieces=None):
    """For comparison: every rank gathers all keys and values, expanded by their owners, and keeps
    them for backward."""
    k, v = attn.keys_and_values(attn.wkv_b(latent), k_pe)
    whole, row, pieces = Slices(ALONE, slices.seq_len, False), 0, []
    for start, stop in slices.chunks(slices.axis.rank):
        queries, everything = slice(row, row + stop - start), slice(None)
        pieces += nonempty([(everything, queries, slice(0, start), False)])
        pieces.append((everything, queries, slice(start, stop), True))
        row += stop - start
    return BlockwiseAttention.apply(
        torch.cat([q_nope, q_pe], -1), gather_blocks(torch.cat([k, v], -1), slices, ALONE), None,
        lambda block, weight: block.split([k.shape[-1], v.shape[-1]], -1),
        functools.partial(Ring, whole, ALONE), [pieces], attn.scale)


def rates(axis):
    """(FLOP/s of a matrix product, bytes/s round the ring) of a rank, all at work together."""
    a, message = torch.ones(512, 512), torch.ones(2 ** 21)
    seconds = [paired_ratio(function, lambda: None, 5)[1] for function in (
        lambda: a @ a, lambda: ring_shift(message, axis, len(message)).wait())]
    return 2 * 512 ** 3 / seconds[0], 4 * len(message) / seconds[1]


def bench(rank, n, rounds):
    """Attention forward and backward: latents on the ring beside gathered keys and values."""
    from mla import MLA
    from train import keep_freed_memory
    keep_freed_memory()
    mesh, seq_len = Mesh(n, rank, cp=n), 4096
    flops, bandwidth = rates(mesh["cp"])
    break_even = flops / bandwidth
    if rank == 0:
        print(f"{n} ranks: {flops / 1e9:.0f} GFLOP/s and {bandwidth / 1e9:.2f} GB/s a rank: latents "
              f"should win up to kv_lora_rank {break_even:.0f}", flush=True)
    for heads, c, nope, rope in ((16, 16, 48, 16), (2, 2048, 48, 16)):
        attn = MLA(8, heads, 0, c, nope, rope, nope + rope, 1e-6, 0.1)
        slices = Slices(mesh["cp"], seq_len)
        mine = slices.length(rank)
        torch.manual_seed(rank)
        inputs = [torch.randn(1, mine, *width, requires_grad=True)
                  for width in ((heads, nope), (heads, rope), (c,), (rope,))]
        pull = torch.randn(1, mine, heads, nope + rope)
        ratio, seconds = paired_ratio(
            lambda: latent_core(attn, slices, mesh["tp"], "ring", *inputs, None).backward(pull),
            lambda: full_core(attn, slices, *inputs).backward(pull), rounds)
        if rank == 0:
            print(f"  {seq_len} positions, {heads} heads of {nope + rope}, latent {c}: ring of "
                  f"latents {seconds * 1e3:.0f} ms, {ratio} x gathered keys and values; expected to "
                  f"{'win' if c < break_even else 'lose'}", flush=True)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    if flags.parse_args().bench:
        sys.exit(max(spawn(bench, n, 7) for n in (2, 4)))
    sys.exit(spawn(show, 4))
