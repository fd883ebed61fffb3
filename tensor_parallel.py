"""Tensor parallelism: every layer is cut over the ranks of a node, and each token's width with it.

The block-matrix identity. A matrix cut into columns makes columns of the product; the next one, cut
into the matching rows, makes partial products that add up to the whole:

    X [ A1 | A2 ] = [ X A1 | X A2 ]        [ Y1 | Y2 ] [ B1 ] = Y1 B1 + Y2 B2
                                                       [ B2 ]
so  f(X A) B = f(X A1) B1 + f(X A2) B2     for any f that works number by number (or head by head)

Two layers cost one sum over the ranks. Between the pairs, where norms and additions work token by
token, each rank has a part of the sequence (sequence parallelism): the sum is a reduce-scatter into
sequence shards, and the next pair begins with an all-gather, which together are an all-reduce.

    x (b, s/tp, d) -> norm -> gather -> (b, s, d) -> w1, w3 by columns -> (b, s, m/tp)
                   -> w2 by rows -> partial sums (b, s, d) -> reduce-scatter -> (b, s/tp, d)

    attention  heads are cut. MLA's down-projections run on the sequence shard, and what is gathered
               is their output: q_lora_rank + kv_lora_rank + rope numbers a token in place of d, for
               DeepSeek-V3 2,112 of 7,168. Without query compression d is gathered, once for both.
    MoE        the router runs on the sequence shard; tokens, gate weights and expert ids are
               gathered, each expert and the shared experts are cut along their hidden width
    embedding  vocabulary rows are cut: a rank looks up what it has, the sum does the rest
    head, loss vocabulary rows are cut: a rank has its logits, and all share one log-sum-exp each

A layer cut by columns computes its weights' gradients while its input's is being reduced. What sees
only a sequence shard, or the gradients of some heads only (norms, router, down-projections), has
partial sums as gradients; sum_partial_gradients() adds them up in one call a step, in float32.
Hidden states are summed in the compute type, as elsewhere: tp numbers, not a batch of them.

Numbers that a rank sends a token, times (tp-1)/tp, forward, and as many backward (bytes_sent()):

    attention   q_lora_rank + kv_lora_rank + rope + d, or 2 d      SwiGLU     2 d
    MoE         2 d + top_k gate weights (+ top_k ids, forward)    embedding  d
    head        2 d + 2 tp in forward, which forms the gradients, and nothing in backward

Sources: Megatron-LM (arXiv 1909.08053, section 3), sequence parallelism (2205.05198, section 4.2).
Course: 12:13:08 from first principles, 13:44:57 coding it, 18:02:52 for MoE.

    python tensor_parallel.py            partial products by hand; 2 ranks beside one process; PASS
    python tensor_parallel.py --bench    a step beside torch's parallelize_module, 2 and 4 ranks
"""
import argparse
import functools
import re
import sys

import torch
import torch.nn.functional as F
from torch import nn

from collectives import (Cut, Label, Linear, Mesh, Pair, all_gather, all_reduce, difference,
                         divisors, gather_dim, label_of, ledger, local_part, one_of, paired_ratio,
                         parts_along, queues, reduce_scatter, spawn, verdict, weight_gradient)

# Which dimension of a parameter is cut over tp: 0 the output features (by columns, the matrices
# being stored transposed), 1 the input features (by rows). Stacked experts have the expert first.
CUTS = {
    "embed.weight": 0, "head.weight": 0,                               # vocabulary
    "attn.wq.weight": 0, "attn.wq_b.weight": 0, "attn.wkv_b.weight": 0,  # heads
    "attn.wk.weight": 0, "attn.wv.weight": 0,                          # key/value heads
    "attn.wo.weight": 1,                                               # heads
    "ffn.w1.weight": 0, "ffn.w3.weight": 0, "ffn.w2.weight": 1,        # hidden width
    "ffn.shared_experts.w1.weight": 0, "ffn.shared_experts.w3.weight": 0,
    "ffn.shared_experts.w2.weight": 1,
    "ffn.experts.w1": 1, "ffn.experts.w3": 1, "ffn.experts.w2": 2,
}  # all others are whole on every rank, and their gradients partial sums over tp

