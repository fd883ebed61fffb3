"""Fully sharded data parallelism: what ddp.py holds N times over is cut into N shards (ZeRO).

Bytes per parameter that a rank holds between steps, N ranks, c the compute type's bytes (2 in bf16,
4 in float32), gradients, master weights and AdamW's two moments in float32:

    level        parameters   gradients   master + moments     bf16
    0 (ddp.py)   c            4           12 (8 in float32)    18
    1            c            4           12/N                 6 + 12/N
    2            c            4/N         12/N                 2 + 16/N
    3            -            4/N         12/N                 16/N

(The ZeRO paper keeps gradients in 16 bits: 4 + 12/N, 2 + 14/N, 16/N. A sum in 16 bits stops
growing at 256 times one term.) What each level saves is one line of this file each: level 1 shards
what the optimizer needs (Unit.master), level 2 frees a block's whole gradients as soon as they are
reduced (complete), level 3 frees its parameters as soon as they are used (release).

Units are gathered together: embedding, each block, final norm with head. On each rank a unit is
one flat tensor: of each parameter the rank's stretch of rows, padded where rows do not divide
(stacked experts that do not divide are cut along each expert's rows).

    forward   gather unit i+1 ahead | compute i | free i       (level 3; 1 and 2: once a step)
    backward  gather unit i-1 ahead | compute i | free i, reduce-scatter its gradients

The last block and the head stay gathered between forward and backward, and the embedding's backward
needs no weight: level 3 gathers everything for forward and all other blocks again for backward.
Bytes a rank sends, M microbatches, P bytes of parameters, G of float32 gradients, f = (N-1)/N:

    1: (P + G) f     2: (P + M G) f     3: M (2 P - P_stay + G) f

P_stay = embedding, last block, norm and head. With replicas (HSDP: dp x fsdp) the shards of the
gradients are all-reduced over dp once a step, 2 G/N (dp-1)/dp bytes. --recompute gathers no more:
it repeats a block's forward after the gather for backward. Levels 2 and 3 reduce every microbatch.

At its peak level 3 holds, beside its shards, the last block and the head (or one larger block), one
layer on its way, and the gradients of one layer while those of the next are made.

Sources: ZeRO (arXiv 1910.02054), PyTorch FSDP (2304.11277), MiCS (2205.00119) for HSDP.
Course: 10:49:41 device meshes, DDP and FSDP; course C: ZeRO stages 1 to 3.

    python fsdp.py            every level on 3 ranks beside one process; where the memory goes; PASS
    python fsdp.py --bench    level 3 beside torch's fully_shard, 2 and 4 ranks
"""
import argparse
import collections
import contextlib
import dataclasses
import functools
import gc
import importlib
import math
import sys

import torch
from torch import nn

from collectives import (Cut, Label, Mesh, all_gather, all_reduce, difference, label_of, ledger,
                         local_part, on_grad_ready, paired_ratio, reduce_scatter, spawn, verdict)


@dataclasses.dataclass
class Slot:
    """Where a parameter lies in its unit: `size` numbers from `offset` in each rank's shard. It is
    cut along dimension `dim`, which lies first there: shape is the parameter's in that order."""
    name: str
    parameter: nn.Parameter
    shape: tuple
    offset: int
    size: int
    dim: int


