"""The optimizer step: AdamW, learning-rate schedules, clipping, and training in 16 bits.

Who holds what, per parameter, when computing in 16 bits (bytes in brackets):

    compute copy [2]  <- cast -  master weight [4] <- AdamW - exp_avg [4], exp_avg_sq [4]
        | forward, backward                       ^
        v                                         |
    gradient of one microbatch [2]  - add ->  gradient of the step [4]

In float32 and float64 the master weight is the parameter itself and nothing is copied.

Sources: Mixed Precision Training (arXiv 1710.03740), AdamW (1711.05101), WSD (MiniCPM, 2404.06395,
section 4) with the decay 1 - sqrt (2405.18392), ZeRO (1910.02054, section 3.1, for the bytes).
Course: 15:41:22 metrics, optimizers, schedulers; course C: formats, master weights, loss scaling.

    python optim.py            number formats and why mixed precision needs its three parts; PASS
    python optim.py --bench    AdamW beside torch's, and what master weights and hooks cost
"""
import argparse
import math
import sys

import torch

from collectives import on_grad_ready

WSD_DECAY = 0.2  # the last fifth of the steps decays; our choice (MiniCPM: a tenth)


def parameter_groups(named_parameters, weight_decay):
    """Two groups: matrices decay, vectors do not.

    Decay pulls the weights of a product towards zero, which bounds the product; a norm's weight has
    no such role, and pulling it to zero would shut its branch. The embedding and the router are
    matrices and decay as well: DeepSeek-V3 (2412.19437, section 4.2) gives one weight decay and
    names no exception. The test is the number of dimensions of the full parameter, which must be
    asked before a technique flattens it into shards.

    named_parameters: pairs (name, tensor); each group also records its "names", in order.
    """
    groups = []
    named_parameters = list(named_parameters)
    for decays in (True, False):
        chosen = [(n, p) for n, p in named_parameters if (p.dim() >= 2) == decays]
        if chosen:
            groups.append({"params": [p for _, p in chosen], "names": [n for n, _ in chosen],
                           "weight_decay": weight_decay if decays else 0.0})
    return groups


class Optimizer:
    """AdamW (1711.05101, algorithm 2) or plain SGD, for parameter_groups(). AdamW per parameter:

        exp_avg    <- beta1 exp_avg + (1 - beta1) grad
        exp_avg_sq <- beta2 exp_avg_sq + (1 - beta2) grad^2
        p <- p - lr weight_decay p - lr mean / (sqrt(variance) + eps), where mean and variance are
             these two over 1 - beta1^step and 1 - beta2^step, since both started from 0

    SGD, p <- p - lr (grad + weight_decay p), has no momentum: it is there to show gradients as they
    are, since Adam hides a constant factor on all of them. betas: DeepSeek-V3, section 4.2.

    Not torch.optim's: the first of those to be made imports torch's compiler, which takes longer
    than the first step of a small run. The kernel for a whole group at once is the same.
    Raises ValueError for another kind.
    """

    def __init__(self, kind, groups, lr, betas=(0.9, 0.95), eps=1e-8):
        if kind not in ("adamw", "sgd"):
            raise ValueError(f"optimizer {kind!r}: use adamw or sgd")
        self.param_groups, self.state = [{"lr": lr, **group} for group in groups], {}
        self.kind, self.betas, self.eps = kind, betas, eps

    def state_of(self, p):
        """Name -> tensor: what is remembered of a parameter, zeros before its first step."""
        if self.kind == "adamw" and p not in self.state:
            self.state[p] = {"step": torch.zeros((), device=p.device),
                             "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return self.state.get(p, {})

    @torch.no_grad()
    def step(self):
        """Update every parameter that has a gradient."""
        update = self.adamw if self.kind == "adamw" else self.sgd
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.grad is not None]
            if chosen:
                update(chosen, [p.grad for p in chosen], group["lr"], group["weight_decay"])

    def sgd(self, parameters, grads, lr, weight_decay):
        if weight_decay:
            grads = torch._foreach_add(grads, parameters, alpha=weight_decay)
        torch._foreach_add_(parameters, grads, alpha=-lr)

    def adamw(self, parameters, grads, lr, weight_decay):
        means, squares, steps = ([self.state_of(p)[key] for p in parameters]
                                 for key in ("exp_avg", "exp_avg_sq", "step"))
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters, grads, means, squares, [], steps, lr=lr, beta1=self.betas[0],
            beta2=self.betas[1], weight_decay=weight_decay, eps=self.eps, amsgrad=False,
            maximize=False)

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def learning_rate(step, steps, lr, min_lr, warmup, schedule):
    """Learning rate of the 0-based `step` in a run of `steps`.

    Warmup rises linearly: lr / warmup at step 0, lr at step warmup - 1. The rest then falls from lr
    to min_lr, which the last step reaches: as half a cosine, linearly, not at all (constant), or
    after a plateau, in the last fifth of the run, as 1 - sqrt (wsd: warmup, stable, decay;
    2405.18392 found this shape better than a line, MiniCPM's own is exponential).
    Raises ValueError for another schedule.
    """
    if schedule not in ("cosine", "wsd", "linear", "constant"):
        raise ValueError(f"schedule {schedule!r}: use cosine, wsd, linear or constant")
    if step < warmup:
        return lr * (step + 1) / warmup
    first = max(warmup, steps - max(round(WSD_DECAY * steps), 1)) if schedule == "wsd" else warmup
    progress = min(max((step + 1 - first) / max(steps - first, 1), 0.0), 1.0)
    factor = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress,
              "wsd": 1 - math.sqrt(progress), "constant": 1.0}[schedule]
    return min_lr + (lr - min_lr) * factor