IGNORED = -100  # the label of a position without a target, torch's own
CHUNK_LOGITS = 2 ** 25  # logits that a rank has at a time: at most 128 MiB of float32


# ---- which parameter is cut how ----

def check(config, tp):
    """Raises ValueError, with the legal values, for a model that can't be cut over tp ranks."""
    def cuts_heads(n):
        kv = config.n_kv_heads or n  # MLA has none
        return config.n_heads % n == 0 and (kv % n == 0 or n % kv == 0)
    legal = one_of([n for n in divisors(config.n_heads) if cuts_heads(n)])
    if config.n_heads % tp:
        raise ValueError(f"tp={tp} does not divide n_heads={config.n_heads}; use {legal}")
    if not cuts_heads(tp):
        raise ValueError(f"tp={tp} and n_kv_heads={config.n_kv_heads}: one must divide the other; "
                         f"use {legal}")
    moe = config.n_moe_layers()
    for field, used in (("vocab_size", True), ("inter_dim", moe < config.n_layers),
                        ("moe_inter_dim", moe)):
        width = getattr(config, field)
        if used and -(-width // tp) * (tp - 1) >= width:
            raise ValueError(f"tp={tp} leaves a rank without any of {field}={width}; use a smaller "
                             "--tp")


def cut_parameters(model, mesh):
    """Keep this rank's part of each parameter of CUTS, labelled; label the others as partial."""
    axis = mesh["tp"]
    for name, whole in list(model.named_parameters()):
        if mesh.experts_apart and ".experts." in name:
            continue  # expert_parallel.py's
        short = re.sub(r"^blocks\.\d+\.", "", name)
        label, cuts, partial = label_of(whole), (), ("tp",)
        if short in CUTS:
            parts, partial = axis.size, ()
            if short in ("attn.wk.weight", "attn.wv.weight") and model.config.n_kv_heads < parts:
                parts, partial = model.config.n_kv_heads, ("tp",)  # neighbours hold the same
            cuts = Cut("tp", CUTS[short], parts),
        label = Label(label.shape, (*label.cuts, *cuts), (*label.partial, *partial))
        local = nn.Parameter(local_part(whole.detach(), label, mesh).clone())
        local.label = label
        module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(module, leaf, local)


@torch.no_grad()
def sum_partial_gradients(masters, axis):
    """Add up over tp the gradients that each rank has a part of, all in one call.

    masters: tensors with .grad; those count whose label names tp as partial. Where ranks share a
    part of a parameter (key/value heads), each part has its own place in the message. Bytes:
    2 (N-1)/N times those of the message.
    """
    partial = [m for m in masters if axis.name in label_of(m).partial]
    if axis.size == 1 or not partial:
        return
    parts = [next((cut.parts for cut in label_of(m).cuts if cut.axis == axis.name), 1)
             for m in partial]
    message = partial[0].new_zeros(sum(n * m.numel() for n, m in zip(parts, partial)))
    places = []
    for n, m, stretch in zip(parts, partial, message.split(
            [n * m.numel() for n, m in zip(parts, partial)])):
        places.append(stretch.view(n, -1)[axis.rank * n // axis.size] if m.numel() else stretch)
        if m.grad is not None:
            places[-1].copy_(m.grad.flatten())
    all_reduce(message, axis)
    for m, place in zip(partial, places):
        m.grad = place.view_as(m)


# ---- sequence shards ----

class Sequence:
    """How the tokens under way are cut: rank r has a stretch of ceil(s/tp) positions from r
    ceil(s/tp) on; the last ones may be shorter, or empty. Short ones travel padded with zeros."""

    def __init__(self, axis):
        self.axis, self.batch, self.length = axis, 0, 0

    def enter(self, batch, length):
        """Whole sequences of `length` tokens, `batch` of them, are about to go through a layer."""
        self.batch, self.length = batch, length


def pad_sequence(x, length):
    """x (b, s, ...) -> (b, length, ...), zeros behind."""
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, length - x.shape[1])) if x.shape[1] < length else x


def gather(x, axis, length):
    """Sequence shards x (b, s/tp, ...) -> (b, s, ...)."""
    return gather_dim(pad_sequence(x, -(-length // axis.size)), axis, 1)[:, :length]


def start_reducing(x, axis):
    """Partial sums x (b, s, ...) on their way to shards: a Pending of (1, b, s/tp, ...)."""
    x = pad_sequence(x, x.shape[1] + -x.shape[1] % axis.size)
    return reduce_scatter(parts_along(x, axis, 1), axis, asynchronous=True)


def shard_length(length, axis):
    """How many of a sequence's `length` positions this rank has."""
    part = -(-length // axis.size)
    return min(max(length - axis.rank * part, 0), part)


def reduce(x, axis):
    """Partial sums x (b, s, ...) -> this rank's shard of the sum (b, s/tp, ...)."""
    return start_reducing(x, axis).wait()[0][:, :shard_length(x.shape[1], axis)]


def gather_sequence(x, sequence):
    """x (b, s/tp, ...) -> (b, s, ...), to be used on each rank for a part of the work."""
    axis, length = sequence.axis, sequence.length
    return Pair.apply(x, lambda x: gather(x, axis, length), lambda grad: reduce(grad, axis))


def reduce_sequence(x, sequence):
    """Partial sums x (b, s, ...) -> this rank's (b, s/tp, ...) of the sum."""
    axis, length = sequence.axis, sequence.length
    return Pair.apply(x, lambda x: reduce(x, axis), lambda grad: gather(grad, axis, length))


# ---- linear layers ----

class ColumnParallel(torch.autograd.Function):
    """Layers that read the same x, each cut by columns: Y_i = X W_i^T of this rank's rows of W_i.

    x (b, s/tp, d) is gathered once. Backward: grad X = sum of grad Y_i W_i, of which each rank has
    the part of its columns; while that is being reduced, grad W_i = grad Y_i^T X is computed.
    """

    @staticmethod
    def forward(ctx, x, sequence, *weights):
        """x (b, s/tp, d), weights (o/tp, d) each -> (b, s, o/tp) each."""
        full = gather(x, sequence.axis, sequence.length)  # (b, s, d)
        ctx.save_for_backward(full)
        ctx.axis, ctx.weights = sequence.axis, weights
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads):
        """grads (b, s, o/tp) each."""
        (full,), axis, weights = ctx.saved_tensors, ctx.axis, ctx.weights
        grads = [grad.flatten(0, 1) for grad in grads]  # (b s, o/tp)
        grad_full = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:]):
            grad_full.addmm_(grad, weight)
        reducing = start_reducing(grad_full.view_as(full), axis)
        mine, read = shard_length(full.shape[1], axis), kept_input(full, axis)
        grad_weights = [weight_gradient(weight, functools.partial(
            lambda grad: grad.T @ read(), grad)) for grad, weight in zip(grads, weights)]
        return reducing.wait()[0][:, :mine], None, *grad_weights


def kept_input(full, axis):
    """A function that returns full (b, s, d) as (b s, d): at once, or where the weight gradients
    have to wait from this rank's shard, which is all that is kept, gathered again by the first."""
    if not queues:
        return lambda: full.flatten(0, 1)
    length, part = full.shape[1], -(-full.shape[1] // axis.size)
    shard = full[:, axis.rank * part:(axis.rank + 1) * part].clone()
    return functools.cache(lambda: gather(shard, axis, length).flatten(0, 1))


def column_parallel(layers, sequence, x):
    """The outputs of nn.Linear layers that are cut by columns, of a sequence shard x."""
    return ColumnParallel.apply(x, sequence, *(layer.weight for layer in layers))


def row_parallel(layer, sequence, x):
    """An nn.Linear that is cut by rows: x (b, s, o/tp) -> (b, s/tp, d)."""
    return reduce_sequence(Linear.apply(x, layer.weight), sequence)


def gather_outputs(project, sequence, x):
    """Small layers run on the sequence shard, and their outputs are gathered in one message."""
    outputs = project(x)
    full = gather_sequence(torch.cat(outputs, -1), sequence)
    return full.split([out.shape[-1] for out in outputs], -1)


# ---- embedding, head and loss ----

def embed(embedding, sequence, tokens):
    """tokens (b, s), the same on every rank -> (b, s/tp, d)."""
    sequence.enter(*tokens.shape)
    first = sequence.axis.rank * -(-embedding.num_embeddings // sequence.axis.size)
    local = tokens - first
    here = (local >= 0) & (local < len(embedding.weight))
    rows = F.embedding(local.where(here, 0), embedding.weight)  # (b, s, d)
    return reduce_sequence(rows.masked_fill(~here[..., None], 0.0), sequence)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """model.py's ChunkedCrossEntropy with the vocabulary cut over the ranks.

    Each rank has the logits of its rows of the vocabulary. Their log-sum-exps and the target's
    logit, where it is here, are all that the ranks tell each other about them: 2 numbers a token.
    A chunk takes some tokens of every rank's shard, so neither all logits nor all hidden states
    exist at once; the next chunk's hidden states travel while this one's logits are worked on.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, seed, axis, vocab_size):
        """hidden (b, s/tp, d), weight (v/tp, d), labels (b, s) -> a scalar, the same on all."""
        wide, n = torch.promote_types(hidden.dtype, torch.float32), axis.size
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        part = -(-labels.shape[1] // n)
        local = pad_sequence(hidden, part).flatten(0, 1)  # (b s/tp, d)
        labels = F.pad(labels, (0, n * part - labels.shape[1]), value=IGNORED)
        labels = labels.unflatten(1, (n, part)).movedim(1, 0).flatten(1)  # (tp, b s/tp)
        most = -(-vocab_size // n)  # rows of the fullest rank: all must agree on the chunks
        first, chunk = axis.rank * most, max(min(CHUNK_LOGITS // most, 8192) // n, 256 // n, 1)
        grad_hidden = torch.empty_like(local) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        starts = range(0, len(local), chunk)
        arriving = all_gather(local[:chunk], axis, asynchronous=True)
        for start in starts:
            full, rows = arriving.wait(), slice(start, start + chunk)  # (tp chunk, d)
            if start != starts[-1]:
                arriving = all_gather(local[start + chunk:start + 2 * chunk], axis,
                                      asynchronous=True)
            target = labels[:, rows].flatten()
            valid, index = target != IGNORED, target - first
            here = (index >= 0) & (index < len(weight))
            index = index.where(here, 0)[:, None]
            logits = F.linear(full, weight).to(wide)  # (tp chunk, v/tp)
            lse, found = shared_lse(logits, logits.gather(-1, index)[:, 0] * here, axis)
            total += ((lse - found) * valid).sum()
            if not (want_hidden or want_weight):
                continue
            grad = logits.sub_(lse[:, None]).exp_()  # the softmax
            grad.scatter_add_(-1, index, -here.to(wide)[:, None])
            grad = grad.mul_((valid.to(wide) * seed)[:, None]).to(hidden.dtype)
            if want_hidden:
                reducing = reduce_scatter(grad @ weight, axis, asynchronous=True)
            if want_weight:
                grad_weight += grad.T @ full
            if want_hidden:
                grad_hidden[rows] = reducing.wait()
        ctx.seed = seed
        if want_hidden:
            grad_hidden = grad_hidden.unflatten(0, (-1, part))[:, :hidden.shape[1]]
        ctx.grads = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        factor = grad_output / ctx.seed
        grads = [None if g is None else g.mul_(factor.to(g.dtype)) for g in ctx.grads]
        del ctx.grads
        return *grads, None, None, None, None


def shared_lse(logits, found, axis):
    """Log-sum-exp over the whole vocabulary, and the target's logit, of each token (n,).

    logits (n, v/tp); found (n,): the target's logit on the rank that has it, 0 elsewhere. The
    log-sum-exp of the ranks' log-sum-exps, so that logits of any size stay finite.
    """
    parts = all_gather(torch.stack([logits.logsumexp(-1), found])[None], axis)  # (tp, 2, n)
    return parts[:, 0].logsumexp(0), parts[:, 1].sum(0)


# ---- the model ----

def parallelize(model, mesh):
    """Cut a model over mesh["tp"]: parameters by CUTS, and at the four seams what they do.

    Hidden states between blocks are sequence shards from then on; tokens, positions, document ids
    and labels stay whole on every rank. Raises ValueError as check() does.
    """
    axis = mesh["tp"]
    if axis.size == 1:
        return
    check(model.config, axis.size)
    cut_parameters(model, mesh)
    sequence = Sequence(axis)
    if model.embed is not None:  # of a pipeline's stages only the first looks tokens up
        model.embed.forward = functools.partial(embed, model.embed, sequence)
    for block in model.blocks.values():
        block.forward = functools.partial(enter_block, sequence, block.forward)
        cut_attention(block.attn, sequence)
        if not block.is_moe:
            cut_swiglu(block.ffn, sequence)
            continue
        block.ffn.sum_over_sequence = functools.partial(all_reduce, axis=axis)
        if not mesh.experts_apart:
            cut_experts(block.ffn, sequence)
        elif block.ffn.shared_experts is not None:
            cut_swiglu(block.ffn.shared_experts, sequence)

    def head_loss(hidden, labels, seed=1.0):
        return VocabParallelCrossEntropy.apply(hidden, model.head_weight(), labels, seed, axis,
                                               model.config.vocab_size)
    model.head_loss = head_loss


def enter_block(sequence, forward, x, rope_table, *args):
    """A block's forward; the table of rotations tells how long the whole sequences are."""
    sequence.enter(len(x), rope_table[0].shape[-2])
    return forward(x, rope_table, *args)


def cut_attention(attn, sequence):
    """Heads cut over tp; what is gathered is the latents where there are any, else the input."""
    if hasattr(attn, "wq_a"):
        attn.project = functools.partial(gather_outputs, attn.project, sequence)
    else:  # in the order of project(): GQA's three, or MLA's two
        readers = [getattr(attn, name) for name in ("wq", "wk", "wv", "wkv_a")
                   if hasattr(attn, name)]
        attn.project = functools.partial(column_parallel, readers, sequence)
    attn.wo.forward = functools.partial(row_parallel, attn.wo, sequence)


def cut_swiglu(ffn, sequence):
    """A SwiGLU's hidden width cut over tp: x (b, s/tp, d), or (b s/tp, d) as shared experts get it,
    -> (b, s/tp, d)."""
    def project(x):
        mine = shard_length(sequence.length, sequence.axis)
        x = x.reshape(sequence.batch, mine, x.shape[-1])
        return column_parallel((ffn.w1, ffn.w3), sequence, x)
    ffn.project = project
    ffn.w2.forward = functools.partial(row_parallel, ffn.w2, sequence)


def cut_experts(moe, sequence):
    """Every expert's hidden width cut over tp: tokens are gathered, and partial sums reduced."""
    plain = moe.routed

    def routed(x, gate_weights, expert_ids):
        """x (n/tp, d), gate_weights and expert_ids (n/tp, k) -> (n/tp, d)."""
        mine = shard_length(sequence.length, sequence.axis)
        shards = [t.unflatten(0, (sequence.batch, mine))
                  for t in (x, gate_weights, expert_ids.int())]
        x, gate_weights = (gather_sequence(t, sequence).flatten(0, 1) for t in shards[:2])
        expert_ids = gather(shards[2], sequence.axis, sequence.length).flatten(0, 1).long()
        out = plain(x, gate_weights, expert_ids)  # (n, d), partial sums
        return reduce_sequence(out.unflatten(0, (sequence.batch, -1)), sequence).flatten(0, 1)
    moe.routed = routed


# ---- how many bytes ----

def bytes_sent(config, n, batch, length, width=4, wide=4, repeated=False, deferred=False,
               experts_apart=False):
    """Bytes that each of n tp ranks sends for a microbatch, forward and backward: a dict by part of
    the model, padding of the sequence included, and "gradients", once a step.

    width: bytes of the compute type; wide: of the type of sums. repeated: --recompute full runs
    each block's forward again, but for its last reduce-scatter, of whose result nothing is needed.
    deferred: a pipeline's W gathers again what layers that are cut by columns have read.
    experts_apart: they have axes of their own, so that tp moves the shared experts' tokens alone.
    """
    c, part = config, -(-length // n)
    share, d = (n - 1) * batch * part, config.dim * width
    latent = (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim) * width
    attention, ids = (latent if c.q_lora_rank else d) + d, 4 * c.top_k  # ids as int32
    moe, moe_layers, last = 2 * d + c.top_k * wide, c.n_moe_layers(), d
    if experts_apart:  # whose combine comes last
        moe, ids, last = (2 * d if c.num_shared_experts else 0), 0, 0
    balanced = bool(c.seq_balance_coeff or c.aux_loss_coeff)
    again, later = int(repeated), d * deferred
    moe_later = later if experts_apart and c.num_shared_experts else 0  # else tokens are at hand
    sent = {
        "embedding": share * 2 * d,
        "attention": share * c.n_layers * (attention * (2 + again)
                                           + (0 if c.q_lora_rank else later)),
        "dense FFN": share * (c.n_layers - moe_layers) * (4 * d + again * d + later),
        "MoE": moe_layers * (share * (2 * moe + ids + again * (moe - last + ids) + moe_later)
                             + balanced * 2 * (n - 1) * -(-batch * (c.num_experts + 1) // n)
                             * wide),
        "head": share * (2 * d + 2 * n * wide)}
    norms = 2 * c.dim + (c.q_lora_rank + c.kv_lora_rank if c.is_mla else 0)
    latents = c.dim * (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim) if c.is_mla else 0
    shared_heads = 2 * c.dim * c.n_kv_heads * c.v_head_dim if 0 < c.n_kv_heads < n else 0
    partial = (c.dim + c.n_layers * (norms + latents + shared_heads)
               + moe_layers * c.num_experts * c.dim)
    sent["gradients"] = 2 * (n - 1) * -(-partial // n) * wide
    return sent


# ---- demonstration ----

def by_hand(worst):
    """An MLP and an attention of width 4, cut in two, with the partial products printed."""
    torch.manual_seed(0)
    x, a, b = torch.randint(-2, 3, (3, 4, 4)).double()
    parts = [torch.relu(x @ columns) @ rows for columns, rows in zip(a.chunk(2, 1), b.chunk(2, 0))]
    print("MLP relu(X A) B: A cut by columns, B by rows; partial products and their sum")
    show_rows(parts)
    worst["MLP by hand"] = difference(sum(parts), torch.relu(x @ a) @ b)

    def attend(q, k, v):
        return (q @ k.T / 2 ** 0.5).softmax(-1) @ v
    wq, wk, wv, wo = torch.randint(-1, 2, (4, 4, 4)).double()
    heads = [attend(x @ q, x @ k, x @ v) for q, k, v in zip(*(w.chunk(2, 1) for w in (wq, wk, wv)))]
    parts = [head @ rows for head, rows in zip(heads, wo.chunk(2, 0))]
    print("attention of two heads: Wq, Wk, Wv cut by columns (a head each), Wo by rows")
    show_rows(parts)
    q, k, v = (x @ w for w in (wq, wk, wv))
    both = F.scaled_dot_product_attention(*(t.view(4, 2, 2).transpose(0, 1) for t in (q, k, v)))
    worst["attention by hand"] = difference(sum(parts), both.transpose(0, 1).flatten(1) @ wo)


def show_rows(parts):
    """Two 4 x 4 partial products beside their sum."""
    for first, second, total in zip(*parts, sum(parts)):
        print("   ".join("".join(f"{v:7.2f}" for v in row.tolist())
                         for row in (first, second, total)))


def losses_and_grads(model, tokens, labels, axis):
    """Loss and gradients, name -> tensor, of one microbatch; those over tp complete."""
    loss = model.head_loss(model(tokens, balance_seed=0.1), labels, 0.01)
    loss.backward(torch.tensor(0.01, dtype=loss.dtype))
    sum_partial_gradients(list(model.parameters()), axis)
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def compare(name, overrides, mesh, worst):
    """A model cut over the ranks beside the same in one process: loss, gradients, bytes."""
    from model import IGNORED, built, make_config
    config = make_config(name, overrides)
    cut, alone = (built(config, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():  # norms as they start would hide errors of scale
        for p, q in zip(cut.parameters(), alone.parameters()):
            p.copy_(q.add_(torch.randn_like(q), alpha=0.05))
    parallelize(cut, mesh)
    tokens, labels = torch.randint(config.vocab_size, (2, 2, 15))
    labels[1, 4:7] = IGNORED
    ledger.clear()
    loss, grads = losses_and_grads(cut, tokens, labels, mesh["tp"])
    sent = ledger.by_axis().get("tp", 0)
    expected_loss, expected = losses_and_grads(alone, tokens, labels, Mesh()["tp"])
    what = f"{name} {' '.join(overrides)}"
    worst[f"{what}: loss"] = difference(loss, expected_loss)
    labels_of = {key: label_of(p) for key, p in cut.named_parameters()}
    worst[f"{what}: gradients of {len(grads)} parameters"] = max(
        difference(grad, local_part(expected[key], labels_of[key], mesh))
        for key, grad in grads.items())
    formula = bytes_sent(config, mesh["tp"].size, 2, 15, 8, 8)
    worst[f"{what}: bytes sent are the formula's"] = float(sent != sum(formula.values()))
    return formula


def show(rank, n):
    """The identity by hand, then three kinds of model cut over the ranks beside one process."""
    worst = {}
    if rank == 0:
        by_hand(worst)
    else:
        worst.update({"MLP by hand": 0.0, "attention by hand": 0.0})
    torch.manual_seed(1)
    mesh = Mesh(n, rank, tp=n)
    formula = compare("tiny", ["n_layers=2", "vocab_size=61"], mesh, worst)
    compare("tiny", ["n_layers=2", "q_lora_rank=0"], mesh, worst)
    compare("tiny-dense", ["n_kv_heads=1", "tie_embeddings=true"], mesh, worst)
    if rank == 0:
        print(f"tiny, {n} ranks, 2 sequences of 15: bytes a rank sends, "
              + ", ".join(f"{part} {size:,}" for part, size in formula.items()))
    return verdict(rank, worst)


# ---- benchmark ----

def torch_parallelized(model, n):
    """The same model by torch's own plan: DTensor, sequence parallel, loss parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module)
    mesh, whole = init_device_mesh("cpu", (n,)), Replicate()
    parallelize_module(model, mesh, {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1),
                                use_local_output=False)})
    for block in model.blocks.values():
        plan = {"attn_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
                "ffn": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=whole),
                "attn": PrepareModuleInput(input_layouts=(Shard(1), None, None, None, None),
                                           desired_input_layouts=(whole, None, None, None, None)),
                "attn.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn.w2": RowwiseParallel(output_layouts=Shard(1))}
        plan.update((name, ColwiseParallel()) for name in ("attn.wq", "attn.wk", "attn.wv",
                                                           "ffn.w1", "ffn.w3"))
        parallelize_module(block, mesh, plan)
    return model


def bench(rank, n, rounds):
    """A step of a dense model beside torch's parallelize_module on the same model."""
    from torch.distributed.tensor.parallel import loss_parallel
    from model import built, make_config
    from train import keep_freed_memory
    keep_freed_memory()
    config = make_config("small-dense", ["n_layers=3", "n_dense_layers=3"])
    ours, theirs, mesh = built(config), torch_parallelized(built(config), n), Mesh(n, rank, tp=n)
    parallelize(ours, mesh)
    torch.manual_seed(0)
    tokens, labels = torch.randint(512, (2, 2, 128))

    def step():
        ours.head_loss(ours(tokens), labels).backward()
        sum_partial_gradients(list(ours.parameters()), mesh["tp"])
        ours.zero_grad()

    def torchs_step():
        with loss_parallel():
            logits = theirs.head(theirs(tokens)).flatten(0, 1)
            F.cross_entropy(logits, labels.flatten(), reduction="sum").backward()
        theirs.zero_grad()
    ratio, seconds = paired_ratio(step, torchs_step, rounds)
    if rank == 0:
        numbers = sum(p.numel() for p in built(config).parameters())
        print(f"{n} ranks, {numbers / 1e6:.1f} M parameters: {seconds * 1e3:.0f} ms a step, "
              f"{ratio} x torch's parallelize_module", flush=True)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    if flags.parse_args().bench:
        sys.exit(max(spawn(bench, n, 9) for n in (2, 4)))
    sys.exit(spawn(show, 2))
