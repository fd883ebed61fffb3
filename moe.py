"""Mixture of experts: each token is worked on by a few of many small feed-forward networks.

    x (n, d) -> router scores (n, e) -> top-k expert ids and gate weights (n, k)
      dispatch: each token's k copies, sorted by expert        (n k, d)
      experts:  one SwiGLU per expert on its own stretch of rows
      combine:  each token's k results, weighted and added up  (n, d)   + shared experts(x)

No token is dropped and none is padded to a capacity: an expert's stretch is as long as it is.
Balance comes from a bias that is added to an expert's score when experts are chosen, and only then:
after each step it rises a little for experts with fewer tokens than the mean and falls for the
others. A balance loss per sequence complements it; its gradient enters backward right here, so that
it needs no way through the rest of the model. Tokens are counted in backward too: recomputation
repeats forwards and evaluation has no backward, so neither counts a token twice.

Shapes: n tokens (b sequences of s), d width, e experts, k experts per token, m expert width.

Papers: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2), DeepSeek-V2 (2405.04434, section 2.2),
auxiliary-loss-free balancing (2408.15664), GShard (2006.16668), Switch (2101.03961).
Course: 16:49:58 mixture of experts from first principles.

    python moe.py            routes three tokens by hand, checks all gradients; prints PASS
    python moe.py --bench    a MoE layer beside the dense layer of equal active FLOPs
"""
import argparse
import functools
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn


class SiluProduct(torch.autograd.Function):
    """silu(gate) * up, keeping gate and up alone for backward (autograd would keep silu(gate) too).

    With sigma the logistic function: silu(g) = g sigma(g), silu' = sigma(g) (1 + g (1 - sigma(g))).
    """

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up  # not in place: torch 2.11 compiles that to wrong gradients

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate) * grad


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * (w3 x)): w1 is the gate, w3 the up, w2 the down projection (2002.05202)."""

    def __init__(self, dim, inter_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, inter_dim, bias=False)
        self.w3 = nn.Linear(dim, inter_dim, bias=False)
        self.w2 = nn.Linear(inter_dim, dim, bias=False)

    def project(self, x):
        """The layers that read x (..., d): -> gate and up, (..., m) each."""
        return self.w1(x), self.w3(x)

    def product(self, gate, up):
        return SiluProduct.apply(gate, up)

    def forward(self, x):
        return self.w2(self.product(*self.project(x)))


class GroupedLinear(torch.autograd.Function):
    """Rows times the transposed matrix of their expert, each product written in its place; with
    several weights, the products with each.

    x (n, i) sorted by expert, counts: a list of e numbers of rows, weights (e, o, i) each ->
    (n, o) each. Backward: grad_x = grad weight, summed over the weights, grad_weight = grad^T x,
    expert by expert; an expert without rows gets a gradient of zeros. weight_gradient(weight,
    compute) is what backward returns for a weight.
    """

    @staticmethod
    def forward(ctx, x, counts, weight_gradient, *weights):
        ctx.save_for_backward(x)
        ctx.weights, ctx.counts, ctx.weight_gradient = weights, counts, weight_gradient
        outs = tuple(x.new_empty(len(x), weight.shape[1]) for weight in weights)
        for out, weight in zip(outs, weights):
            for rows, y, w in zip(x.split(counts), out.split(counts), weight):
                torch.mm(rows, w.T, out=y)
        return outs

    @staticmethod
    def backward(ctx, *grads):
        """grads: of each output, (n, o)."""
        x, counts = ctx.saved_tensors[0].detach(), ctx.counts  # as in collectives.Linear
        grad_x = torch.empty_like(x)
        for i, (grad, weight) in enumerate(zip(grads, ctx.weights)):
            for g, gx, w in zip(grad.split(counts), grad_x.split(counts), weight):
                torch.addmm(gx, g, w, beta=min(i, 1), out=gx)  # the first weight's overwrites

        def outer(grad, weight):
            grad_weight = torch.empty_like(weight)
            for g, rows, gw in zip(grad.split(counts), x.split(counts), grad_weight):
                torch.mm(g.T, rows, out=gw)
            return grad_weight
        return grad_x, None, None, *(
            ctx.weight_gradient(weight, functools.partial(outer, grad, weight))
            for grad, weight in zip(grads, ctx.weights))


def at_once(weight, compute):
    """A weight's gradient, computed in backward; pipelines put something else in its place."""
    return compute()