def gradient_norm(parameters):
    """Euclidean norm of all gradients together, summed in float32 (float64 for float64). ()"""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch._foreach_norm(grads, 2, dtype=wide)
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_(parameters, norm, max_norm):
    """Scale the gradients, whose norm is `norm`, to max_norm where they exceed it; else leave them
    bit for bit (arXiv 1211.5063)."""
    if norm > max_norm:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], max_norm / norm)


class MixedPrecision:
    """Compute copies of the parameters in 16 bits, masters and step gradients in float32.

    masters: name -> the tensor that the optimizer updates; its .grad is the step's sum. Under
    float32 and float64 it is the parameter itself. Buffers keep their own types. With
    accumulate=False another adds up the gradients (ddp.Replicas, into its buckets).
    """

    def __init__(self, model, dtype, accumulate=True):
        self.dtype = dtype
        self.masters, self.copies = {}, {}
        for name, parameter in model.named_parameters():  # a tied weight comes once
            master = parameter
            if dtype in (torch.bfloat16, torch.float16):
                master = parameter.detach().float().clone().requires_grad_()
                master.label = getattr(parameter, "label", None)  # what part of it is here
                parameter.data = parameter.data.to(dtype)
                self.copies[parameter] = master
                if accumulate:
                    on_grad_ready(parameter, self.accumulate)
            self.masters[name] = master

    def named_masters(self):
        return self.masters.items()

    def accumulate(self, parameter):
        """Add one microbatch's gradient, complete by now, to the step's in float32, and free it.

        In bf16 the sum would stop growing at 256 times a microbatch's gradient.
        """
        master = self.copies[parameter]
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    @torch.no_grad()
    def refresh(self):
        """Round the masters into the compute copies, after a step or a load."""
        if self.copies:
            torch._foreach_copy_(list(self.copies), list(self.copies.values()))


class LossScaler:
    """Dynamic loss scaling for float16 (1710.03740, section 3.2; the numbers are
    torch.amp.GradScaler's): start at 2^16, halve when a gradient overflows and skip that step,
    double after 2,000 good steps in a row. For other types the scale is 1 and never moves.

    Raises FloatingPointError, in update(), when the scale would fall below 1: then it is not the
    scaling that overflows but the model.
    """
    growth, backoff, interval = 2.0, 0.5, 2000

    def __init__(self, dtype):
        self.active = dtype == torch.float16
        self.scale = 2.0 ** 16 if self.active else 1.0
        self.good_steps = 0

    def update(self, overflow):
        """Move the scale after a step; `overflow`: a gradient was infinite or NaN."""
        if not self.active:
            return
        if overflow:
            if self.scale * self.backoff < 1:
                raise FloatingPointError(
                    "gradients overflow float16 even with a loss scale of 1; try a smaller --lr, "
                    "or --dtype bf16, which has float32's range")
            self.scale, self.good_steps = self.scale * self.backoff, 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale, self.good_steps = self.scale * self.growth, 0

    def state_dict(self):
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state):
        self.scale, self.good_steps = state["scale"], state["good_steps"]


