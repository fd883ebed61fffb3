"""Pipeline parallelism: blocks on different ranks, microbatches that pass through them one by one.

    rank 0   F0 F1 F2 F3                   B0     B1     B2     B3        GPipe, p = 2 ranks, m = 4
    rank 1      F0 F1 F2 F3 B0     B1     B2     B3                       microbatches

Each rank holds a few consecutive blocks, a stage, and sends what leaves it to the next one: b s d
numbers a microbatch and boundary (1/tp of them under sequence parallelism), far less than any other
axis moves. The price is the bubble: a rank waits until the first microbatch reaches it. A schedule
says in which order a rank does its forwards (F) and backwards (B), or B's two halves: I, the input
gradient that the stage before is waiting for, and W, the weight gradients that nobody waits for.

p ranks, m microbatches, F, I, W, B = I + W the time of a whole rank's layers:

    schedule      bubble of a rank     activations held, in microbatches of a whole rank's layers
    gpipe         (p-1) (F+B)          m
    1f1b          (p-1) (F+B)          min(p-r, m) on rank r
    interleaved   (p-1) (F+B)/v        p + (p-1)/v on rank 0; v stages a rank, v times the messages
    zb-h1         (p-1) (F+I-W)        min(p, m), of which r wait for W alone
    zb-v          0                    p, on every rank; the ranks end (p-1)/2 apart
    dualpipe-v    (p-1) (FB+B-3W)/2    p + 1/2; FB is the time of a pair as one action

The last three rows hold while W <= F, I (zb-h1) or F = I = W; all for m >= p, zb-v m >= 2p - 1.

1F1B: PipeDream's own schedule had no end of a step. A microbatch's backward then met weights that
had been updated since its forward, so each version had to be kept (stashed) until it came back:

    PipeDream   F0 F1 F2 F3 B0* F4 B1* F5 ...   * an update: F4 sees other weights than F3, and B1
                                                  needs those that F1 saw: up to p versions
    flushed     F0 F1 F2 F3 B0 F4 B1 ... B7 *   one update when all are back: one version, exact
                                                gradients, and the bubble above once a step

DualPipe-V pairs one microbatch's forward with another's backward (an FB action), so that on a GPU
the experts' all-to-alls of one could run under the compute of the other. Here the two run one after
the other: nothing is hidden, and with F = I = W it idles (p-1)/2 where ZB-V does not, and holds
half an activation more, so ZB-V is the better choice until pairs overlap. What it gains even so:
most of its backwards are whole, and a whole one keeps nothing for a later W.

Messages. Between two ranks each direction has a group of its own, a queue in which messages arrive
as they were sent. The receiver knows the sender's list of actions, and posts its receives in the
order of that list, up to the one it needs and the one it will need next. So a receive never waits
behind one that the sender has yet to post, a send waits only for earlier sends of its queue, and no
action waits for a send. Then a rank only ever waits for an action of the schedule, and a schedule
that validate() has worked off from beginning to end can't deadlock, however late messages leave.

Sources: GPipe (arXiv 1811.06965), PipeDream (1806.03377), PipeDream-flush (2006.09503), interleaved
(2104.04473), zero bubble (2401.10241), ZB-V (2405.15362), DualPipe (2412.19437, section 3.2.1).
Course: 06:06:17 from first principles, 06:26:52 schedules, 07:42:10 coding it.

    python pipeline.py                    schedules on 2 ranks beside one process; prints PASS
    python pipeline.py --schedule zb-v --pp 4 --microbatches 8 [--svg FILE]    draws one; no ranks
    torchrun --nproc-per-node 4 pipeline.py --schedule zb-v    runs it, draws when each action ran
    python pipeline.py --bench            a step beside torch.distributed.pipelining, 2 and 4 ranks
"""
import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from collectives import (Axis, Label, Linear, Mesh, Pending, attributed, difference, drain,
                         label_of, one_of, paired_ratio, receive, refuse, send, spawn, verdict,
                         weight_gradient, weights_wait)


@dataclasses.dataclass(frozen=True)
class Action:
    """What a rank does next: `kind` F (forward), B (backward), its halves I (input gradient) and W
    (weight gradient), of one stage and microbatch; or FB, F of (stage, microbatch) paired with B of
    `other` = (stage, microbatch)."""
    kind: str
    stage: int
    microbatch: int
    other: tuple = ()

    def __str__(self):
        text = f"{self.kind}{self.stage}.{self.microbatch}"
        return text + (f"+{self.other[0]}.{self.other[1]}" if self.other else "")

    def parts(self):
        """The single actions: itself, or of a pair the F and the B."""
        if self.kind != "FB":
            return [self]
        return [Action("F", self.stage, self.microbatch), Action("B", *self.other)]


def singles(actions):
    return [part for action in actions for part in action.parts()]


# ---- where stages lie ----

def loop_placement(p, v=1):
    """Stage -> rank, round and round: rank r holds r, r + p, r + 2 p ..."""
    return [stage % p for stage in range(p * v)]


def v_placement(p):
    """Down and up again: rank r holds stages r and 2 p - 1 - r, rank 0 the first and the last."""
    return [*range(p), *reversed(range(p))]


# ---- the schedules: p ranks, m microbatches -> for every rank its list of actions ----

def gpipe(p, m):
    """All forwards, then all backwards."""
    return [[Action(kind, r, i) for kind in "FB" for i in range(m)] for r in range(p)]


def one_f_one_b(p, m):
    """As soon as a microbatch comes back its backward runs."""
    return [alternate([Action("F", r, i) for i in range(m)], [Action("B", r, i) for i in range(m)],
                      min(p - 1 - r, m)) for r in range(p)]