def grouped_linear(x, counts, *weights, weight_gradient=at_once):
    """GroupedLinear, or torch's grouped product where it has a kernel of its own: bfloat16 on a GPU
    with rows of a multiple of 16 bytes. (On a CPU torch's is no faster than this loop.)

    x (n, i), counts (e,) int64, weights (e, o, i) each -> a tuple of (n, o).
    """
    can = len(x) and x.is_cuda and x.dtype == torch.bfloat16 and weight_gradient is at_once
    if can and not any(size % 8 for weight in weights for size in weight.shape[1:]):
        ends = counts.cumsum(0).to(torch.int32)
        return tuple(F.grouped_mm(x, weight.transpose(1, 2), offs=ends) for weight in weights)
    return GroupedLinear.apply(x, counts.tolist(), weight_gradient, *weights)


def draw(weight):
    """Starting values; none on the meta device, where drawing would import torch's compiler."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=0.02)


class Experts(nn.Module):
    """e SwiGLUs, their matrices stacked: w1 and w3 (e, m, d), w2 (e, d, m)."""

    def __init__(self, num_experts, dim, moe_inter_dim):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, moe_inter_dim, dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, moe_inter_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, moe_inter_dim))
        self.weight_gradient = at_once
        for weight in self.parameters():
            draw(weight)

    def product(self, gate, up):
        return SiluProduct.apply(gate, up)

    def forward(self, x, counts):
        """x (n, d) sorted by expert, counts (e,) int64, rows of each expert -> (n, d)."""
        hidden = self.product(*grouped_linear(x, counts, self.w1, self.w3,
                                              weight_gradient=self.weight_gradient))  # (n, m)
        return grouped_linear(hidden, counts, self.w2, weight_gradient=self.weight_gradient)[0]


class Rearrange(torch.autograd.Function):
    """rows[index], where each row is taken `copies` times and `inverse` says where each copy went:
    backward gathers the copies' gradients and adds them, which is faster than scattering them, and
    always adds in the same order."""

    @staticmethod
    def forward(ctx, rows, index, inverse, copies):
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        inverse, = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad, None, None, None


def check_routing(num_experts, top_k, score_func, n_group, topk_group):
    """Raises ValueError, naming the fields, for a choice of experts that no router can make."""
    if score_func not in ("sigmoid", "softmax"):
        raise ValueError(f"score_func={score_func!r}: use sigmoid or softmax")
    legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
    if n_group not in legal:
        raise ValueError(f"n_group={n_group} does not divide num_experts={num_experts}; use one of "
                         f"{legal}")
    if topk_group > n_group:
        raise ValueError(f"topk_group={topk_group} is more than n_group={n_group}")
    reachable = num_experts // n_group * topk_group
    if top_k > reachable:
        raise ValueError(f"top_k={top_k} experts a token, but only {reachable} can be reached "
                         f"(num_experts={num_experts}, n_group={n_group}, topk_group={topk_group})")


class Router(nn.Module):
    """Scores every expert for every token and chooses top_k of them.

    score_func sigmoid (V3) or softmax (V2); route_norm divides the chosen scores by their sum;
    route_scale multiplies the gate weights; with n_group > 1 a token chooses among the experts of
    its best topk_group groups only. Scores are float32 (float64 when training in float64).
    Raises ValueError as check_routing() does.
    """

    def __init__(self, dim, num_experts, top_k, score_func="sigmoid", route_norm=True,
                 route_scale=1.0, n_group=1, topk_group=1):
        super().__init__()
        check_routing(num_experts, top_k, score_func, n_group, topk_group)
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        draw(self.weight)
        self.top_k, self.score_func, self.route_norm = top_k, score_func, route_norm
        self.route_scale, self.n_group, self.topk_group = route_scale, n_group, topk_group

    def forward(self, x):
        """x (n, d) -> scores (n, e)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        return logits.sigmoid() if self.score_func == "sigmoid" else logits.softmax(-1)

    @torch.no_grad()
    def select(self, scores, expert_bias):
        """Expert ids (n, k) by score + bias, best first, equal ones by number.

        A group counts as much as its two best experts together (V3) or, with softmax scores, as its
        best one (V2). The experts of other groups are out of reach whatever the bias.
        """
        biased = scores + expert_bias
        if self.n_group > 1:
            groups = biased.unflatten(-1, (self.n_group, -1))  # (n, groups, e / groups)
            best = min(2 if self.score_func == "sigmoid" else 1, groups.shape[-1])
            worth = groups.topk(best, -1).values.sum(-1)
            kept = ranked(worth)[:, :self.topk_group]
            mask = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, kept, False)
            biased = groups.masked_fill(mask[..., None], -math.inf).flatten(-2)
        return ranked(biased)[:, :self.top_k]

    def gate(self, scores, expert_ids):
        """Gate weights (n, k) from the scores without bias."""
        weights = scores.gather(-1, expert_ids)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale


def ranked(scores):
    """Indices from the largest to the smallest, equal ones by index: topk promises no order."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


class MoE(nn.Module):
    """Routed experts beside shared experts, which see every token.

    expert_bias (e,) is a buffer, float32 whatever the model's dtype: steps of 0.001 would vanish in
    bfloat16. tokens_per_expert (e,) and balance_loss () add up over a step's microbatches.
    """

    def __init__(self, dim, moe_inter_dim, num_experts, num_shared_experts=0, *,
                 seq_balance_coeff=0.0, aux_loss_coeff=0.0, **routing):
        super().__init__()
        self.router = Router(dim, num_experts, **routing)
        self.experts = Experts(num_experts, dim, moe_inter_dim)
        self.shared_experts = (SwiGLU(dim, num_shared_experts * moe_inter_dim)
                               if num_shared_experts else None)
        self.seq_balance_coeff, self.aux_loss_coeff = seq_balance_coeff, aux_loss_coeff
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("tokens_per_expert", torch.zeros(num_experts, dtype=torch.int64),
                             persistent=False)
        self.register_buffer("balance_loss", torch.zeros((), dtype=torch.float64),
                             persistent=False)

    def _apply(self, fn, recurse=True):
        kept = {"expert_bias": self.expert_bias, "balance_loss": self.balance_loss}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            now = getattr(self, name)
            if now.dtype != before.dtype:  # the model was cast: move what was, no more
                setattr(self, name, before.to(now.device))
        return self

    def forward(self, x, balance_seed=0.0):
        """x (b, s, d) -> (b, s, d). balance_seed: loss_scale / sequences of the global batch."""
        tokens = x.flatten(0, 1)  # (n, d)
        scores = self.router(tokens)
        expert_ids = self.router.select(scores, self.expert_bias)
        scores = Balance.apply(scores, expert_ids, self, x.shape[0], balance_seed)
        gate_weights = self.router.gate(scores, expert_ids)
        return self.routed(tokens, gate_weights, expert_ids).view_as(x)

    def sum_over_sequence(self, counts):
        """What balance_loss() adds up where ranks hold parts of the sequences; here all is here."""
        return counts

    def routed(self, x, gate_weights, expert_ids):
        """Dispatch, experts, combine, and the shared experts beside them.

        x (n, d), gate_weights and expert_ids (n, k) -> (n, d).
        """
        n, k = expert_ids.shape
        order = expert_ids.flatten().argsort(stable=True)  # (n k,): which copy stands in each row
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(n * k, device=x.device)  # where each copy went
        counts = expert_ids.flatten().bincount(minlength=self.router.weight.shape[0])
        rows = Rearrange.apply(x, order // k, inverse, k)  # (n k, d), sorted by expert
        rows = self.experts(rows, counts)
        rows = Rearrange.apply(rows, inverse, order, 1).unflatten(0, (n, k))  # (n, k, d)
        out = torch.bmm(gate_weights.to(x.dtype)[:, None], rows)[:, 0]  # (n, d)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class Balance(torch.autograd.Function):
    """The scores, unchanged; in backward, counts and the gradient of the balance losses.

    For each sequence, with p the scores normalised to sum 1, T tokens and E experts:

        loss = sum over i of (seq_balance_coeff f_i + aux_loss_coeff f'_i) P_i
        f_i, f'_i = E / (k T) x tokens whose top-k holds expert i,   P_i = mean of p_i

    f counts the top-k of the scores alone (V3, equations 17 to 20), f' the real choice (the loss
    of GShard and Switch). Counts have no gradient, so d loss / d p_i = (...) / T for every token.
    """

    @staticmethod
    def forward(ctx, scores, expert_ids, layer, sequences, seed):
        ctx.save_for_backward(scores, expert_ids)
        ctx.layer, ctx.sequences, ctx.seed = layer, sequences, seed
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, grad):
        """grad (n, e): of the gate weights' way back; counts and balance losses are added here."""
        scores, expert_ids = ctx.saved_tensors
        layer = ctx.layer
        layer.tokens_per_expert += expert_ids.flatten().bincount(minlength=scores.shape[-1])
        if layer.seq_balance_coeff or layer.aux_loss_coeff:
            loss, grad_scores = balance_loss(
                scores.unflatten(0, (ctx.sequences, -1)),
                expert_ids.unflatten(0, (ctx.sequences, -1)),
                layer.seq_balance_coeff, layer.aux_loss_coeff, layer.sum_over_sequence)
            layer.balance_loss += loss
            grad = grad + grad_scores.flatten(0, 1) * ctx.seed
        return grad, None, None, None, None