# ---- demonstration ----

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
           "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
# exponent bits, mantissa bits, largest, log2 of smallest normal, of smallest subnormal, of eps, and
# whether there is an infinity
EXPECTED = {"float32": (8, 23, 3.4028e38, -126, -149, -23, True),
            "bfloat16": (8, 7, 3.3895e38, -126, -133, -7, True),
            "float16": (5, 10, 65504, -14, -24, -10, True),
            "float8_e4m3": (4, 3, 448, -6, -9, -3, False),
            "float8_e5m2": (5, 2, 57344, -14, -16, -2, True)}


def describe_format(dtype):
    """The table's row for a dtype, from torch.finfo: mantissa bits follow from eps, exponent bits
    from what is left beside them and the sign."""
    info = torch.finfo(dtype)
    mantissa = -int(math.log2(info.eps))
    return (info.bits - 1 - mantissa, mantissa, info.max, int(math.log2(info.tiny)),
            int(math.log2(info.tiny)) - mantissa, -mantissa,
            bool(torch.tensor(math.inf).to(dtype).float().isinf()))


def show_formats(checks):
    """The table of number formats, from torch.finfo."""
    print(f"{'format':12}{'exp':>4}{'man':>4}{'largest':>12}{'normal':>8}{'subn.':>8}{'eps':>7}"
          f"{'inf':>5}")
    for name, dtype in FORMATS.items():
        row = describe_format(dtype)
        print(f"{name:12}{row[0]:4}{row[1]:4}{row[2]:12.5g}{'2^%d' % row[3]:>8}"
              f"{'2^%d' % row[4]:>8}{'2^%d' % row[5]:>7}"
              f"{'yes' if row[6] else 'no':>5}")
        close = math.isclose(row[2], EXPECTED[name][2], rel_tol=1e-4)
        checks[f"{name} as published"] = close and row[:2] + row[3:] == (
            EXPECTED[name][:2] + EXPECTED[name][3:])


def small_gradients():
    """Float32 gradients of a small network's activations, under the seed that a step of 65,536
    tokens gives each: half of them are below float16's range."""
    torch.manual_seed(0)
    x = torch.randn(4096, 64)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    hidden = []
    for layer in layers:
        x = torch.tanh(layer(x))
        x.retain_grad()
        hidden.append(x)
    (x.square().mean(-1) / 2 ** 16).sum().backward()
    return torch.cat([h.grad.flatten() for h in hidden])


def show_underflow(checks):
    """A histogram of gradients, and how many float16 loses with and without the loss scale."""
    grads = small_gradients()
    scale = LossScaler(torch.float16).scale
    print(f"gradients by size ({grads.numel():,} numbers; float16's least is 2^-24):")
    exponent = grads.abs().clamp(min=2.0 ** -60).log2().floor()
    for low in range(-36, -12, 4):
        share = ((exponent >= low) & (exponent < low + 4)).float().mean().item()
        print(f"  2^{low} .. 2^{low + 4:<4} {share:6.1%} {'#' * round(60 * share)}")
    lost = (grads.half() == 0).float().mean().item()
    kept = (grads * scale).half()
    lost_scaled = (kept == 0).float().mean().item()
    print(f"become 0 in float16: {lost:.1%} unscaled, {lost_scaled:.2%} with loss scale {scale:g}")
    checks["scaling rescues gradients"] = lost > 0.1 and lost_scaled < 0.01
    checks["and overflows none"] = bool(kept.isfinite().all())