def alternate(forwards, backwards, warmup):
    """`warmup` forwards, then one forward and one backward in turn, then the other backwards."""
    steady = [a for pair in zip(forwards[warmup:], backwards) for a in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup:]


def interleaved(p, m, v):
    """v stages a rank, so that the pipeline fills in steps of 1/v: p microbatches through a rank's
    first stage, the same p through its second, and so on."""
    lists = []
    for r in range(p):
        order = [(k % (p * v) // p, k // (p * v) * p + k % p) for k in range(m * v)]  # chunk, mb
        forwards = [Action("F", chunk * p + r, i) for chunk, i in order]
        backwards = [Action("B", (v - 1 - chunk) * p + r, i) for chunk, i in order]
        lists.append(alternate(forwards, backwards, min(2 * (p - 1 - r) + (v - 1) * p, m * v)))
    return lists


class Builder:
    """A rank's list of actions; each kind takes a stage's microbatches in their order."""

    def __init__(self):
        self.actions, self.taken, self.waiting = [], {}, []

    def next_of(self, kind, stage):
        """(stage, its next microbatch) for F, or for B and I together."""
        key = "F" if kind == "F" else "B", stage
        self.taken[key] = self.taken.get(key, 0) + 1
        return stage, self.taken[key] - 1

    def add(self, kinds, *stages):
        """Each kind of each stage in turn; W is the stage's one that has waited longest."""
        for stage in stages:
            for kind in kinds:
                if kind == "W":
                    self.weight(stage)
                    continue
                self.actions.append(Action(kind, *self.next_of(kind, stage)))
                if kind == "I":
                    self.waiting.append(self.actions[-1])

    def pair(self, forward, backward):
        self.actions.append(Action("FB", *self.next_of("F", forward), self.next_of("B", backward)))

    def weight(self, stage=None):
        """The weight gradient that has waited longest, of all stages or of one."""
        oldest = next(a for a in self.waiting if stage in (None, a.stage))
        self.waiting.remove(oldest)
        self.actions.append(Action("W", oldest.stage, oldest.microbatch))


def zb_h1(p, m):
    """1F1B with its memory and backward in halves: rank r's weight gradients run r microbatches
    late, and so fill what was the bubble at the end."""
    lists = []
    for r in range(p):
        build, warmup = Builder(), min(p - 1 - r, m)
        build.add("F" * warmup, r)
        for i in range(m):
            build.add("FI" if warmup + i < m else "I", r)
            if i >= r:
                build.add("W", r)
        build.add("W" * len(build.waiting), r)
        lists.append(build.actions)
    return lists


def zb_v(p, m):
    """Two stages a rank placed as a V, backward in halves: with F = I = W no rank idles between its
    first and its last action, in the memory of 1F1B's first rank.

    Built for at least 2 p - 1 microbatches; of fewer, those that are not there are left out.
    """
    lists = []
    for r in range(p):
        down, up, n, build = r, 2 * p - 1 - r, max(m, 2 * p - 1), Builder()
        build.add("F" * (2 * (p - r) - 1), down)
        for _ in range(r):
            build.add("F", up, down)
        build.add("FIW" * (p - r), up)
        while build.taken["F", up] < n:
            build.add("FIW" if build.taken["F", down] < n else "IW", down)
            build.add("FIW", up)
        for _ in range(r):
            build.add("I", down, up)
        build.add("IW" * (p - r), down)
        for stage in (up, down):
            build.add("W" * sum(a.stage == stage for a in build.waiting), stage)
        lists.append([a for a in build.actions if a.microbatch < m])
    return lists


def dualpipe_v(p, m):
    """DualPipe folded into a V, m at least 2 p: in the steady phase each action pairs one
    microbatch's forward with another's backward."""
    lists = []
    for r in range(p):
        down, up, build = r, 2 * p - 1 - r, Builder()
        build.add("F" * (2 * (p - r - 1)), down)
        for _ in range(r + 1):
            build.add("F", down, up)
        for _ in range(p - r - 1):
            build.add("IWF", up)
        for i in range(m - 2 * p + r + 1):
            if i == 0 and r == p - 1:  # this F is what the B after it comes back from
                build.add("F", down)
                build.add("B", up)
            else:
                build.pair(down, up)
            build.pair(up, down)
        for _ in range(p - r - 1):
            build.add("B", up)
            build.pair(up, down)
        for i in range(2 * (r + 1)):
            build.add("I" if i > r else "B", down if i % 2 else up)
        for _ in range(p - r - 1):
            build.weight()
            build.add("I", down)
        while build.waiting:
            build.weight()
        lists.append(build.actions)
    return lists


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1,
             "zb-v": zb_v, "dualpipe-v": dualpipe_v}


SPLIT_BACKWARD = ("zb-h1", "zb-v", "dualpipe-v")  # those with I and W


def usual_virtual(name):
    """Virtual stages where none are asked for: a demonstration shows what interleaving is."""
    return 2 if name == "interleaved" else 1


def place_stages(name, p, virtual, n_layers=None):
    """Stage -> rank. Raises ValueError, with what to use instead, for stages that can't be."""
    v = {"interleaved": virtual, "zb-v": 2, "dualpipe-v": 2}.get(name, 1)
    if virtual not in (1, v):
        raise ValueError(f"schedule {name} has {v} stage{'s' * (v > 1)} a rank, not virtual stages="
                         f"{virtual}; use 1, or schedule interleaved")
    if n_layers is not None and n_layers < p * v:
        fits = [f"pp={n_layers // v} or less"] * (n_layers // v > (v > 1))
        if v > 1 and n_layers >= p:
            fits += [f"virtual stages={n_layers // p}"] * (name == "interleaved")
            fits += ["schedule 1f1b"]
        raise ValueError(f"pp={p} with {v} stage{'s' * (v > 1)} a rank makes {p * v} stages, and "
                         f"the model has n_layers={n_layers}; each stage needs a block: use "
                         + one_of(fits or [f"schedule 1f1b with pp={n_layers} or less"]))
    return v_placement(p) if name in ("zb-v", "dualpipe-v") else loop_placement(p, v)


def check(name, p, m, virtual=1, n_layers=None):
    """Raises ValueError, with what to use instead, for a schedule that can't be."""
    place_stages(name, p, virtual, n_layers)
    if name == "interleaved" and m % p:
        near = one_of([n for n in (m // p * p, (m // p + 1) * p) if n])
        raise ValueError(f"schedule interleaved takes microbatches in groups of pp={p}, and {m} is "
                         f"not divisible by it; use {near} microbatches, or another schedule")
    if name == "dualpipe-v" and m < 2 * p:
        raise ValueError(f"schedule dualpipe-v needs 2 x pp = {2 * p} microbatches or more, and "
                         f"there are {m}; use more, or zb-v")


@functools.cache
def make_schedule(name, p, m, virtual=1):
    """(for every rank its list of actions, stage -> rank). Raises ValueError as check() does."""
    check(name, p, m, virtual)
    lists = SCHEDULES[name](*(p, m, virtual)[:3 if name == "interleaved" else 2])
    return lists, place_stages(name, p, virtual)


# ---- is it right, and what does it cost ----

def done_by(part):
    """What others wait for: ("F" or "B", stage, microbatch). B stands for I too; W is its own."""
    return "B" if part.kind == "I" else part.kind, part.stage, part.microbatch


def needs(part, stages):
    """What must be done before a single action."""
    kind, s, i = part.kind, part.stage, part.microbatch
    if kind == "F":
        return [("F", s - 1, i)] if s else []
    if kind == "W":
        return [("B", s, i)]
    return [("F", s, i)] + ([("B", s + 1, i)] if s < stages - 1 else [])


def simulate(lists, placement, costs, latency=0.0):
    """Every rank works off its list: rank -> [(single action, start, end)].

    costs: kind -> time of one stage's action (B: I + W when not given), or a function (stage,
    microbatch) -> such. latency: time of a message.
    With a cost of FB pairs are atomic: they begin when both actions can and end together; without,
    the two run one after the other. Raises ValueError, naming what each rank is at, when no rank
    can go on.
    """
    stages, done = len(placement), {}
    cost_of = costs if callable(costs) else lambda stage, microbatch: costs
    lists = lists if "FB" in cost_of(0, 0) else [singles(actions) for actions in lists]
    place, times, moved = [0] * len(lists), [[] for _ in lists], True
    while moved:
        moved = False
        for r, actions in enumerate(lists):
            while place[r] < len(actions):
                action = actions[place[r]]
                parts = action.parts()
                inside = {done_by(part) for part in parts}
                wanted = [w for part in parts for w in needs(part, stages) if w not in inside]
                if any(w not in done for w in wanted):
                    break
                start = max([times[r][-1][2] if times[r] else 0.0] + [
                    done[w][0] + (latency if done[w][1] != r else 0.0) for w in wanted])
                cost = cost_of(action.stage, action.microbatch)
                end = start + (cost.get(action.kind) or cost["I"] + cost["W"])
                for i, part in enumerate(parts):
                    span = (end - start) / len(parts)
                    times[r].append((part, start + i * span, start + (i + 1) * span))
                    done[done_by(part)] = end, r
                place[r] += 1
                moved = True
    stuck = [f"rank {r} at {lists[r][i]}" for r, i in enumerate(place) if i < len(lists[r])]
    if stuck:
        raise ValueError("the schedule can't go on: " + ", ".join(stuck))
    return times


def validate(lists, placement, m):
    """Raises ValueError, naming the action, unless every stage does each of m microbatches once, on
    its own rank, F before B or before I before W, and no rank waits for ever."""
    seen = {}
    for r, actions in enumerate(lists):
        for part in singles(actions):
            key = part.stage, part.microbatch
            if not (0 <= part.stage < len(placement) and 0 <= part.microbatch < m
                    and placement[part.stage] == r):
                raise ValueError(f"{part} is not rank {r}'s to do")
            before = seen.get(key, "")
            if before + part.kind not in ("F", "FB", "FI", "FIW"):
                raise ValueError(f"rank {r}: {part} comes after {' '.join(before) or 'nothing'}")
            seen[key] = before + part.kind
    for stage in range(len(placement)):
        for i in range(m):
            if seen.get((stage, i)) not in ("FB", "FIW"):
                raise ValueError(f"stage {stage}, microbatch {i}: only "
                                 f"{' '.join(seen.get((stage, i), '')) or 'nothing'} is done")
    simulate(lists, placement, {"F": 1, "I": 1, "W": 1})


def peak(actions, until="W"):
    """The most microbatches of this rank's stages held at once: from F to B, or with a split
    backward to W (what it reads is a part of the activations), or to I with until="I"."""
    live = most = 0
    for part in singles(actions):
        live += {"F": 1, "B": -1, until: -1}.get(part.kind, 0)
        most = max(most, live)
    return most


def predict(lists, placement, costs, latency=0.0):
    """The timeline; its length; each rank's idle time between its first and last action, and
    overall; peaks, all as plain numbers in a dict."""
    times = simulate(lists, placement, costs, latency)
    length = max(line[-1][2] for line in times)
    busy = [sum(end - start for _, start, end in line) for line in times]
    return {"times": times, "makespan": length, "busy": busy,
            "idle": [line[-1][2] - line[0][1] - b for line, b in zip(times, busy)],
            "bubble": 1 - sum(busy) / (length * len(lists)),
            "peak": [peak(actions) for actions in lists]}


# ---- drawing ----

COLOURS = {"F": (117, "#8ecae6"), "B": (156, "#a7d49b"), "I": (187, "#d9ed92"),
           "W": (222, "#ffd6a5")}


def draw(times, placement, width, coloured):
    """Lines of text, one a rank, `width` characters long: each action's letter and microbatch,
    small letters for a rank's later stages; letters alone where there is no room."""
    first = {rank: placement.index(rank) for rank in set(placement)}
    begin = min(line[0][1] for line in times)
    scale = width / (max(line[-1][2] for line in times) - begin)
    lines = []
    for r, line in enumerate(times):
        text, at = f"rank {r:2} ", 0
        for part, start, end in line:
            a, b = round((start - begin) * scale), round((end - begin) * scale)
            letter = part.kind if part.stage == first[r] else part.kind.lower()
            label = f"{letter}{part.microbatch}"
            cell = (label if len(label) < b - a else letter).ljust(b - a)[:b - a]
            text += " " * (a - at)
            text += f"\x1b[30;48;5;{COLOURS[part.kind][0]}m{cell}\x1b[0m" if coloured else cell
            at = max(b, at)
        lines.append(text)
    return lines


def draw_svg(times, placement):
    """The same as an SVG document."""
    unit = 24 / min(end - start for line in times for _, start, end in line)
    first = {rank: placement.index(rank) for rank in set(placement)}
    width = max(line[-1][2] for line in times) * unit + 70
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" '
           f'height="{len(times) * 30 + 10}" font-family="monospace" font-size="11">']
    for r, line in enumerate(times):
        out.append(f'<text x="4" y="{r * 30 + 24}">rank {r}</text>')
        for part, start, end in line:
            x, wide = 60 + start * unit, (end - start) * unit
            later = ' stroke-width="2"' if part.stage != first[r] else ""
            out.append(f'<rect x="{x:.1f}" y="{r * 30 + 6}" width="{wide:.1f}" height="26" '
                       f'fill="{COLOURS[part.kind][1]}" stroke="#555"{later}/>'
                       f'<text x="{x + 3:.1f}" y="{r * 30 + 24}">{part.kind}{part.microbatch}'
                       "</text>")
    return "\n".join([*out, "</svg>\n"])


# ---- splitting a model ----

def block_cost(block):
    """Matrix numbers that one token uses, of all experts only those of its top k."""
    experts = getattr(getattr(block, "ffn", None), "experts", None)
    cost = sum(p.numel() for p in block.parameters() if p.dim() > 1)
    if experts is not None:
        stacked = sum(p.numel() for p in experts.parameters())
        router = block.ffn.router
        cost -= stacked - stacked * router.top_k // len(router.weight)
    return cost


def balance(costs, first, last, stages):
    """How many of the blocks each stage gets, at least one, so that the dearest stage is as cheap
    as it can be. costs: of each block; first and last: of embedding and head, which come on top."""
    n, before = len(costs), [0, *itertools.accumulate(costs)]

    @functools.cache
    def best(begin, stage):
        """(dearest stage, sum of squares) and sizes of the stages from this one on."""
        if stage == stages - 1:
            cost = before[n] - before[begin] + first * (stage == 0) + last
            return (cost, cost ** 2), (n - begin,)
        found = None
        for size in range(1, n - begin - (stages - stage - 1) + 1):
            cost = before[begin + size] - before[begin] + first * (stage == 0)
            if found and cost > found[0][0]:  # and larger sizes are dearer still
                break
            (worst, squares), sizes = best(begin + size, stage + 1)
            option = (max(cost, worst), cost ** 2 + squares), (size, *sizes)
            found = min(found or option, option)
        return found
    return best(0, 0)[1]


def stage_sizes(config, costs, stages):
    """How many blocks each stage gets: an embedding counts 3 d, the numbers that a look-up touches,
    and a head its v d. costs: block_cost() of each block."""
    return balance(tuple(costs), 3 * config.dim, config.vocab_size * config.dim, stages)


def split(model, mesh, name, virtual=1):
    """Leave this rank's stages in a model on the meta device; returns the Pipeline that runs it.

    A head that is tied to the embedding's matrix is a second copy on the last stage's rank, unless
    that is the first one's too. Raises ValueError as place_stages() does.
    """
    config, axis = model.config, mesh["pp"]
    stages = len(place_stages(name, axis.size, virtual, config.n_layers))
    sizes = stage_sizes(config, map(block_cost, model.blocks.values()), stages)
    names, blocks = iter(list(model.blocks)), []
    for size in sizes:
        blocks.append([next(names) for _ in range(size)])
    pipeline = Pipeline(axis, name, virtual, blocks)
    kept = {block for stage in pipeline.stages for block in blocks[stage]}
    for block in set(model.blocks) - kept:
        del model.blocks[block]
    has_first, has_last, tied = 0 in pipeline.stages, pipeline.has_last, model.head is None
    if not has_first and not (has_last and tied):
        model.embed = None
    if not has_last:
        model.norm = model.head = None
    if tied and has_first and has_last:
        pipeline.twice.add("embed.weight")
    elif tied and (has_first or has_last):
        shape = tuple(model.embed.weight.shape)
        model.embed.weight.label = Label(shape, partial=("data", "pp"))
    if name in SPLIT_BACKWARD:
        let_weights_wait(model)
    return pipeline


def let_weights_wait(model):
    """Linear layers and experts ask weight_gradient() whether their weight's gradient has to wait;
    norms and routers have small ones, which don't."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = functools.partial(linear, module)
        elif hasattr(module, "weight_gradient"):
            module.weight_gradient = weight_gradient


def linear(layer, x):
    return Linear.apply(x, layer.weight)


# ---- messages ----

def open_links(axis, placement):
    """(source, destination) -> link, an Axis of those two ranks, for each that this pipeline rank
    is an end of: those between stages, and between the two ends for a tied embedding.

    Two groups are enough, one for messages to higher and one for messages to lower ranks: in each,
    nccl gives every pair a queue of its own.
    """
    if axis.size == 1:
        return {}
    lower, links = dist.new_group(axis.ranks, axis.timeout, use_local_synchronization=True), {}
    pairs = [*zip(placement, placement[1:]), (placement[0], placement[-1])]
    for a, b in sorted({tuple(sorted(pair)) for pair in pairs if len(set(pair)) == 2}):
        for source, destination, group in ((a, b, axis.group), (b, a, lower)):
            if axis.rank in (a, b):
                ranks = axis.ranks[source], axis.ranks[destination]
                link = Axis("pp", ranks, int(axis.rank == destination), group)
                links[source, destination] = link
                connect(link)
    return links


def connect(link):
    """nccl connects two ranks at their first message, and blocks until both are there: that must
    not happen in the middle of a schedule. All ranks connect in the order of the links."""
    token = torch.zeros(1, device="cpu" if link.on_gloo else "cuda")
    with attributed(link, "connect"):
        if link.rank == 0:
            dist.send(token, link.ranks[1], link.group)
        else:
            dist.recv(token, link.ranks[0], link.group)


def user_of(kind, stage):
    """The stage that needs the result of F, or of B or I, of a stage."""
    return stage + 1 if kind == "F" else stage - 1


def messages(actions, placement, destination):
    """What a rank with this list of actions gives another one, in order: done_by() of them."""
    for part in singles(actions):
        user = user_of(part.kind, part.stage)
        if part.kind != "W" and 0 <= user < len(placement) and placement[user] == destination:
            yield done_by(part)


class Mail:
    """Hidden states and their gradients between this pipeline rank and its neighbours, for one run
    through the lists. blank(microbatch): memory for one that is to come."""

    def __init__(self, axis, links, lists, placement, blank):
        self.axis, self.links, self.placement, self.blank = axis, links, placement, blank
        self.expected = {peer: collections.deque(messages(actions, placement, axis.rank))
                         for peer, actions in enumerate(lists) if peer != axis.rank}
        self.order = [{done_by(part): at for at, part in enumerate(singles(actions))}
                      for actions in lists]
        self.arriving, self.leaving = {}, {peer: [] for peer in range(len(lists))}

    def post(self, part):
        """Start receiving what an action of this rank needs, and all that is sent before it."""
        for need in needs(part, len(self.placement)) if part else ():
            peer = self.placement[need[1]]
            while need in self.expected.get(peer, ()):
                message = self.expected[peer].popleft()
                self.arriving[message] = receive(self.blank(message[2]),
                                                 self.links[peer, self.axis.rank])

    def take(self, kind, stage, i):
        """The result of F or B of a stage, from whoever did it.

        Its sender has by then worked off all that is before it in its list: what it needed for that
        has reached it, and need not be kept here any longer.
        """
        tensor, peer = self.arriving.pop((kind, stage, i)).wait(), self.placement[stage]
        reached, leaving = self.order[peer][kind, stage, i], self.leaving[peer]
        self.leaving[peer] = [(at, sending) for at, sending in leaving if at > reached]
        for at, sending in leaving:
            if at <= reached:
                sending.wait()
        return tensor

    def give(self, kind, stage, i, tensor):
        """The result of F or B of a stage, to whoever needs it: the next one or the one before."""
        user = user_of(kind, stage)
        peer = self.placement[user]
        if peer == self.axis.rank:
            self.arriving[kind, stage, i] = Pending(self.axis, "hand over", [], lambda: tensor)
            return
        sending = send(tensor.contiguous(), self.links[self.axis.rank, peer])
        self.leaving[peer].append((self.order[peer][kind, user, i], sending))

    def close(self):
        for sends in self.leaving.values():
            for _, sending in sends:
                sending.wait()


# ---- running ----

class Pipeline:
    """This rank's stages of a model and how it runs them; split() makes it.

    blocks: stage -> names of its blocks. twice: the name of a tied embedding, where this rank has
    both stages that use it.
    timeline: [(single action, start, end)] of the last train(), in seconds.
    """

    def __init__(self, axis, name, virtual, blocks):
        self.axis, self.name, self.virtual, self.blocks = axis, name, virtual, blocks
        self.placement = place_stages(name, axis.size, virtual)
        self.last = len(self.placement) - 1
        self.stages = [s for s, rank in enumerate(self.placement) if rank == axis.rank]
        self.links = open_links(axis, self.placement)
        self.twice, self.timeline = set(), []

    @property
    def has_last(self):
        return self.last in self.stages

    def seconds(self):
        """Of the last train(): the seconds that this rank worked, and those from the begin of its
        first action to the end of its last, waits for other stages included."""
        return (sum(end - start for _, start, end in self.timeline),
                self.timeline[-1][2] - self.timeline[0][1])

    def layer_names(self):
        """Of each of this rank's stages, the names of its modules in the order of use."""
        return [["embed"] * (s == 0) + [f"blocks.{name}" for name in self.blocks[s]]
                + ["norm"] * (s == self.last) for s in self.stages]

    def forward(self, model, stage, x, tokens, labels, positions=None, document_ids=None,
                seed=1.0, balance_seed=0.0):
        """A stage's forward: x (b, s, d) -> (b, s, d), or of the last stage the summed token loss.
        The first begins with tokens (b, s); the rest as Transformer.forward and head_loss have it.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1])
        x = model.embed(tokens) if stage == 0 else x
        x = model.through(self.blocks[stage], x, positions, document_ids, balance_seed)
        if stage < self.last:
            return x
        return model.head_loss(model.norm(x), labels, seed)

    def train(self, m, forward, blank, seed, bracket=lambda last, stage: contextlib.nullcontext()):
        """Forward and backward of m microbatches by the schedule; losses on the last stage's rank.

        forward(stage, microbatch, x) -> hidden states, or the loss, whose gradient is `seed`.
        bracket(last, stage): a context around what completes gradients of a stage: B or W.
        """
        lists, _ = make_schedule(self.name, self.axis.size, m, self.virtual)
        parts = singles(lists[self.axis.rank])
        final = {part.stage: at for at, part in enumerate(parts) if part.kind in "BW"}
        mail = Mail(self.axis, self.links, lists, self.placement, blank)
        held, losses, self.timeline = {}, [], []
        for at, part in enumerate(parts):
            mail.post(part)
            mail.post(parts[at + 1] if at + 1 < len(parts) else None)
            arrived = self._arrived(part, mail)
            start = time.perf_counter()
            if part.kind == "F":
                if arrived is not None:
                    arrived.requires_grad_()
                held[part.stage, part.microbatch] = arrived, self._forward(
                    part, arrived, forward, mail, losses)
            else:
                with (bracket(at == final[part.stage], part.stage) if part.kind != "I"
                      else contextlib.nullcontext()):
                    self._backward(part, arrived, mail, held, seed)
            self.timeline.append((part, start, time.perf_counter()))
        mail.close()
        return losses

    def _arrived(self, part, mail):
        """What a single action begins with; None where it begins or ends the model, and for W."""
        if part.kind == "F":
            return mail.take("F", part.stage - 1, part.microbatch) if part.stage else None
        if part.kind == "W" or part.stage == self.last:
            return None
        return mail.take("B", part.stage + 1, part.microbatch)

    def _forward(self, part, x, forward, mail, losses):
        """Returns what backward begins from: the loss, or of an output that was sent on no more
        than where it came from."""
        out = forward(part.stage, part.microbatch, x)
        if part.stage == self.last:
            losses.append(out.detach())
            return out
        mail.give("F", part.stage, part.microbatch, out.detach())
        return get_gradient_edge(out) if torch.is_grad_enabled() else None

    def _backward(self, part, grad, mail, held, seed):
        key = part.stage, part.microbatch
        if part.kind == "W":
            drain(held.pop(key))
            return
        x, out = held.pop(key)
        queue = []
        with weights_wait(queue) if part.kind == "I" else contextlib.nullcontext():
            torch.autograd.backward(out, torch.full_like(out, seed) if grad is None else grad)
        if part.kind == "I":
            held[key] = queue
        if part.stage:
            mail.give("B", part.stage, part.microbatch, x.grad)

    @torch.no_grad()
    def evaluate(self, m, forward, blank):
        """The losses of m microbatches on the last stage's rank, forward alone, stage by stage."""
        lists = [[Action("F", s, i) for s, at in enumerate(self.placement) if at == rank
                  for i in range(m)] for rank in range(self.axis.size)]
        mail = Mail(self.axis, self.links, lists, self.placement, blank)
        losses = []
        for part in lists[self.axis.rank]:
            mail.post(part)
            self._forward(part, self._arrived(part, mail), forward, mail, losses)
        mail.close()
        return losses

    @torch.no_grad()
    def sum_tied_gradients(self, masters):
        """Add up the two halves of a tied matrix's gradient where the first and the last stage's
        ranks have a copy each (Megatron's embedding group): the copies stay equal for ever. B bytes
        each way."""
        for master in masters:
            if "pp" not in label_of(master).partial or not master.numel():
                continue
            mine = self.placement[0 if 0 in self.stages else -1]
            other = self.placement[-1 if 0 in self.stages else 0]
            arriving = receive(torch.empty_like(master.grad), self.links[other, mine])
            leaving = send(master.grad.contiguous(), self.links[mine, other])
            theirs = arriving.wait()
            leaving.wait()
            master.grad = master.grad + theirs


# ---- demonstration ----

def parse_costs(texts, lists):
    """F=1 I=1.2 W=0.8 ... -> a dict. Raises ValueError for what is no cost, or of no action."""
    costs, kinds = {"F": 1.0, "I": 1.0, "W": 1.0}, {a.kind for line in lists for a in line}
    for text in texts:
        kind, _, number = text.partition("=")
        try:
            number = float(number)
        except ValueError:
            number = 0.0
        if kind not in ("F", "B", "I", "W", "FB") or not 0 < number < 1e6:
            raise ValueError(f"--costs {text}: write F=1 (or B, I, W, FB), above 0 and below 1e6")
        if (kind == "FB" and kind not in kinds) or (kind == "B" and not kinds & {"B", "FB"}):
            raise ValueError(f"--costs {text}: this schedule has no {kind}; leave it out")
        costs[kind] = number
    return costs


def show_schedule(name, p, m, virtual, costs, latency, svg=None):
    """Draw a schedule with what it costs; costs are of a whole rank's layers."""
    lists, placement = make_schedule(name, p, m, virtual)
    validate(lists, placement, m)
    v = len(placement) // p
    found = predict(lists, placement, {k: c / v for k, c in costs.items()}, latency)
    later = f", {v} stages a rank (small letters: the later ones)" if v > 1 else ""
    print(f"{name}, {p} ranks, {m} microbatches{later}")
    room = shutil.get_terminal_size((200, 24)).columns
    shortest = min(end - start for line in found["times"] for _, start, end in line)
    width = min(round(found["makespan"] / shortest * 3), max(room - 9, 20))
    print("\n".join(draw(found["times"], placement, width, sys.stdout.isatty()
                         and "NO_COLOR" not in os.environ)))
    print(f"time {found['makespan']:g}, of which idle {found['bubble']:.1%}; activations held, in "
          f"microbatches of a rank's layers: {', '.join(f'{n / v:g}' for n in found['peak'])}")
    if svg:
        with open(svg, "w") as file:
            file.write(draw_svg(found["times"], placement))
    return found


def run_beside_one_process(rank, n, name, m, virtual, overrides, worst):
    """m microbatches of a small model through the ranks, and in one process: loss and gradients.
    Returns the Pipeline."""
    from model import built, make_config
    layers = max(2 * n, len(place_stages(name, n, virtual)))
    config = make_config("tiny", [f"n_layers={layers}", "vocab_size=61", *overrides])
    model, alone = (built(config, dtype=torch.float64) for _ in range(2))
    torch.manual_seed(0)
    with torch.no_grad():  # norms as they start would hide errors of scale
        for p, q in zip(model.parameters(), alone.parameters()):
            p.copy_(q.add_(torch.randn_like(q), alpha=0.05))
    tokens, labels = torch.randint(61, (2, m, 2, 12))
    stages = split(model, Mesh(n, rank, pp=n), name, virtual)
    losses = stages.train(m, lambda stage, i, x: stages.forward(
        model, stage, x, tokens[i], labels[i], seed=0.01, balance_seed=0.1),
        lambda i: torch.empty(2, 12, config.dim, dtype=torch.float64), 0.01)
    stages.sum_tied_gradients(list(model.parameters()))
    total = 0.0
    for i in range(m):
        loss = alone.head_loss(alone(tokens[i], balance_seed=0.1), labels[i], 0.01)
        loss.backward(torch.full_like(loss, 0.01))
        total += loss.detach()
    what = " ".join([name, *overrides])
    worst[f"{what}: loss"] = difference(sum(losses), total) if stages.has_last else 0.0
    expected = dict(alone.named_parameters())
    worst[f"{what}: gradients"] = max(difference(p.grad, expected[key].grad)
                                      for key, p in model.named_parameters())
    return stages


def show(rank, n, names, m, virtual=None, *drawing):
    """Schedules drawn and run; what ran when, of the last one. drawing: costs, latency and file of
    show_schedule()."""
    worst = {}
    for name in names:
        v = virtual or usual_virtual(name)
        if rank == 0:
            show_schedule(name, n, m, v, *(drawing or (parse_costs([], []), 0.0)))
        for overrides in ([], ["tie_embeddings=true"]):
            stages = run_beside_one_process(rank, n, name, m, v, overrides, worst)
    begin = stages.timeline[0][1]
    everyone = [None] * n
    dist.all_gather_object(everyone, [(part, start - begin, end - begin)
                                      for part, start, end in stages.timeline])
    if rank == 0:
        print(f"{names[-1]}, when each action really ran (each rank from its first one on), "
              f"{max(line[-1][2] for line in everyone) * 1e3:.0f} ms")
        print("\n".join(draw(everyone, stages.placement, 120, False)))
        for r in range(n):
            print(f"rank {r} holds " + " and ".join(
                f"stage {s} (blocks {', '.join(stages.blocks[s])})"
                for s, at in enumerate(stages.placement) if at == r))
    return verdict(rank, worst)


# ---- benchmark ----

class Rest(torch.autograd.Function):
    """A layer that takes `seconds` for each of F, I and W and computes nothing: on few cores, real
    work of one rank would slow the others down."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x + 0 * weight

    @staticmethod
    def backward(ctx, grad):
        def compute():
            time.sleep(seconds)
            return torch.zeros_like(weight)
        weight, seconds = ctx.weight, ctx.seconds
        time.sleep(seconds)
        return grad.clone(), weight_gradient(weight, compute), None


def bench_rest(rank, n, m, seconds):
    """Measured over predicted time of every schedule, with stages that rest."""
    mesh = Mesh(n, rank, pp=n)
    for name in SCHEDULES:
        stages, weight = (Pipeline(mesh["pp"], name, usual_virtual(name), []),
                          torch.ones(1, requires_grad=True))
        for rest in (0.0, seconds):  # a process's first step is slow
            def forward(stage, i, x):
                out = Rest.apply(torch.zeros(1) if x is None else x, weight, rest)
                return out.sum() if stage == stages.last else out
            dist.barrier()
            start = time.perf_counter()
            stages.train(m, forward, lambda i: torch.empty(1), 1.0)
            dist.barrier()
            took = time.perf_counter() - start
        predicted = predict(*make_schedule(name, n, m, usual_virtual(name)),
                            dict.fromkeys("FIW", seconds))
        ideal = 3 * m * seconds * len(stages.placement) / n
        if rank == 0:
            print(f"{n} ranks, {m} microbatches, each F, I and W a rest of {seconds * 1e3:.0f} ms: "
                  f"{name:12} {took:.2f} s, {took / predicted['makespan']:.3f} x predicted, "
                  f"{took / ideal:.3f} x without a bubble", flush=True)


class TorchStage(nn.Module):
    """A stage of our model as torch.distributed.pipelining wants it."""

    def __init__(self, model, names, first, last, splits):
        super().__init__()
        self.blocks = nn.ModuleDict({name: model.blocks[name] for name in names})
        self.embed, self.norm = model.embed if first else None, model.norm if last else None
        self.head, self.whole, self.splits = model.head if last else None, [model], splits

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        positions = torch.arange(x.shape[1])
        table = self.whole[0].rope_table(positions, x.dtype)
        for block in self.blocks.values():
            x = block(x, table, None, 0.0, positions)
        x = x if self.norm is None else self.norm(x)
        return self.head(x) if self.splits and self.norm is not None else x


def split_loss(logits, labels):
    """torch goes through a stage's graph twice, for I and for W, which the chunked loss of model.py
    does not allow: these schedules get the plain one."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def torchs_schedule(name, model, stages, m):
    """torch's own schedule of that name over the same stages, or None where it has none."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules
    parts = [pipelining.PipelineStage(
        TorchStage(model, stages.blocks[s], s == 0, s == stages.last, name in SPLIT_BACKWARD), s,
        stages.last + 1, torch.device("cpu")) for s in stages.stages]
    kind = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved":
            "ScheduleInterleaved1F1B", "zb-h1": "ScheduleInterleavedZeroBubble",
            "zb-v": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV"}[name]
    kind = getattr(schedules, kind, None)
    return kind and kind(parts[0] if name in ("gpipe", "1f1b") else parts, m, loss_fn=(
        split_loss if name in SPLIT_BACKWARD else model.head_loss), scale_grads=False)


def bench(rank, n, rounds, m=8):
    """A step of a dense model by each schedule, beside torch.distributed.pipelining."""
    from model import built, make_config
    from train import keep_freed_memory
    keep_freed_memory()
    config = make_config("small-dense", ["dim=256", "inter_dim=704"])
    mesh, (tokens, labels) = Mesh(n, rank, pp=n), torch.randint(512, (2, m, 2, 64))
    for name in SCHEDULES:
        if name == "dualpipe-v" and m < 2 * n:
            continue
        model, theirs = built(config), built(config)
        stages = split(model, mesh, name, usual_virtual(name))
        schedule = torchs_schedule(name, theirs, stages, m)

        def step():
            stages.train(m, lambda stage, i, x: stages.forward(
                model, stage, x, tokens[i], labels[i]), lambda i: torch.empty(2, 64, 256), 1.0)
            model.zero_grad()

        def torchs_step():
            first = [tokens.flatten(0, 1)] if 0 in stages.stages else []
            target = labels.flatten(0, 1) if stages.has_last else None
            schedule.step(*first, target=target, losses=[] if stages.has_last else None)
            theirs.zero_grad()
        ratio, seconds = paired_ratio(step, torchs_step, rounds)
        if rank == 0:
            print(f"{n} ranks, {m} microbatches, {name:12} {seconds * 1e3:5.0f} ms a step, {ratio} "
                  "x torch.distributed.pipelining", flush=True)


def main():
    """Draw a schedule, run it on the ranks of torchrun, demonstrate all, or time them. Returns the
    exit code."""
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--schedule", choices=list(SCHEDULES), help="draw this one; under torchrun "
                       "run it")
    flags.add_argument("--pp", type=int, help="ranks: 4, or those of torchrun")
    flags.add_argument("--microbatches", type=int, default=8)
    flags.add_argument("--virtual-stages", type=int, default=None, help="stages a rank of "
                       "interleaved: 2")
    flags.add_argument("--costs", nargs="+", default=[], metavar="KIND=TIME", help="of F, I, W (B "
                       "if not I + W, FB if not F + B) of a whole rank's layers: 1 each")
    flags.add_argument("--latency", type=float, default=0.0, help="time of a message")
    flags.add_argument("--svg", metavar="FILE", help="write the drawing into a file too")
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    args = flags.parse_args()
    if args.bench:
        if len(sys.argv) > 2:
            flags.error("--bench takes no other flag")
        codes = [spawn(bench, n, 9) for n in (2, 4)] + [spawn(bench_rest, 4, 16, 0.05)]
        return max(codes)
    launched = "RANK" in os.environ
    if len(sys.argv) == 1 and not launched:
        return spawn(show, 2, list(SCHEDULES), 4)
    try:
        n = int(os.environ["WORLD_SIZE"]) if launched else 4 if args.pp is None else args.pp
        name, m = args.schedule, args.microbatches
        if name is None and launched:
            name = "1f1b"
        if name is None:
            raise ValueError(f"say which --schedule: {', '.join(SCHEDULES)}")
        virtual = usual_virtual(name) if args.virtual_stages is None else args.virtual_stages
        if args.pp not in (None, n):
            raise ValueError(f"--pp {args.pp}, and torchrun has started {n} ranks; leave --pp out")
        if min(n, m, virtual) < 1 or not 0 <= args.latency < 1e6:
            raise ValueError("--pp, --microbatches and --virtual-stages must be at least 1, "
                             "--latency at least 0 and below 1e6")
        if n * m * virtual > 10 ** 6:
            raise ValueError(f"{n} ranks x {m} microbatches x {virtual} stages are too many to "
                             "draw; use fewer microbatches")
        check(name, n, m, virtual)
        drawing = (parse_costs(args.costs, make_schedule(name, n, m, virtual)[0]), args.latency,
                   args.svg)
        if args.svg and os.environ.get("RANK", "0") == "0":
            open(args.svg, "a").close()  # raises now what it would raise behind the work
        if not launched:
            show_schedule(name, n, m, virtual, *drawing)
    except (ValueError, OSError) as error:
        return refuse("pipeline.py", error)
    return spawn(show, 0, [name], m, virtual, *drawing) if launched else 0


if __name__ == "__main__":
    sys.exit(main())