class Unit:
    """Parameters that are gathered, freed and reduced together.

    master (S,) this rank's shard, float32 (float64 in float64): what the optimizer updates
    grad   (S,) the sum of its gradients; under level 1 there is none before the last microbatch
    whole  (N S,) the parameters in the compute type, each with its padding after its last row;
           under level 3 its storage is empty while they are not needed
    buffer (N, S) gradients on the way to being reduced, rank by rank
    """

    def __init__(self, named, axis, level, compute, wide, device):
        self.axis, self.slots, offset = axis, [], 0
        for name, p in named:
            dim = cut_dim(p, axis.size)
            shape = tuple(p.transpose(0, dim).shape)
            size = -(-shape[0] // axis.size) * math.prod(shape[1:])
            self.slots.append(Slot(name, p, shape, offset, size, dim))
            offset += size
        self.master = torch.zeros(offset, dtype=wide, device=device)
        self.grad = torch.zeros(offset, dtype=wide, device=device) if level > 1 else None
        self.whole = torch.zeros(axis.size * offset, dtype=compute, device=device)
        self.buffer = self.gathering = self.reducing = self.replicating = None
        self.present, self.reduced, self.summed = False, False, False
        self.touched = set()
        self.masters = [self.local(self.master, slot).requires_grad_() for slot in self.slots]
        for master, slot in zip(self.masters, self.slots):
            label = label_of(slot.parameter)
            master.label = Label(label.shape, (*label.cuts, Cut(axis.name, slot.dim, axis.size)),
                                 label.partial)

    def rows(self, slot):
        """(start, count) of this rank's rows of a parameter, without padding; maybe none."""
        part = -(-slot.shape[0] // self.axis.size)
        start = min(self.axis.rank * part, slot.shape[0])
        return start, min(part, slot.shape[0] - start)

    def local(self, flat, slot):
        """This rank's rows of a parameter in a flat shard."""
        shape = self.rows(slot)[1], *slot.shape[1:]
        part = flat.detach()[slot.offset:slot.offset + math.prod(shape)].view(shape)
        return part.transpose(0, slot.dim)

    def full(self, slot):
        """A parameter in `whole`, without padding."""
        start = self.axis.size * slot.offset
        whole = self.whole[start:start + math.prod(slot.shape)].view(slot.shape)
        return whole.transpose(0, slot.dim)

    def start_gather(self):
        shard = self.master.to(self.whole.dtype)  # the cast to the compute type
        self.gathering = all_gather(shard, self.axis, asynchronous=True)

    def finish_gather(self):
        """Put what the ranks sent, (N, S), parameter by parameter into `whole`."""
        gathered = self.gathering.wait().view(self.axis.size, -1)
        storage = self.whole.untyped_storage()
        storage.resize_(self.whole.numel() * self.whole.element_size())
        for slot in self.slots:
            start = self.axis.size * slot.offset
            self.whole[start:start + self.axis.size * slot.size].view(self.axis.size, -1).copy_(
                gathered[:, slot.offset:slot.offset + slot.size])
        self.gathering, self.present = None, True

    def release(self):
        self.whole.untyped_storage().resize_(0)
        self.present = False

    def place(self, slot):
        """(N, size): where a parameter's gradient lies in the buffer, which is made when needed."""
        if self.buffer is None:
            self.buffer = self.master.new_empty(self.axis.size, len(self.master))
        return self.buffer[:, slot.offset:slot.offset + slot.size]

    @torch.no_grad()
    def add_gradient(self, slot, parameter):
        """Put a complete gradient into its place in the buffer, or add it, and free it."""
        place, flat = self.place(slot), parameter.grad.transpose(0, slot.dim).flatten()
        ranks, rest = divmod(len(flat), max(slot.size, 1))  # whole shards, and numbers of the next
        pairs = [(place[:ranks], flat[:ranks * slot.size].view(ranks, -1))]
        if rest:
            pairs.append((place[ranks, :rest], flat[ranks * slot.size:]))
        if parameter in self.touched:
            for to, grad in pairs:
                to.add_(grad)
        else:
            if len(flat) < place.numel():
                place.zero_()  # the padding
            for to, grad in pairs:
                to.copy_(grad)
            self.touched.add(parameter)
        parameter.grad = None


class Boundary(torch.autograd.Function):
    """x, unchanged; in backward function() is called when the gradient comes by."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad, None


class Sharded:
    """`model` with parameters, gradients and optimizer state cut over mesh["shard"], by `level`.

    The model may be on the meta device: memory is only taken for shards (and for levels 1 and 2 the
    compute copies), which the caller fills through named_masters(), then calls refresh(). A model
    that has values keeps them. dtype is the compute type; masters are float32, or float64.
    Experts with axes of their own are sharded over efsdp, the ranks that hold the same experts.
    stages: of a pipeline rank, the names of each stage's layers ("embed", "blocks.3", "norm").
    Raises ValueError for another level.
    """

    def __init__(self, model, mesh, level, dtype=torch.float32, device="cpu", stages=None):
        self.level, self.dp, self.last, self.reducing = level, mesh["dp"], True, False
        self.piped = stages is not None
        wide = torch.promote_types(dtype, torch.float32)
        if level not in (1, 2, 3):
            raise ValueError(f"level {level}: use 1, 2 or 3; level 0 is ddp.Replicas")
        names = {p: name for name, p in model.named_parameters()}  # a tied weight comes once
        stages = stages or [["embed", *(f"blocks.{name}" for name in model.blocks), "norm"]]
        holders = collections.defaultdict(list)  # a parameter -> the modules' dicts it is in
        for module in model.modules():
            for key, p in module._parameters.items():
                holders[p].append((module._parameters, key))
        self.names = [name for stage in stages for name in stage]
        self.stages = [[self.names.index(name) for name in stage] for stage in stages]
        self.layers = []  # in the order of use, each a list of units
        for name in self.names:
            modules, tied = [model.get_submodule(name)], model.head is None
            if name == "norm" and not (tied and "embed" in self.names):
                modules.append(model.embed if tied else model.head)
            parameters = [p for m in modules for p in m.parameters()]
            self.layers.append([
                self._make_unit([(names[p], p) for p in parameters if _axis_name(p) == axis],
                                holders, mesh[axis], dtype, wide, device)
                for axis in ("shard", "efsdp") if any(_axis_name(p) == axis for p in parameters)])
        self.units = [unit for layer in self.layers for unit in layer]
        masters = {slot.name: master for unit in self.units
                   for slot, master in zip(unit.slots, unit.masters)}
        self.masters = [(name, masters[name]) for name in names.values()]
        # the head's matrix is used after the layers, by head_loss; tied, it is the embedding's
        self.head = [self.names.index(name) for name in ("norm", *["embed"] * (model.head is None))
                     if "norm" in self.names and name in self.names]
        self._wrap(model)
        self.refresh()

    def _make_unit(self, named, holders, axis, dtype, wide, device):
        """A Unit whose parameters are in the model's modules in place of those they held."""
        unit = Unit(named, axis, self.level, dtype, wide, device)
        for slot, master in zip(unit.slots, unit.masters):
            before = slot.parameter
            if not before.is_meta:
                master.data.copy_(before.data.narrow(slot.dim, *unit.rows(slot)))
            slot.parameter = nn.Parameter(torch.empty(0, dtype=dtype, device=device))
            # .data and not the view itself: writes into `whole` must not count as changes of a
            # weight that autograd has saved
            slot.parameter.data = unit.full(slot)
            for parameters, key in holders[before]:
                parameters[key] = slot.parameter
            on_grad_ready(slot.parameter, functools.partial(unit.add_gradient, slot))
        if self.level == 3:
            unit.release()
        return unit

    def named_masters(self):
        """(global name, this rank's rows in float32), as the model names them."""
        return self.masters

    def refresh(self):
        """The masters have changed: the compute copies are gathered when they are next used."""
        for unit in self.units:
            unit.present = False

    # -- forward and backward

    def _wrap(self, model):
        for index, name in enumerate(self.names):
            module = model.get_submodule(name)
            module.forward = functools.partial(self._forward, index, module.forward)
        head_loss = model.head_loss

        def loss(*args):
            """head_loss between the gather and the release of the head's matrix."""
            for index in self.head:
                self._need(index)
            result = head_loss(*args)
            if not torch.is_grad_enabled():
                self._release_all(range(len(self.layers)))
            elif self.piped and "embed" in self.names:
                self._release(self.names.index("embed"))
            return result
        model.head_loss = loss

    def _forward(self, index, plain, x, *args):
        """A layer's forward between the gather and the release of its parameters."""
        with_grad = torch.is_grad_enabled()
        if with_grad and x.is_floating_point():
            x = Boundary.apply(x, functools.partial(self._leave, index))
        self._need(index, index + 1)
        out = plain(x, *args)
        if with_grad and self.names[index] != "embed":  # its backward needs no weight
            out = Boundary.apply(out, lambda: self._need(index, index - 1, backward=True))
        kept = index in self.head and not (self.piped and self.names[index] == "embed")
        # between forward and backward of one microbatch a pipeline does those of others
        kept = kept or (with_grad and not self.piped and index == len(self.layers) - 2)
        if not kept:
            self._release(index)
        return out

    def _stage(self, index):
        """The indices of the stage that a layer belongs to."""
        return next(stage for stage in self.stages if index in stage)

    def _need(self, index, ahead=None, backward=False):
        """Have a layer's parameters here, and those of layer `ahead` of its stage on the way."""
        self._start(index)
        for unit in self.layers[index]:
            if not unit.present:
                unit.finish_gather()
        if ahead in self._stage(index) and not (backward and self.names[ahead] == "embed"):
            self._start(ahead)

    def _start(self, index):
        for unit in self.layers[index]:
            if not (unit.present or unit.gathering):
                unit.start_gather()

    def _release(self, index):
        if self.level == 3:
            for unit in self.layers[index]:
                unit.release()

    def _release_all(self, indices):
        for index in indices:
            self._release(index)

    def _leave(self, index):
        """The last thing in a layer's backward: no more use for its parameters, and its gradients
        are as complete as this microbatch makes them, since autograd adds them up before it goes on
        to the layer before. Layers behind it that this rank did not use go first: every rank
        reduces in the same order. Where weight gradients wait, so does this."""
        self._release(index)
        for later in reversed(self._stage(index)):
            if later >= index and self.reducing:
                self._reduce(later)

    # -- gradients

    @contextlib.contextmanager
    def microbatch(self, last, stage=0):
        """Context of one microbatch; `last`: the step's last one. Of a pipeline rank: of what ends
        one microbatch's gradients of the stage, all of its backward pass or the part that waited.
        """
        self.last, self.reducing = last, True
        layers = self.stages[stage]
        for index in layers:
            for unit in self.layers[index]:
                unit.reduced = False
        yield
        if not self.piped:
            self._release_all(layers)
        for index in reversed(layers):
            self._reduce(index)  # the embedding, and what had no backward
        self._complete()
        self.reducing = False

    @torch.no_grad()
    def _reduce(self, index):
        """Send a layer's gradients to their owners; level 1 waits for the last microbatch."""
        if self.level == 1 and not self.last:
            return
        for unit in self.layers[index]:
            if unit.reduced:
                continue
            for slot in unit.slots:
                if slot.parameter not in unit.touched:
                    unit.place(slot).zero_()
            self._complete()  # one reduction at a time: no more than two buffers exist
            unit.reducing = reduce_scatter(unit.buffer.view(-1), unit.axis, asynchronous=True)
            unit.reduced = True
            unit.touched.clear()

    @torch.no_grad()
    def _complete(self):
        """Add what was reduced to the shard's gradient; level 1 alone keeps the whole buffer."""
        for unit in self.units:
            if unit.reducing is None:
                continue
            total = unit.reducing.wait()
            if self.level == 1:
                unit.grad = total
            else:
                unit.grad.add_(total) if unit.summed else unit.grad.copy_(total)
                unit.buffer = None
            unit.reducing, unit.summed = None, True
            if self.last and self.dp.size > 1:
                unit.replicating = all_reduce(unit.grad, self.dp, asynchronous=True)

    def finish(self):
        """After the step's last microbatch: the masters' .grad become the sums."""
        for unit in self.units:
            if unit.replicating is not None:
                unit.replicating.wait()
            unit.replicating, unit.summed = None, False
            for slot, master in zip(unit.slots, unit.masters):
                master.grad = unit.local(unit.grad, slot)
            if self.level == 1:
                unit.grad = None


def _axis_name(parameter):
    """The axis over which a parameter is sharded: the ranks that hold the same part of it."""
    return "efsdp" if "edata" in label_of(parameter).partial else "shard"


def cut_dim(parameter, n):
    """The dimension that is cut into n shards: rows; the one after it for stacked experts whose
    number does not divide, or some ranks would have an expert more than others, or none."""
    return int(parameter.dim() == 3 and parameter.shape[0] % n > 0)


# ---- how many bytes ----

def bytes_held(numbers, shard, owned, level, compute_bytes, n):
    """Bytes between steps of `numbers` parameters trained with AdamW: (parameters and masters,
    gradients, moments). This rank's shard is `shard` numbers, padding included, `owned` without."""
    if level == 0:
        masters = 0 if compute_bytes >= 4 else 4
        wide = max(compute_bytes, 4)
        return numbers * (compute_bytes + masters), numbers * wide, 2 * numbers * wide
    wide, whole = max(compute_bytes, 4), n * shard
    return ((whole * compute_bytes if level < 3 else 0) + shard * wide,
            (whole if level == 1 else shard) * wide, 2 * owned * wide)


def bytes_sent(layer_shards, level, compute_bytes, n, microbatches):
    """Bytes that a rank sends a step: layer_shards are the shards' sizes, embedding first, head
    last. The sum of the module docstring's terms."""
    wide, total = max(compute_bytes, 4), sum(layer_shards)
    gathers = {1: total, 2: total, 3: microbatches * (
        2 * total - layer_shards[0] - layer_shards[-2] - layer_shards[-1])}[level]
    reductions = total * (1 if level == 1 else microbatches)
    return (n - 1) * (gathers * compute_bytes + reductions * wide)


def pipeline_gathers(stages, actions, tied):
    """How often level 3 gathers each layer of a pipeline rank in a step: name -> times.

    stages: stage -> names of its layers; actions: [(kind, stage)] in order. A block is gathered for
    F, and for I or B; the embedding for F alone; norm and head stay from F to the next backward. A
    tied matrix of a rank that has both ends is gathered for the loss too.
    """
    times, head_here = {name: 0 for names in stages.values() for name in names}, False
    for kind, stage in actions:
        if kind == "W":
            continue
        for name in stages[stage]:
            if name != "norm":
                times[name] += kind == "F" or name != "embed"
                continue
            times[name] += not head_here
            head_here = kind == "F"
            if kind == "F" and tied and "embed" in times:
                times["embed"] += 1
    return times


def live_bytes(known):
    """Bytes of tensor storages that are alive in this process, by kind; known: kind -> tensors.
    What belongs to none is "activations and others"."""
    kinds = {t.untyped_storage().data_ptr(): kind for kind, ts in known.items() for t in ts}
    sizes = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and item.device.type != "meta":
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    totals = dict.fromkeys([*known, "activations and others"], 0)
    for pointer, size in sizes.items():
        totals[kinds.get(pointer, "activations and others")] += size
    return totals


# ---- demonstration ----

def train_steps(model, reducer, rows, steps=2):
    """SGD steps of two microbatches on this rank's rows (steps, 2, b, s) of token ids; returns the
    summed gradients of the last step, name -> this rank's part."""
    masters = dict(reducer.named_masters() if reducer else model.named_parameters())
    for batch in rows:
        for i, tokens in enumerate(batch):
            with reducer.microbatch(last=i == 1) if reducer else contextlib.nullcontext():
                hidden = model(tokens, balance_seed=0.1)
                model.head_loss(hidden, tokens.roll(-1, 1), 0.01).backward(torch.tensor(0.01))
        if reducer:
            reducer.finish()
        grads = {name: master.grad.clone() for name, master in masters.items()}
        with torch.no_grad():
            for master in masters.values():
                master.sub_(0.1 * master.grad)
                master.grad = None
        if reducer:
            reducer.refresh()
    return grads


def check_level(level, mesh, rows, alone, worst):
    """Gradients and weights at one level beside `alone`: (name -> gradient, name -> weight)."""
    from model import built, make_config
    model = built(make_config("tiny", ["n_layers=3", "vocab_size=61"]), dtype=torch.float64)
    sharded = Sharded(model, mesh, level, torch.float64)
    ledger.clear()
    grads = train_steps(model, sharded, rows)
    sent = ledger.by_axis().get("shard", 0) // 2
    masters = dict(sharded.named_masters())
    predicted = bytes_sent([len(u.master) for u in sharded.units], level, 8, mesh["shard"].size, 2)
    worst[f"level {level}: bytes sent are the formula's"] = float(sent != predicted)
    for kind, found, expected in (("gradients", grads, alone[0]),
                                  ("weights", masters, alone[1])):
        worst[f"level {level}: {kind} of {len(found)} parameters"] = max(
            difference(part, local_part(expected[name], label_of(masters[name]), mesh))
            for name, part in found.items() if len(part))
    return f"level {level} sent {sent:,} bytes a step"


def measure_memory(level, rank, n):
    """A step in bf16 with AdamW: (bytes by the formula, bytes found alive), between steps, and what
    activations took at the end of forward."""
    import optim
    from ddp import Replicas
    from model import built, make_config
    config = make_config("tiny")
    model, mesh = built(config), Mesh(n, rank, fsdp=n)
    if level:
        reducer = owner = Sharded(model, mesh, level, torch.bfloat16)
        shard = sum(len(unit.master) for unit in owner.units)
    else:
        owner = optim.MixedPrecision(model, torch.bfloat16, accumulate=False)
        reducer, shard = Replicas(model, mesh["data"], owner.copies), 0
    numbers = sum(math.prod(label_of(m).shape) for _, m in owner.named_masters())
    optimizer = optim.Optimizer("adamw", optim.parameter_groups(owner.named_masters(), 0.1), 1e-3)
    tokens, known = torch.randint(256, (2, 128)), {}

    def alive():
        known["parameters"] = [*model.parameters(), *(m for _, m in owner.named_masters())]
        known["gradients"] = ([u.grad for u in owner.units if u.grad is not None]
                              + [u.buffer for u in owner.units if u.buffer is not None]
                              if level else [b.flat for b in reducer.buckets])
        known["moments"] = [t for state in optimizer.state.values() for k, t in state.items()
                            if k != "step"]
        return live_bytes(known)
    for _ in range(2):
        if not level:
            reducer.start(1)
        with reducer.microbatch(last=True) if level else contextlib.nullcontext():
            before = alive()["activations and others"]
            loss = model.head_loss(model(tokens), tokens, 1.0)
            activations = alive()["activations and others"] - before
            loss.backward()
        reducer.finish()
        optimizer.step()
        optimizer.zero_grad()
        owner.refresh()
        del loss
    found = alive()
    owned = sum(master.numel() for _, master in owner.named_masters())
    formula = bytes_held(numbers, shard, owned, level, 2, n)
    return formula, [found[k] for k in ("parameters", "gradients", "moments")], activations, numbers


def show(rank, n):
    """Levels 1 to 3 beside one process, then the table of where the memory goes."""
    from model import built, make_config
    torch.manual_seed(0)
    rows = torch.randint(61, (2, 2, n, 2, 16))
    config = make_config("tiny", ["n_layers=3", "vocab_size=61"])
    alone = built(config, dtype=torch.float64)
    grads = train_steps(alone, None, rows.flatten(2, 3))
    reference = grads, {name: p.detach() for name, p in alone.named_parameters()}
    worst, lines = {}, []
    for level in (1, 2, 3):
        mesh = Mesh(n, rank, fsdp=n)
        lines.append(check_level(level, mesh, rows[:, :, rank], reference, worst))
    if rank == 0:
        print("\n".join(lines))
        print(f"where the memory goes: tiny in bf16, bytes per parameter on each of {n} ranks")
        print("level   ZeRO's formula     ours   measured   parameters  gradients  moments"
              "   activations, KB")
    for level in range(4):
        formula, found, activations, numbers = measure_memory(level, rank, n)
        paper = {0: 16, 1: 4 + 12 / n, 2: 2 + 14 / n, 3: 16 / n}[level]
        worst[f"level {level}: memory is the formula's within 5 %"] = max(
            0.0, abs(sum(found) / sum(formula) - 1) - 0.05)
        if rank == 0:
            each = [size / numbers for size in found]
            print(f"{level:5}{paper:17.2f}{sum(formula) / numbers:9.2f}{sum(each):11.2f}"
                  f"{each[0]:13.2f}{each[1]:11.2f}{each[2]:9.2f}{activations / 1e3:18,.0f}")
    return verdict(rank, worst, 1e-10)


def bench(rank, n, rounds):
    """Whole steps of a dense model of 10 M parameters beside torch's fully_shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from ddp import bench_step
    from model import built, make_config
    from train import keep_freed_memory
    keep_freed_memory()
    config = make_config("small-dense", ["n_layers=3", "n_dense_layers=3"])
    ours, theirs = built(config), built(config)
    sharded = Sharded(ours, Mesh(n, rank, fsdp=n), 3)
    mesh = init_device_mesh("cpu", (n,))
    for block in theirs.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    tokens = torch.randint(512, (2, 64))
    masters = [m for _, m in sharded.named_masters()]

    def step():
        bench_step(ours, tokens, masters, sharded)
        sharded.refresh()
    ratio, seconds = paired_ratio(
        step, lambda: bench_step(theirs, tokens, list(theirs.parameters())), rounds)
    if rank == 0:
        numbers = sum(p.numel() for p in built(config).parameters())
        print(f"{n} ranks, {numbers / 1e6:.1f} M parameters: {seconds * 1e3:.0f} ms a step, "
              f"{ratio} x torch's fully_shard", flush=True)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    if flags.parse_args().bench:
        sys.exit(max(spawn(bench, n, 9) for n in (2, 4)))
    for name in ("torch._dynamo", "model", "optim", "ddp"):  # AdamW wants the first
        importlib.import_module(name)  # once here, not by every forked rank
    gc.freeze()  # live_bytes() need not look through what was here before the first tensor
    sys.exit(spawn(show, 3))