def show_skipped_step(checks):
    """Three float16 steps; the second overflows, and weights and schedule stand still for it."""
    model = torch.nn.Linear(4, 1, bias=False)
    precision, scaler = MixedPrecision(model, torch.float16), LossScaler(torch.float16)
    master = precision.masters["weight"]
    optimizer = Optimizer("adamw", parameter_groups(precision.named_masters(), 0.1), 1e-3)
    updates, seen = 0, []
    for size in (1.0, 1000.0, 1.0):  # the gradient is 256 x size: 256,000 is beyond 65,504
        before = master.detach().clone()
        inputs = torch.full((1, 4), size, dtype=torch.float16)
        model(inputs).float().sum().backward(torch.tensor(scaler.scale / 256))
        norm = gradient_norm([master]) / scaler.scale
        overflow = not norm.isfinite()
        if not overflow:
            master.grad.mul_(1 / scaler.scale)
            clip_([master], norm, 1.0)
            optimizer.param_groups[0]["lr"] = learning_rate(updates, 10, 1e-3, 1e-4, 2, "cosine")
            optimizer.step()
            precision.refresh()
            updates += 1
        optimizer.zero_grad()
        scaler.update(overflow)
        seen.append((updates, scaler.scale, not torch.equal(before, master)))
    print("steps good, overflowing, good (updates, scale, moved): "
          + ", ".join(f"({u}, {s:g}, {'yes' if m else 'no'})" for u, s, m in seen))
    checks["a skipped step is skipped"] = seen == [(1, 65536, True), (1, 32768, False),
                                                   (2, 32768, True)]
    checks["and is no step of AdamW"] = optimizer.state[master]["step"].item() == 2


def demo():
    """Show what 16-bit numbers lose and what keeps training right in spite of it."""
    checks = {}
    show_formats(checks)
    total = torch.tensor(256.0, dtype=torch.bfloat16) + 1
    print(f"256 + 1 = {total.item():g} in bfloat16: it has 8 significant bits")
    checks["256 + 1 is 256"] = total.item() == 256
    show_underflow(checks)

    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    alone = model.weight.detach().bfloat16()
    precision = MixedPrecision(model, torch.bfloat16)
    master = precision.masters["weight"]
    for _ in range(1000):
        alone -= 1e-3 * 0.25  # less than half of bfloat16's spacing below 1, 2^-8
        master.data -= 1e-3 * 0.25
        precision.refresh()
    print(f"1 - 1000 x 0.00025 = {alone.item():g} in bfloat16 alone, {master.item():.4f} in the "
          f"float32 master, {model.weight.item():g} in its bfloat16 copy")
    checks["updates vanish without masters"] = alone.item() == 1
    checks["masters keep them"] = abs(master.item() - 0.75) < 1e-4 and model.weight.item() == 0.75

    scaler, seen = LossScaler(torch.float16), []
    for overflow in [True] + [False] * 2000:
        scaler.update(overflow)
        seen.append(scaler.scale)
    print(f"loss scale: 65536, an overflow -> {seen[0]:g}, 2,000 good steps -> {seen[-1]:g}")
    checks["loss scale"] = seen[0] == 32768 == seen[-2] and seen[-1] == 65536
    show_skipped_step(checks)
    failed = [what for what, right in checks.items() if not right]
    print(f"FAILED: {', '.join(failed)}" if failed or not checks else "PASS")
    return 1 if failed or not checks else 0


def bench():
    """AdamW beside torch's, a 16-bit step's extra copy beside a float32 step, and backward with
    the accumulating hooks beside backward that adds in bfloat16."""
    from collectives import paired_ratio

    def ratio(a, b):
        return paired_ratio(a, b, 15)[0]
    parameters = [torch.randn(512, 1408, requires_grad=True) for _ in range(24)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    ours = Optimizer("adamw", parameter_groups(enumerate(parameters), 0.01), 1e-3)
    for kind in ("fused", "foreach"):
        theirs = torch.optim.AdamW(parameters, **{kind: True})
        print(f"AdamW, 17 M parameters, ours / torch's {kind}: {ratio(ours.step, theirs.step)}")
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 1408, bias=False) for _ in range(24)])
    precision = MixedPrecision(model, torch.bfloat16)
    print(f"refreshing bfloat16 copies / AdamW: {ratio(precision.refresh, ours.step)}")
    plain, hooked = (torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False)
                                           for _ in range(24)]) for _ in range(2))
    plain.bfloat16()
    MixedPrecision(hooked, torch.bfloat16)
    x = torch.randn(512, 256, dtype=torch.bfloat16)
    print(f"forward and backward of 512 tokens, hooks / none: "
          f"{ratio(lambda: hooked(x).sum().backward(), lambda: plain(x).sum().backward())}")
    return 0


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    sys.exit(bench() if flags.parse_args().bench else demo())