def balance_loss(scores, expert_ids, seq_balance_coeff, aux_loss_coeff,
                 sum_over_sequence=lambda counts: counts):
    """Balance's loss summed over the sequences, and its gradient with respect to the scores.

    scores (b, s, e), expert_ids (b, s, k) -> (), (b, s, e). Where s is a part of each sequence,
    sum_over_sequence adds up (b, e + 1) over the parts, and the parts' losses add up to the whole:
    the loss is linear in P once f is known.
    """
    b, s, e = scores.shape
    k = expert_ids.shape[-1]

    def count(ids):  # (b, s, k) -> (b, e)
        ones = scores.new_ones(b, s * k)
        return scores.new_zeros(b, e).scatter_add_(1, ids.flatten(1), ones)

    weight = aux_loss_coeff * count(expert_ids)
    if seq_balance_coeff:
        weight = weight + seq_balance_coeff * count(ranked(scores)[..., :k])
    sums = sum_over_sequence(torch.cat([weight, weight.new_full((b, 1), s)], 1))
    tokens = sums[:, e:]  # (b, 1)
    weight = sums[:, :e] * e / (k * tokens)  # the coefficient where the load is even
    total = scores.sum(-1, keepdim=True)
    p = scores / total
    loss = (weight * p.sum(1) / tokens).sum()
    grad_p = (weight / tokens)[:, None]  # the same for every token of a sequence
    return loss, (grad_p - (grad_p * p).sum(-1, keepdim=True)) / total


# ---- once a step ----

def moe_layers(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


@torch.no_grad()
def update_expert_bias(model, bias_update_speed):
    """bias += speed x sign(mean count - count), from a whole step's counts (2408.15664, alg. 1)."""
    for layer in moe_layers(model):
        counts = layer.tokens_per_expert.double()
        layer.expert_bias += bias_update_speed * (counts.mean() - counts).sign().float()


def max_violation(counts):
    """MaxVio: (largest count - mean) / mean, averaged over the MoE layers. counts (layers, e): the
    tokens of a step so far."""
    if not len(counts):
        return 0.0
    counts = counts.double()
    mean = counts.mean(-1)
    return ((counts.max(-1).values - mean) / mean.clamp(min=1e-9)).mean().item()


def expert_load(counts):
    """The tokens of each expert, a list for each MoE layer, as multiples of the mean; counts as
    max_violation() has them."""
    counts = counts.double()
    load = counts / counts.mean(-1, keepdim=True).clamp(min=1e-9)
    return [[round(v, 4) for v in layer] for layer in load.tolist()]


def reset_counts(model):
    """Begin a new step's counts and balance loss."""
    for layer in moe_layers(model):
        layer.tokens_per_expert.zero_()
        layer.balance_loss.zero_()


# ---- demonstration and benchmark ----

def dense_reference(layer, x):
    """The same layer with every expert run on every token and gates of 0 for those not chosen."""
    scores = layer.router(x)
    ids = layer.router.select(scores, layer.expert_bias)
    gates = torch.zeros_like(scores).scatter(-1, ids, layer.router.gate(scores, ids))
    out = layer.shared_experts(x) if layer.shared_experts else 0
    for e, (w1, w3, w2) in enumerate(zip(layer.experts.w1, layer.experts.w3, layer.experts.w2)):
        out = out + gates[:, e, None] * ((F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T)
    return out


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item()


def route_by_hand(checks):
    """Four experts in two groups, of which a token may use one: a bias can't open the other."""
    router = Router(2, 4, top_k=2, route_scale=2.5, n_group=2, topk_group=1)
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5], [0.2, 0.4, 0.3, 0.2], [0.5, 0.5, 0.5, 0.5]])
    bias = torch.tensor([0.0, 0.0, -2.0, -2.0])
    ids = router.select(scores, bias)
    gates = router.gate(scores, ids)
    print("token    scores                 + bias (0, 0, -2, -2): experts    gate weights")
    for name, row, chosen, gate in zip("abc", scores, ids, gates):
        print(f"{name:6}{str([round(v, 1) for v in row.tolist()]):>25}{str(chosen.tolist()):>24}"
              f"{str([round(v, 3) for v in gate.tolist()]):>22}")
    checks["gate weights by hand"] = torch.allclose(
        gates[0], torch.tensor([2.5 * 0.9, 2.5 * 0.1])) and ids[0].tolist() == [0, 1]
    checks["no expert of an excluded group"] = bool((ids < 2).all())
    checks["equal scores by number"] = ids[2].tolist() == [0, 1]


def golden_values(checks):
    """The bias rule and the balance loss on counts (3, 1, 0, 4) of 4 experts."""
    layer = MoE(2, 2, 4, top_k=2)
    layer.tokens_per_expert += torch.tensor([3, 1, 0, 4])
    update_expert_bias(layer, 0.001)
    print(f"counts (3, 1, 0, 4): MaxVio {max_violation(layer.tokens_per_expert[None])}, bias moves "
          f"{[round(b, 4) for b in layer.expert_bias.tolist()]}")
    checks["bias rule"] = torch.allclose(layer.expert_bias,
                                         torch.tensor([-0.001, 0.001, 0.001, -0.001]))
    checks["MaxVio"] = max_violation(layer.tokens_per_expert[None]) == 1.0
    scores = torch.tensor([0.4, 0.2, 0.1, 0.3]).repeat(1, 4, 1)
    ids = torch.tensor([[[0, 3], [0, 3], [0, 3], [1, 3]]])
    loss, _ = balance_loss(scores, ids, 0.0, 1.0)
    print(f"balance loss of those counts with mean scores (.4, .2, .1, .3): {loss.item():.4f}")
    checks["balance loss"] = math.isclose(loss.item(), 1.3, rel_tol=1e-6)


def skewed_router(checks):
    """A router that favours two experts, balanced by the bias alone."""
    torch.manual_seed(0)
    layer = MoE(16, 8, 8, top_k=2)
    nn.init.normal_(layer.router.weight, std=0.1)
    x = torch.randn(4, 128, 16)
    x[..., 0], layer.router.weight.data[:2, 0] = 1.0, 0.5
    seen = []
    for _ in range(121):
        layer(x).sum().backward()
        seen.append(max_violation(layer.tokens_per_expert[None]))
        update_expert_bias(layer, 0.002)
        reset_counts(layer)
    print("MaxVio of a skewed router, every 20th of 120 steps: "
          + " ".join(f"{v:.2f}" for v in seen[::20]))
    checks["the bias balances"] = seen[0] > 1 and seen[-1] < 0.2


def demo():
    """Route by hand, balance, and compare all gradients with running every expert on all tokens."""
    checks = {}
    route_by_hand(checks)
    golden_values(checks)
    skewed_router(checks)
    torch.manual_seed(1)
    layer = MoE(12, 7, 6, 1, top_k=2, n_group=3, topk_group=2).double()
    layer.expert_bias.copy_(torch.tensor([0.1, -0.1, 0.0, 0.2, -9.0, 0.0]))  # one starves
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    weights = [x, *layer.parameters()]
    got, expected = layer(x).flatten(0, 1), dense_reference(layer, x.flatten(0, 1))
    pull = torch.randn_like(got)
    worst = max([difference(got, expected)] + [
        difference(a, b) for a, b in zip(torch.autograd.grad(got, weights, pull),
                                         torch.autograd.grad(expected, weights, pull))])
    print(f"largest difference of outputs and {len(weights)} gradients from every expert on every "
          f"token: {worst:.1e}")
    checks["outputs and gradients"] = worst < 1e-12
    checks["one expert starved"] = bool(layer.tokens_per_expert[4] == 0)
    failed = [what for what, right in checks.items() if not right]
    print(f"FAILED: {', '.join(failed)}" if failed or not checks else "PASS")
    return 1 if failed or not checks else 0


def bench(rounds=9):
    """Forward and backward of a MoE layer over those of a dense layer of equal active FLOPs."""
    from collectives import paired_ratio
    from train import keep_freed_memory
    keep_freed_memory()
    for dim, width, experts, k, shared, tokens in (
            (512, 256, 8, 2, 0, 2048), (512, 352, 16, 4, 1, 4096), (256, 128, 32, 4, 1, 4096)):
        moe = MoE(dim, width, experts, shared, top_k=k)
        dense = SwiGLU(dim, width * (k + shared))
        x = torch.randn(1, tokens, dim, requires_grad=True)
        pull = torch.randn_like(x)

        ratio, _ = paired_ratio(lambda: moe(x).backward(pull), lambda: dense(x).backward(pull),
                                rounds)
        print(f"dim {dim}, {experts} experts of {width}, top {k}, {shared} shared, "
              f"{tokens * k // experts} tokens per expert: {ratio} x the dense layer")
    return 0


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    sys.exit(bench() if flags.parse_args().bench else demo())
