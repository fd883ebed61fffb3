"""Planning: will it fit, how fast will it be, which layout, how many tokens - without one GPU.

    memory     parameters, gradients, optimizer   fsdp.bytes_held of this rank's units
               activations                        what each block keeps, x microbatches in flight
    traffic    by axis and operation              bytes_sent of the technique files
    time       a block's forward                  products / (peak x PRODUCTS)
                                                  + bytes touched / (memory x MEMORY)
                                                  + bytes sent / (link x NETWORK)
    step       the schedule, simulated            pipeline.predict, each stage with its own costs
               gradients, parameters, optimizer   what of them no compute hides

For the models that quintet builds nothing is described a second time: parameters and their cuts are
read from the model on the meta device as the techniques rewrite it, schedules from pipeline.py,
volumes from formulas that the tests hold against the ledger. Only what a block keeps for backward
is written out here. Older families are rows of a table with the formulas of their papers. Six
constants, the same for every model and GPU, turn counts into seconds.

Sources: ZeRO (arXiv 1910.02054), Megatron-LM (2104.04473), activation recomputation (2205.05198),
zero bubble (2401.10241), DeepSeek-V3 (2412.19437, 2505.09343), Llama 2 (2307.09288) and 3
(2407.21783), GPT-3 (2005.14165), OPT (2205.01068), BLOOM (2211.05100), GPT-NeoX (2204.06745), PaLM
(2204.02311), Gopher (2112.11446), Kaplan (2001.08361), Chinchilla (2203.15556; re-fit 2404.10102),
fine-grained MoE (2402.07871). Course C: "where did all the memory go?", the models that it names.

    python plan.py                   plans beside steps that really run, on 2 ranks; prints PASS
    python plan.py deepseek-v3 --gpus 2048 --pp 16 --ep 64 --fsdp 128 [--explain]
    python plan.py llama3-70b --gpus 256 --search         the best three layouts that fit, and why
    python plan.py published         predicted beside published: memory, step times, scaling laws
    python plan.py scaling --flops 5.76e23
"""
import argparse
import collections
import dataclasses
import functools
import heapq
import itertools
import json
import math
import operator
import os
import sys
import unittest.mock

import torch

import ddp
import expert_parallel
import fsdp
import pipeline
import ring_attention
import tensor_parallel
import train
from collectives import MeshOnPaper, coordinates, divisors, label_of, one_of, spawn, verdict
from model import DTYPES, PRESETS, Block, Transformer, flops_per_token, make_config, nearest
from train import check_layout, check_model, check_schedule, choice, layout_of, switch, value

# Flags of train.py that a plan takes too, with the same meaning and defaults
PLAN_FLAGS = {flag[2:].replace("-", "_"): options for section in train.FLAGS.values()
              for flag, options in section
              if section is train.FLAGS["layout"] or flag in (
                  "--seq-len", "--batch-size", "--micro-batch-size", "--dtype", "--recompute",
                  "--optimizer")}


# ---- hardware, and the six constants ----

# Dense TFLOP/s of the data sheets by bytes of a number; 4 bytes without TF32, which torch does not
# use unless told to
PEAKS = {2: {**train.GPU_PEAKS, "TPU v4": 275},
         4: {"H100 PCIe": 51, "H100 NVL": 60, "H100": 67, "H200": 67, "H800": 67, "A100": 19.5,
             "B200": 75, "L40S": 91.6, "MI300X": 163.4, "MI325X": 163.4, "MI355X": 157.3}}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Data-sheet numbers: memory in GB and its TB/s; GB/s each way of one GPU to those of its node
    (`node_size` of them) and to other nodes. `name` is in the device's name."""
    name: str
    memory: float
    bandwidth: float
    inside: float
    outside: float
    node_size: int = 8


GPUS = {
    "h100-pcie": Gpu("H100 PCIe", 80, 2.0, 64, 50),
    "h100-nvl": Gpu("H100 NVL", 94, 3.9, 64, 50),
    "h100": Gpu("H100", 80, 3.35, 450, 50), "h200": Gpu("H200", 141, 4.8, 450, 50),
    "h800": Gpu("H800", 80, 3.35, 200, 50), "a100": Gpu("A100", 80, 2.04, 300, 25),
    "b200": Gpu("B200", 180, 8.0, 900, 50), "l40s": Gpu("L40S", 48, 0.86, 32, 25),
    "mi300x": Gpu("MI300X", 192, 5.3, 448, 50), "mi325x": Gpu("MI325X", 256, 6.0, 448, 50),
    "mi355x": Gpu("MI355X", 288, 8.0, 537, 50),
    "tpu-v4": Gpu("TPU v4", 32, 1.2, 300, 300, 3072)}

PRODUCTS = 0.74  # of the peak: what large matrix products reach
SCORES = 0.65    # of the peak: attention's two products inside a fused kernel
MEMORY = 0.80    # of the memory's bandwidth
TOUCHES = 2.4    # times that element-wise work reads or writes a byte which is kept, forward
NETWORK = 0.70   # of a link's bandwidth
OVERLAP = 0.70   # of traffic that can run under compute, what does

FREE = 0.9  # of a GPU's memory; the rest is CUDA's, the network's, and what lies between tensors


# ---- older families ----

@dataclasses.dataclass(frozen=True)
class Shape:
    """A dense model of an older family. biases: of all linear layers ("mlp": there alone);
    norms: vectors a block, 2 a LayerNorm; extra: further numbers a block, in units of dim squared;
    positions: rows of a learned table; end: vectors of norms outside the blocks; parallel: the MLP
    reads what attention does, and both are added up together, with half the all-reduces of tp."""
    n_layers: int
    dim: int
    n_heads: int
    vocab_size: int
    seq_len: int = 2048
    inter_dim: int = 0
    head_dim: int = 0
    n_kv_heads: int = 0
    gated: bool = False
    biases: object = True
    norms: int = 4
    extra: int = 0
    positions: int = 0
    tied: bool = True
    end: int = 2
    parallel: bool = False
    ffn = property(lambda self: self.inter_dim or 4 * self.dim)
    heads = property(lambda self: self.n_heads * (self.head_dim or self.dim // self.n_heads))
    kv = property(lambda self: self.heads * (self.n_kv_heads or self.n_heads) // self.n_heads)

    def matrices(self):
        """Matrix numbers of a block: 12 dim^2 for GPT, and what its family has beside it."""
        return (2 * self.dim * (self.heads + self.kv) + (2 + self.gated) * self.dim * self.ffn
                + self.extra * self.dim ** 2)

    def block(self):
        """All numbers of a block."""
        mlp, attention = self.ffn + self.dim, self.heads + 2 * self.kv + self.dim
        biases = {True: mlp + attention, "mlp": mlp, False: 0}[self.biases]
        return self.matrices() + biases + self.norms * self.dim

    def numbers(self, kinds):
        """All numbers of layers of these kinds: "embed", "dense", "norm" (with the head)."""
        head = 0 if self.tied and "embed" in kinds else self.vocab_size * self.dim
        each = {"embed": (self.vocab_size + self.positions) * self.dim, "dense": self.block(),
                "norm": self.end * self.dim + head}
        return sum(each[kind] for kind in kinds)

    def parameters(self):
        return self.numbers(["embed", *["dense"] * self.n_layers, "norm"])


def _gpt(n_layers, dim, n_heads, vocab_size=50257, positions=2048):
    return Shape(n_layers, dim, n_heads, vocab_size, positions=positions)


def _llama2(n_layers, dim, n_heads, n_kv_heads, inter_dim):
    return Shape(n_layers, dim, n_heads, 32000, 4096, inter_dim, 0, n_kv_heads, True, False, 2,
                 tied=False, end=1)


FAMILIES = {
    **{f"gpt3-{size}": _gpt(*shape) for size, *shape in (
        ("175b", 96, 12288, 96), ("13b", 40, 5120, 40), ("6.7b", 32, 4096, 32),
        ("2.7b", 32, 2560, 32), ("1.3b", 24, 2048, 16), ("760m", 24, 1536, 16),
        ("350m", 24, 1024, 16), ("125m", 12, 768, 12))},
    "opt-175b": _gpt(96, 12288, 96, 50272, 2050), "mt-nlg-530b": _gpt(105, 20480, 128, 51200),
    # ALiBi has no parameters; a LayerNorm behind the embedding has two vectors
    "bloom-176b": Shape(70, 14336, 112, 250880, end=4),
    "gpt-j-6b": Shape(28, 4096, 16, 50400, biases="mlp", norms=2, tied=False, parallel=True),
    "gpt-neox-20b": Shape(44, 6144, 64, 50432, tied=False, parallel=True),
    # one norm without bias for both halves of a block, a single key/value head of 256
    "palm-540b": Shape(118, 18432, 48, 256000, 2048, 0, 256, 1, True, False, 1, end=1,
                       parallel=True),
    # RMSNorm, and a projection of relative positions in every block
    "gopher-280b": Shape(80, 16384, 128, 32000, biases=False, norms=2, extra=1, end=1),
    "chinchilla-70b": Shape(80, 8192, 64, 32000, biases=False, norms=2, extra=1, end=1),
    "llama2-7b": _llama2(32, 4096, 32, 32, 11008), "llama2-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28672),
    **{f"megatron-{size}": _gpt(*shape, 51200) for size, *shape in (  # its ten sizes, and two more
        ("1.7b", 24, 2304, 24), ("3.6b", 30, 3072, 32), ("7.5b", 36, 4096, 32),
        ("18.4b", 40, 6144, 48), ("39.1b", 48, 8192, 64), ("76.1b", 60, 10240, 80),
        ("145.6b", 80, 12288, 96), ("310.1b", 96, 16384, 128), ("529.6b", 105, 20480, 128),
        ("1t", 128, 25600, 160), ("22b", 48, 6144, 64), ("175b", 96, 12288, 96))}}


def kept_by_shape(plan, kind, sequences):
    """2205.05198, equations 1 to 6: s b h (34 + 5 a s / h) in 16 bits, of which tensor parallelism
    cuts all but 10, sequence parallelism those too. The 34 is 16 numbers and the bytes of two
    dropout masks, the 5 two numbers and one. Of the 16 four are q, k, v and what they give, fewer
    with fewer key/value heads; eight the MLP's, twice its width over h, four times if it is gated;
    four norms' inputs and outputs, which both halves of a parallel block share. Returns
    {what: bytes}, and those that wait for W (2401.10241, table 1: 32 of 34)."""
    c, a, t, w = plan.config, plan.args, plan.args.tp, plan.width
    sbh = a.seq_len * sequences * c.dim
    whole = 1 if "no_sp" in plan.ways else t
    if kind == "embed":
        return {"dropout mask": sbh / t}, 0
    if kind == "norm":  # section 4.3: last norm and head's input, logits in float32
        logits = plan.wide * a.seq_len * sequences * c.vocab_size / t
        return {"last norm, head": sbh * 2 * w / whole, "logits": logits}, 0
    if a.recompute == "full":
        return {"input": sbh * w / whole}, 0
    numbers = (2 * (c.heads + c.kv) + (2 + 2 * c.gated) * c.ffn) / c.dim
    shared = (1 if c.norms == 4 else 2) * c.parallel
    found = {"linear layers": sbh * numbers * w / t,
             "norms, inputs, dropout": sbh * ((4 - shared) * w + 2) / whole}
    if a.recompute == "none":
        found["scores"] = (2 * w + 1) * c.n_heads * a.seq_len ** 2 * sequences / t
    return found, sum(found.values()) * 16 * w / (16 * w + 2)


def sent_by_shape(plan, kinds, sequences, repeated):
    """Megatron-LM: two all-reduces of s b h a block forward and two backward (2104.04473, section
    3.2), one for the embedding, one for the head's input; a repeated forward's once more."""
    a, c = plan.args, plan.config
    whole = 2 * (a.tp - 1) / a.tp * sequences * a.seq_len * c.dim * plan.width
    each = whole * (6 if repeated else 4) / (2 if c.parallel else 1)
    return {("tp", "blocks"): kinds.count("dense") * each,
            ("tp", "embedding, head"): whole * (("embed" in kinds) + ("norm" in kinds))}


def data_sent_by_shape(plan, mesh):
    """The ZeRO paper's volumes (section 7): 2 Psi (N-1)/N, under level 3 3 Psi a microbatch, with
    gradients in 16 bits as these systems had them; shards' gradients are all-reduced over dp."""
    a, m, whole = plan.args, len(plan.microbatches), plan.width * parameters_of(
        plan, mesh["pp"].rank)
    data, n, dp = (mesh[axis].size for axis in ("data", "shard", "dp"))
    if a.zero == 0:
        return {("data", "gradients"): 2 * whole * (data - 1) / data}
    each = whole * (n - 1) / n
    return {("shard", "parameters"): 2 * each * m if a.zero == 3 else each,
            ("shard", "gradients"): each * (m if a.zero > 1 else 1),
            ("dp", "gradients"): 2 * whole / n * (dp - 1) / dp}


# ---- a planned run ----

schedule_of = functools.lru_cache(64)(pipeline.make_schedule)


class Plan:
    """A model in a layout on a GPU; args: the flags, checked and filled in.

    ways: how a published system differs from quintet: "no_sp" (tensor parallelism without sequence
    parallelism), "late" (gradients are reduced after backward), "flat" (gathers as if each GPU had
    its own link to other nodes alone), "hidden" (an axis whose traffic runs under other work),
    "copies" (ranks or nodes that a token is sent to).
    """

    def __init__(self, name, config, args, gpu, ways):
        self.name, self.config, self.args, self.gpu, self.ways = name, config, args, gpu, ways
        self.old = isinstance(config, Shape)
        self.world_size = args.pp * args.dp * args.fsdp * args.cp * args.tp
        self.width = DTYPES[args.dtype].itemsize  # of a number that is computed with, in bytes
        self.wide = max(self.width, 4)            # of one that sums up
        self.peak = PEAKS.get(self.width, {}).get(gpu.name)  # TFLOP/s, None where not known
        self.tokens = args.batch_size * args.seq_len
        rows, size = args.batch_size // (args.dp * args.fsdp), args.micro_batch_size
        if rows > 10000 * size:
            raise ValueError(f"--batch-size {args.batch_size:,} is {-(-rows // size):,} "
                             "microbatches a rank; a plan takes at most 10,000: more of "
                             "--micro-batch-size, dp or fsdp, or a smaller batch")
        # the sizes, in sequences, of a rank's microbatches of a step; the last may be smaller
        self.microbatches = [min(size, rows - first) for first in range(0, rows, size)]
        self.placement = pipeline.place_stages(args.pp_schedule, args.pp, args.virtual_stages,
                                               config.n_layers)  # stage -> pipeline rank
        self.stages = kinds_of_stages(config, len(self.placement))
        self.mesh = functools.cache(lambda rank=0: MeshOnPaper(self.world_size, rank,
                                                               **layout_of(args)))

    def stage_mesh(self, pp_rank):
        """The mesh of the first rank of a pipeline rank's: it has the largest parts of all."""
        return self.mesh(pp_rank * (self.world_size // self.args.pp))

    def but(self, **flags):
        """The same plan with other flags."""
        args = argparse.Namespace(**{**vars(self.args), **flags})
        return Plan(self.name, self.config, args, self.gpu, self.ways)

    def schedule(self, m):
        """(actions of every pipeline rank, placement) of m microbatches."""
        return schedule_of(self.args.pp_schedule, self.args.pp, m, self.args.virtual_stages)

    def actions(self, pp_rank, m):
        """A pipeline rank's single actions."""
        return pipeline.singles(self.schedule(m)[0][pp_rank])



def config_of(name, override=()):
    """The ModelConfig or Shape of that name. Raises ValueError for one that is not known."""
    if name not in FAMILIES and name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; " + nearest(name, [*PRESETS, *FAMILIES]))
    return FAMILIES.get(name) or make_config(name, list(override))


def make_plan(name, gpus, gpu="h100", override=(), ways=None, **flags):
    """A Plan from names and flags as the command line has them. Raises ValueError as check_layout()
    and check_model() do, and for what an older family has not."""
    config = config_of(name, override)
    args = argparse.Namespace(**{**{flag: options.get("default") for flag, options
                                    in PLAN_FLAGS.items()}, "dtype": "bf16", **flags})
    check_layout(args, gpus)
    if name in PRESETS:
        check_model(args, config)
    else:
        for flag, wrong in (("--override", override), ("--cp", args.cp > 1), ("--ep", args.ep > 1),
                            ("--etp", args.etp != args.tp)):
            if wrong:
                raise ValueError(f"{flag}: {name} is a row of a table, dense and without cp; leave "
                                 f"{flag} out or use a model that quintet builds")
        if config.positions and args.seq_len > config.seq_len:
            raise ValueError(f"--seq-len {args.seq_len} is longer than the {config.seq_len} "
                             f"positions that {name} has learned; use at most that")
        if config.n_heads % args.tp:
            raise ValueError(f"--tp {args.tp} does not divide the {config.n_heads} heads of "
                             f"{name}; use {one_of(divisors(math.gcd(config.n_heads, gpus)))}")
        check_schedule(args, config)
    return Plan(name, config, args, GPUS[gpu], ways or {})


@functools.lru_cache(4096)
def kinds_of_stages(config, stages):
    """For every stage the kinds of its layers in order: "embed", "dense", "moe", "norm" (with the
    head). Blocks are divided as pipeline.split divides them."""
    moe = 0 if isinstance(config, Shape) else config.n_moe_layers()
    kinds = ["dense"] * (config.n_layers - moe) + ["moe"] * moe
    if isinstance(config, Shape):
        costs = {"dense": config.matrices()}
    else:
        with torch.device("meta"):
            costs = {kind: pipeline.block_cost(Block(config, kinds.index(kind)))
                     for kind in set(kinds)}
    sizes = pipeline.stage_sizes(config, [costs[kind] for kind in kinds], stages)
    blocks = iter(kinds)
    return [(*["embed"] * (stage == 0), *itertools.islice(blocks, size),
             *["norm"] * (stage == stages - 1)) for stage, size in enumerate(sizes)]


def kinds_of(plan, pp_rank):
    """The kinds of all layers of a pipeline rank."""
    return [kind for kinds, at in zip(plan.stages, plan.placement) if at == pp_rank
            for kind in kinds]


# ---- what a rank holds ----

@functools.lru_cache(4096)
def cut_model(config, tp, ep, etp):
    """The model on the meta device with one block of each kind, cut as the techniques cut it along
    these Axis: kind of a layer ("embed", "dense", "moe", "norm", "head") -> [(name, parameter)]."""
    mesh, moe = MeshOnPaper(), config.n_moe_layers()
    mesh.axes.update({"tp": tp, "ep": ep, "etp": etp})
    kinds = ["dense"] * (config.n_layers > moe) + ["moe"] * (moe > 0)
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(config, n_layers=len(kinds),
                                                n_dense_layers=int("dense" in kinds)))
    tensor_parallel.parallelize(model, mesh)
    expert_parallel.parallelize(model, mesh)
    modules = {"embed": model.embed, "norm": model.norm, "head": model.head,
               **dict(zip(kinds, model.blocks.values()))}
    return {kind: tuple((f"{kind}.{name}", p) for name, p in module.named_parameters())
            for kind, module in modules.items() if module}


def cut_here(plan, mesh):
    """cut_model() as this rank has it."""
    return cut_model(plan.config, mesh["tp"], mesh["ep"], mesh["etp"])


def held_layers(plan, mesh):
    """[(stage, kind, [(name, parameter on the meta device)])] of one rank, in the order of use."""
    cut, found = cut_here(plan, mesh), []
    stages = [s for s, at in enumerate(plan.placement) if at == mesh["pp"].rank]
    for stage in stages:
        for kind in plan.stages[stage]:
            named = cut[kind]
            if kind == "norm" and not plan.config.tie_embeddings:
                named += cut["head"]
            elif kind == "norm" and 0 not in stages:  # the tied matrix once more
                named += cut["embed"]
            found.append((stage, kind, named))
    return found


@functools.lru_cache(65536)
def make_units(named, shard, efsdp, level, dtype):
    """The units of one layer over these Axis, as fsdp.Sharded makes them, on the meta device."""
    parts = [(axis, [(name, p) for name, p in named if fsdp._axis_name(p) == axis.name])
             for axis in (shard, efsdp)]
    return [fsdp.Unit(part, axis, level, dtype, torch.promote_types(dtype, torch.float32), "meta")
            for axis, part in parts if part]


def units_of(plan, mesh, named):
    """The units of one layer on this rank."""
    return make_units(named, mesh["shard"], mesh["efsdp"], plan.args.zero, DTYPES[plan.args.dtype])


def masters_of(plan, mesh, named):
    """The tensors of one layer that this rank's optimizer updates."""
    if not plan.args.zero:
        return [p for _, p in named]
    return [m for unit in units_of(plan, mesh, named) for m in unit.masters]


def held_bytes(plan, mesh):
    """Bytes between steps of one rank: {"parameters", "gradients", "optimizer"}; parameters with
    their float32 masters."""
    a, totals = plan.args, [0, 0, 0]
    if plan.old:
        count = parameters_of(plan, mesh["pp"].rank)
        shard = count / mesh["shard"].size
        totals = fsdp.bytes_held(count, shard, shard, a.zero, plan.width, mesh["shard"].size)
    else:
        layers = held_layers(plan, mesh)
        counts = collections.Counter(kind for _, kind, _ in layers)
        for kind, named in {kind: named for _, kind, named in layers}.items():
            numbers = sum(p.numel() for _, p in named)
            parts = [(0, len(unit.master), sum(m.numel() for m in unit.masters), unit.axis.size)
                     for unit in units_of(plan, mesh, named)] if a.zero else [(numbers, 0, 0, 1)]
            for *sizes, n in parts:
                held = fsdp.bytes_held(*sizes, a.zero, plan.width, n)
                totals = [total + counts[kind] * part for total, part in zip(totals, held)]
    return {"parameters": totals[0], "gradients": totals[1],
            "optimizer": totals[2] * (a.optimizer == "adamw")}


def parameters_of(plan, pp_rank):
    """Numbers of parameters that a rank computes with: its part of pp's, tp's and ep's cuts."""
    if plan.old:
        return plan.config.numbers(kinds_of(plan, pp_rank)) / plan.args.tp
    return sum(p.numel() for _, _, named in held_layers(plan, plan.stage_mesh(pp_rank))
               for _, p in named)


# ---- what a block keeps for backward: a line for each tensor that is saved ----

def kept_by_norm(plan, tokens, width, out):
    """RMSNorm: its input, 1 / root mean square and, where a layer reads it (`out`), its output. The
    CPU's keeps the normalised input in float32 too, and in 16 bits its input in float32."""
    w, wide, on_cpu = plan.width, plan.wide, plan.args.device == "cpu"
    each = wide + wide if on_cpu else w
    if out and (plan.args.recompute != "selective" or (on_cpu and w < 4)):
        each += w  # in 16 bits the CPU's repetition begins with it
    return tokens * (width * each + wide)


def kept_by_attention(plan, tokens, shard, positions, sequences):
    """Bytes that attention keeps: tokens of whole sequences, `shard` of them under tp. Returns
    {what: bytes}, and the bytes that I leaves for W (inputs and output gradients of layers)."""
    c, a, w = plan.config, plan.args, plan.width
    heads, dk, dv = c.n_heads // a.tp, c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    ulysses = a.cp_method == "ulysses"
    found = {"attention norm": kept_by_norm(plan, shard, c.dim, a.tp == 1 or bool(c.q_lora_rank)),
             "lse": tokens * heads * plan.wide}
    if a.tp > 1 and not c.q_lora_rank:
        found["gathered input"] = tokens * c.dim * w
    if c.rope_interleaved:  # complex numbers, for q and for k
        found["rotations"] = positions * c.qk_rope_head_dim * 2 * plan.wide
    if not c.is_mla:
        kv = max(c.n_kv_heads // a.tp, 1)
        travelling = math.lcm(kv, a.cp) if ulysses else kv
        found["q, k, v, out"] = tokens * w * dv * ((2 + ulysses) * heads + 2 * travelling)
        return found, (shard * c.dim + tokens * ((2 * heads + 2 * kv) * dv + c.dim)) * w
    latent, rope, selective = c.kv_lora_rank, c.qk_rope_head_dim, a.recompute == "selective"
    found["latents"] = kept_by_norm(plan, tokens, latent, a.cp == 1) + tokens * w * (
        rope * (a.device != "cpu" or w >= 4) + latent * (selective and a.cp == 1))
    if c.q_lora_rank:
        found["latents"] += kept_by_norm(plan, tokens, c.q_lora_rank, True)
    later = (shard * (c.dim + (c.q_lora_rank + latent + rope if c.q_lora_rank else 0))
             + tokens * (heads * (dk + dv) + c.dim + (c.q_lora_rank or latent + rope)))
    if a.cp > 1:
        times = 1 + (a.seq_len / positions if ulysses else 0)
        found["blocks"] = tokens * (latent + rope) * w * times
        found["q, out"] = tokens * heads * (dk + dv * (1 + ulysses)) * w
        return found, later * w
    # a fused kernel wants values as wide as keys; the CPU has none for short sequences
    padded = dk if a.device != "cpu" or positions >= 1024 or dk <= 32 or dk == dv else 0
    out = padded + dv * (padded != dv) if padded else dv
    found["q, out"] = tokens * heads * (dk + out) * w
    found["k, v"] = 0 if selective else tokens * heads * w * (
        dk + (padded if padded > dv else c.qk_nope_head_dim + dv))
    if not padded:
        found["scores"] = sequences * heads * positions ** 2 * w
    return found, (later + tokens * (latent + heads * (c.qk_nope_head_dim + dv))) * w


def kept_by_ffn(plan, kind, tokens, shard, rows=None):
    """As kept_by_attention(). rows: (token, expert) pairs that this rank's experts work on; as many
    as everywhere when not given."""
    c, a, w, wide = plan.config, plan.args, plan.width, plan.wide
    apart, moe, products = plan.mesh().experts_apart, kind == "moe", (
        2 if a.recompute == "selective" else 3)  # gate, up, and what they give together
    inner = (c.num_shared_experts * c.moe_inter_dim if moe else c.inter_dim) / a.tp
    found = {"ffn norm": kept_by_norm(plan, shard, c.dim, moe or a.tp == 1),
             "shared experts" if moe else "SwiGLU": tokens * inner * products * w}
    later = tokens * (3 * inner + c.dim) * (inner > 0) + shard * c.dim
    if moe:
        width = c.moe_inter_dim / (a.etp if apart else a.tp)
        rows = rows if rows is not None else shard * c.top_k * a.etp if apart else tokens * c.top_k
        found["router"] = (shard * (c.num_experts * (wide + 8) + c.top_k * (2 * wide + w))
                           + (shard + c.num_experts) * c.dim * wide * (w < 4))
        found["experts"] = rows * (2 * c.dim + products * width) * w
        found["indices"] = rows * (36 + 8 * c.top_k if apart else 16)
        later += rows * (2 * c.dim + 3 * width)
    if a.tp > 1 and (not moe or not apart or inner):
        found["gathered ffn input"] = tokens * c.dim * w
    return found, later * w


def tokens_of(plan, mesh, sequences):
    """(tokens, those of the sequence shard, positions) of a microbatch on one rank."""
    tp, positions = mesh["tp"], plan.args.seq_len
    if mesh["cp"].size > 1:
        positions = ring_attention.Slices(mesh["cp"], positions).length(mesh["cp"].rank)
    part = -(-positions // tp.size)
    mine = min(max(positions - tp.rank * part, 0), part)
    return sequences * positions, sequences * mine, positions


def kept_bytes(plan, kind, mesh, sequences, rows=None):
    """What one layer keeps of a microbatch from F to B, {what: bytes}, and of that what is left
    between I and W."""
    if plan.old:
        return kept_by_shape(plan, kind, sequences)
    c, w = plan.config, plan.width
    tokens, shard, positions = tokens_of(plan, mesh, sequences)
    if kind == "embed":
        return {}, 0
    if kind == "norm":
        return {"last norm": kept_by_norm(plan, shard, c.dim, False),
                "gradients of the loss": (shard * c.dim + c.vocab_size // plan.args.tp * c.dim) * w
                }, 0
    attention, later = kept_by_attention(plan, tokens, shard, positions, sequences)
    ffn, more = kept_by_ffn(plan, kind, tokens, shard, rows)
    if plan.args.recompute == "full":  # I has repeated the block's forward
        return {"input": shard * c.dim * w, "indices": ffn.get("indices", 0)
                * mesh.experts_apart}, later + more
    return {**attention, **ffn}, later + more


def kept_by_stage(plan, mesh, stage, sequences, rows):
    """What a stage keeps of a microbatch: its layers; the rotations' table; what it got, where its
    first norm does not keep that. And what waits for W."""
    kept, waiting = collections.Counter(), 0
    for kind, count in collections.Counter(plan.stages[stage]).items():
        found, later = kept_bytes(plan, kind, mesh, sequences, rows)
        kept.update({what: count * number for what, number in found.items()})
        waiting += count * later
    if not plan.old:
        _, shard, positions = tokens_of(plan, mesh, sequences)
        kept["rotation table"] = positions * plan.config.qk_rope_head_dim * plan.wide
        if stage and plan.width < 4 and plan.args.device == "cpu" and (
                plan.args.recompute != "full"):
            kept["hidden states received"] = shard * plan.config.dim * plan.width
    return kept, waiting


@functools.lru_cache(8)
def in_order(schedule, pp, m, virtual):
    """(single actions of each pipeline rank, the place in its list of what it does, placement)."""
    lists, placement = schedule_of(schedule, pp, m, virtual)
    lists = [pipeline.singles(actions) for actions in lists]
    return lists, [{pipeline.done_by(part): at for at, part in enumerate(actions)}
                   for actions in lists], placement


@functools.lru_cache(512)
def messages_held(schedule, pp, m, virtual, pp_rank):
    """[(single action, (messages in memory after it, and those of the last microbatch))] of a
    pipeline rank: those sent, until one from their receiver shows that it has read them
    (pipeline.Mail), and the one that comes next."""
    lists, places, placement = in_order(schedule, pp, m, virtual)
    mine, found, held = lists[pp_rank], [], [0, 0]  # of whole microbatches, of the last one
    sent = [[] for _ in lists]  # rank -> heap of (where it reads a message, microbatch)

    def arriving(part):
        return [(placement[need[1]], need) for need in pipeline.needs(part, len(placement))
                if placement[need[1]] != pp_rank]
    for at, part in enumerate(mine):
        for peer, need in arriving(part):
            while sent[peer] and sent[peer][0][0] <= places[peer][need]:
                held[heapq.heappop(sent[peer])[1] == m - 1] -= 1
        kind, stage, i = pipeline.done_by(part)
        user = pipeline.user_of(kind, stage)
        if kind != "W" and 0 <= user < len(placement) and placement[user] != pp_rank:
            heapq.heappush(sent[placement[user]], (places[placement[user]][kind, user, i], i))
            held[i == m - 1] += 1
        coming = [need[2] == m - 1 for part in mine[at + 1:at + 2] for _, need in arriving(part)]
        found.append((part, (held[0] + coming.count(False), held[1] + coming.count(True))))
    return found


def activation_bytes(plan, mesh, rows=None):
    """The most that the microbatches in flight keep on a rank, {what: bytes}, at its fullest
    moment. rows: as kept_by_ffn() has them, for all MoE blocks."""
    sizes, pp, placement = plan.microbatches, mesh["pp"], plan.placement
    held = {(stage, size): kept_by_stage(plan, mesh, stage, size, rows)
            for stage, at in enumerate(placement) if at == pp.rank for size in set(sizes)}
    total = {layers: sum(kept.values()) for layers, (kept, _) in held.items()}
    m, live, now, waiting, most, best = len(sizes), collections.Counter(), 0, 0, 0, ({}, 0, 0)
    if plan.args.pp_schedule != "gpipe":  # which keeps all; the others repeat themselves
        m = min(m, 2 * pp.size)
    hidden = [0 if plan.old else tokens_of(plan, mesh, size)[1] * plan.config.dim * plan.width
              for size in (sizes[0], sizes[m - 1])]
    for part, messages in messages_held(plan.args.pp_schedule, pp.size, m,
                                        plan.args.virtual_stages, pp.rank):
        layers = part.stage, sizes[part.microbatch]
        more = (part.kind == "F") - (part.kind in "BI")
        live[layers] += more
        now += more * total[layers]
        waiting += held[layers][1] * ((part.kind == "I") - (part.kind == "W"))
        sent = sum(map(operator.mul, messages, hidden))
        if now + waiting + sent > most:
            most, best = now + waiting + sent, (dict(live), waiting, sent)
    found = collections.Counter({"left for W": best[1], "messages": best[2]})
    for layers, count in best[0].items():
        found.update({what: count * number for what, number in held[layers][0].items()})
    return dict(+found)


def transient_bytes(plan, mesh):
    """What exists for moments: {"logits", "buffers"} of one rank."""
    c, a, found = plan.config, plan.args, {"logits": 0, "buffers": 0}
    vocabulary = c.vocab_size / a.tp
    if plan.old:
        if a.zero > 1:
            found["buffers"] = 2 * c.block() / a.tp * (plan.width * (a.zero == 3) + plan.wide)
        return found
    if plan.placement[-1] == mesh["pp"].rank:
        tokens = tokens_of(plan, mesh, plan.microbatches[0])[0]
        chunk = min(tokens, min(max(2 ** 25 / vocabulary, 256), 8192))
        found["logits"] = chunk * vocabulary * (plan.wide + plan.width)
        found["logits"] += vocabulary * c.dim * plan.wide  # the head's gradient while it forms
    if a.zero > 1:
        sizes = [sum(len(u.master) * u.axis.size for u in units_of(plan, mesh, named))
                 for _, _, named in held_layers(plan, mesh)]
        two = sum(sorted(sizes)[-2:])
        found["buffers"] = (two + sizes[-1]) * plan.width * (a.zero == 3) + two * plan.wide
    return found


def memory_of(plan, pp_rank):
    """{what: bytes} of the first rank of a pipeline rank's, at its fullest moment."""
    mesh = plan.stage_mesh(pp_rank)
    return {**held_bytes(plan, mesh), "activations": sum(activation_bytes(plan, mesh).values()),
            **transient_bytes(plan, mesh)}


def fullest(plan):
    """(bytes, pipeline rank) of the fullest."""
    return max((sum(memory_of(plan, r).values()), r) for r in range(plan.args.pp))


def fits(plan, ranks=None):
    """Whether some pipeline ranks, or all, have room; what they hold for ever is asked first."""
    room, ranks = FREE * plan.gpu.memory * 1e9, ranks or range(plan.args.pp)
    return all(sum(held_bytes(plan, plan.stage_mesh(r)).values()) <= room for r in ranks) and all(
        sum(memory_of(plan, r).values()) <= room for r in ranks)


# ---- what a rank sends: {(axis, what): bytes} ----

copies_of = functools.lru_cache(4096)(expert_parallel.expected_copies)


def microbatch_bytes(plan, mesh, kinds, sequences, repeated, deferred=False):
    """For one microbatch of a stage, forward and backward; over ep what is expected when every
    choice of experts is as likely. repeated, deferred: forwards in backward, W apart from I."""
    if plan.old:
        return sent_by_shape(plan, kinds, sequences, repeated)
    a, w, wide, found = plan.args, plan.width, plan.wide, {}
    dense, moe = kinds.count("dense"), kinds.count("moe")
    c = dataclasses.replace(plan.config, n_layers=dense + moe, n_dense_layers=dense)
    tokens, shard, positions = tokens_of(plan, mesh, sequences)
    if a.tp > 1:
        over_tp = tensor_parallel.bytes_sent(c, a.tp, sequences, positions, w, wide, repeated,
                                             deferred, mesh.experts_apart)
        for part, here in (("gradients", False), ("embedding", "embed" in kinds),
                           ("head", "norm" in kinds)):
            over_tp[part] *= here
        found.update({("tp", part): sent for part, sent in over_tp.items()})
    if a.cp > 1:
        over_cp = ring_attention.bytes_sent(c, a.cp, mesh["cp"].rank, sequences, a.seq_len,
                                            a.cp_method, True, a.tp, w, wide, repeated)
        found["tp", "latents of cp"] = over_cp.pop("over tp")
        found.update({("cp", part): sent for part, sent in over_cp.items()})
    if mesh.experts_apart:
        each = shard * (plan.ways.get("copies") or copies_of(plan.config, a.ep)) / a.ep
        sent = expert_bytes(plan, mesh, [([[each] * a.ep] * a.ep, each * a.ep)], repeated)
        found.update({key: moe * number for key, number in sent.items()})
    return found


def expert_bytes(plan, mesh, sends, repeated):
    """Over ep and etp. sends: (send matrix, most rows of an etp rank) of each forward of a MoE
    layer that is not a repetition."""
    both = [expert_parallel.bytes_sent(plan.config, matrix, mesh["ep"].rank, plan.width, plan.wide,
                                       plan.args.etp, longest, repeated)
            for matrix, longest in sends]
    return {("ep", "tokens"): sum(ep for ep, _ in both),
            ("etp", "tokens"): sum(etp for _, etp in both)}


def pipeline_bytes(plan, mesh):
    """Hidden states and their gradients that leave this pipeline rank in a step, and its half of a
    tied matrix's gradient."""
    placement, rank = plan.placement, mesh["pp"].rank
    messages = sum((here == rank) + (there == rank)
                   for here, there in zip(placement, placement[1:]) if here != there)
    found = {("pp", "hidden states"): messages * message_bytes(plan, mesh, sum(plan.microbatches))}
    ends, c = {placement[0], placement[-1]}, plan.config
    if len(ends) == 2 and rank in ends and plan.old and c.tied:
        found["pp", "tied embedding"] = plan.width * c.vocab_size * c.dim / plan.args.tp
    elif len(ends) == 2 and rank in ends and not plan.old and c.tie_embeddings:
        found["pp", "tied embedding"] = plan.wide * sum(
            m.numel() for m in masters_of(plan, mesh, cut_here(plan, mesh)["embed"]))
    return found


def message_bytes(plan, mesh, sequences):
    """Of hidden states that travel between two stages' ranks."""
    tokens = sequences * plan.args.seq_len / plan.args.tp if plan.old else tokens_of(
        plan, mesh, sequences)[1]
    return tokens * plan.config.dim * plan.width


def data_bytes(plan, mesh):
    """For gradients and parameters in a step, over dp, shard, data and the experts' axes."""
    if plan.old:
        return data_sent_by_shape(plan, mesh)
    if plan.args.zero:
        return sharded_bytes(plan, mesh)
    wide = torch.promote_types(DTYPES[plan.args.dtype], torch.float32)
    # backward finishes the last layer first; on a pipeline rank in the order of the whole model
    order = {"embed": 0, "dense": 1, "moe": 1, "norm": 2}
    layers = sorted(held_layers(plan, mesh), key=lambda layer: (order[layer[1]], layer[0]))
    named = [pair for _, _, layer in layers for pair in layer]
    if plan.config.tie_embeddings and layers[-1][1] == "norm":  # the matrix comes first
        named.sort(key=lambda pair: not pair[0].startswith("embed"))
    sent = ddp.bytes_sent([p for _, p in named][::-1], lambda p: (
        mesh["edata" if "edata" in label_of(p).partial else "data"], wide))
    return {(axis, "gradients"): number for axis, number in sent.items()}


def sharded_bytes(plan, mesh):
    """What fsdp.Sharded sends in a step; on a pipeline rank the schedule says when it gathers. With
    HSDP the shards' gradients are all-reduced over dp, once."""
    a, m, sent, n = plan.args, len(plan.microbatches), collections.Counter(), mesh["dp"].size
    layers = held_layers(plan, mesh)
    units = [units_of(plan, mesh, named) for _, _, named in layers]
    names = [kind if kind in ("embed", "norm") else f"block {i}"
             for i, (_, kind, _) in enumerate(layers)]
    parts = plan.actions(mesh["pp"].rank, m) if a.pp > 1 and a.zero > 1 else []
    stages = {stage: [name for name, (s, _, _) in zip(names, layers) if s == stage]
              for stage, _, _ in layers}
    times = fsdp.pipeline_gathers(stages, [(p.kind, p.stage) for p in parts],
                                  plan.config.tie_embeddings)
    for name, (stage, _, _), layer in zip(names, layers, units):
        backward = sum(p.stage == stage and p.kind in "BW" for p in parts) if a.pp > 1 else m
        for unit in layer:
            numbers, axis = (unit.axis.size - 1) * len(unit.master), unit.axis.name
            sent[axis, "gradients"] += numbers * plan.wide * (1 if a.zero == 1 else backward)
            sent[axis, "parameters"] += numbers * plan.width * (times[name] if a.zero == 3 else 1)
            sent["dp", "gradients"] += 2 * (n - 1) * -(-len(unit.master) // n) * plan.wide
    for axis in ("shard", "efsdp") if a.pp == 1 else ():
        shards = [sum(len(u.master) for u in layer if u.axis.name == axis) for layer in units]
        sent[axis, "parameters"] = fsdp.bytes_sent(
            shards, a.zero, plan.width, mesh[axis].size, m) - sent[axis, "gradients"]
    return sent


def summed_bytes(plan, mesh):
    """All-reduces, once a step: gradients of tensor_parallel.sum_partial_gradients(); the token
    count, and sums of loss, norm, balance loss, busy seconds, stop requests and expert counts."""
    n, world, numbers = plan.args.tp, plan.world_size, 0
    for master in itertools.chain(*(masters_of(plan, mesh, named)
                                    for _, _, named in held_layers(plan, mesh))):
        parts = next((cut.parts for cut in label_of(master).cuts if cut.axis == "tp"), 1)
        numbers += master.numel() * parts * ("tp" in label_of(master).partial)
    counts = 5 + plan.config.n_moe_layers() * plan.config.num_experts
    return {("tp", "gradients"): 2 * (n - 1) * -(-numbers // n) * plan.wide,
            ("world", "sums"): 2 * (world - 1) * 8 * (1 + -(-counts // world))}


def bytes_sent(plan, rank=0, sends=None):
    """Bytes that a rank sends in a step: exactly the ledger's, for ep given what was sent, else
    expected. sends: as expert_bytes() has them, of all microbatches."""
    mesh, sizes, repeated = plan.mesh(rank), plan.microbatches, plan.args.recompute == "full"
    total, pp_rank = collections.Counter(), mesh["pp"].rank
    halves = {(p.stage, p.microbatch) for p in plan.actions(pp_rank, len(sizes)) if p.kind == "W"}
    for stage, at in enumerate(plan.placement):
        alike = collections.Counter((size, (stage, i) in halves) for i, size in enumerate(sizes))
        for (size, deferred), count in alike.items() if at == pp_rank else ():
            sent = microbatch_bytes(plan, mesh, plan.stages[stage], size, repeated, deferred)
            total.update({key: count * number for key, number in sent.items()})
    if sends is not None:
        total.update({key: number - total[key] for key, number in expert_bytes(
            plan, mesh, sends, repeated).items()})
    for more in (data_bytes(plan, mesh), pipeline_bytes(plan, mesh),
                 {} if plan.old else summed_bytes(plan, mesh)):
        total.update(more)
    return {key: number for key, number in total.items() if number}


def by_axis(sent):
    """Axis -> bytes, as metrics.jsonl has them."""
    totals = collections.Counter()
    for (axis, _), number in sent.items():
        totals[axis] += number
    return dict(totals)


# ---- how long it takes ----

def flops_forward(plan, kind, mesh, sequences):
    """FLOPs of one layer's forward on a rank: (matrix products, attention's scores and sums)."""
    a, c = plan.args, plan.config
    if plan.old:
        tokens = sequences * a.seq_len / a.tp
        products = {"embed": 0, "dense": c.matrices(), "norm": c.vocab_size * c.dim}[kind]
        scores = 4 * tokens * a.seq_len * c.heads * (kind == "dense")
        return 2 * tokens * products, scores
    tokens, shard, _ = tokens_of(plan, mesh, sequences)
    if kind in ("embed", "norm"):
        return 2 * tokens * c.vocab_size / a.tp * c.dim * (kind == "norm"), 0
    rows = shard * c.top_k * a.etp if mesh.experts_apart else tokens * c.top_k
    products = 0
    for name, p in cut_here(plan, mesh)[kind]:
        if p.dim() == 3:
            products += 2 * rows * p.numel() / len(p)
        elif p.dim() == 2:  # what is whole on every tensor rank works on a sequence shard
            cut = any(cut.axis == "tp" for cut in label_of(p).cuts) or a.tp == 1
            products += 2 * (tokens if cut else shard) * p.numel()
            if name.endswith("wkv_b.weight") and a.cp > 1 and a.cp_method != "ulysses":
                products += 2 * tokens * (a.cp - 1) * p.numel()  # others' latents, expanded again
    head = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
    return products, tokens * a.seq_len * c.n_heads / a.tp * head


def line_of(plan, axis):
    """(ranks of a line along an axis that lie in one node, all ranks of it)."""
    a = plan.args
    experts, ranks = a.ep * a.etp, a.fsdp * a.cp * a.tp
    stride, size = {"tp": (1, a.tp), "etp": (1, a.etp), "ep": (a.etp, a.ep), "cp": (a.tp, a.cp),
                    "shard": (a.tp, a.cp * a.fsdp), "efsdp": (experts, ranks // experts),
                    "dp": (ranks, a.dp), "data": (a.tp, a.dp * a.fsdp * a.cp),
                    "edata": (experts, a.dp * ranks // experts), "pp": (ranks * a.dp, a.pp),
                    "world": (1, plan.world_size)}[axis]
    return min(max(plan.gpu.node_size // stride, 1), size), size


def wire_seconds(plan, axis, sent):
    """Time to send so many bytes along an axis. A line inside a node has its links. One that leaves
    it goes at the speed of the links that leave: a ring has those of all its ranks in the node,
    since other rings than this one would only share them; an all-to-all, each rank its own."""
    here, size = line_of(plan, axis)
    rings = here if axis not in ("ep", "pp") and "flat" not in plan.ways else 1
    speed = plan.gpu.inside if here == size else min(plan.gpu.inside, rings * plan.gpu.outside)
    return sent / (speed * 1e9 * NETWORK)


def exposed(traffic, compute):
    """Seconds of traffic that compute beside it doesn't hide."""
    return max(traffic - compute, 0.0) + (1 - OVERLAP) * min(traffic, compute)


@dataclasses.dataclass
class StageTime:
    """Seconds of one microbatch of a stage: F, I (backward of inputs, with what is repeated), W;
    what they are made of, by kind of work."""
    F: float
    I: float
    W: float
    parts: dict
    all = property(lambda self: self.F + self.I + self.W)


def stage_time(plan, mesh, kinds, sequences, whole):
    """A StageTime. Backward's products are twice forward's, half of them for the weights. whole:
    the plan without recompute on a GPU, whose kept bytes element-wise work touches."""
    peak, a = plan.peak * 1e12, plan.args
    touch, back = TOUCHES / (plan.gpu.bandwidth * 1e12 * MEMORY), 2 if plan.old else 2.5
    parts, F, I, W, attention = collections.Counter(), 0.0, 0.0, 0.0, 0.0
    for kind, count in collections.Counter(kinds).items():
        products, scores = flops_forward(plan, kind, mesh, sequences)
        products *= count / (peak * PRODUCTS)
        scores *= count / (peak * (PRODUCTS if plan.old else SCORES))
        kept = count * sum(kept_bytes(whole, kind, mesh, sequences)[0].values())
        dropped = kept - count * sum(kept_bytes(plan, kind, mesh, sequences)[0].values())
        touched, again = touch * kept, 0.0
        if kind in ("dense", "moe") and a.recompute != "none":
            again = products + scores + touched if a.recompute == "full" else (
                touch * dropped + scores * plan.old)
        once = kind == "norm" and not plan.old  # its gradients are formed on the way forward
        parts.update({"matrix products": 3 * products, "attention": (1 + back) * scores,
                      "element-wise": 3 * touched, "recompute": again})
        F += products * (3 if once else 1) + scores + touched
        I += products * (not once) + back * scores + 1.5 * touched + again
        W += products * (not once) + 0.5 * touched
        attention += scores
    once, full = (by_axis(microbatch_bytes(plan, mesh, kinds, sequences, repeated))
                  for repeated in (False, a.recompute == "full"))
    for axis, sent in full.items():
        forward, both = (wire_seconds(plan, axis, n) for n in (once[axis] / 2, sent))
        hidden = attention * (axis == "cp" and a.cp_method == "ring")  # a ring's blocks travel
        if axis == plan.ways.get("hidden"):
            hidden = parts["matrix products"] / 3
        forward, backward = exposed(forward, hidden), exposed(both - forward, 2 * hidden)
        parts[f"{axis} traffic"] = forward + backward
        F, I = F + forward, I + backward
    return StageTime(F, I, W, dict(parts))


def stage_times(plan):
    """A StageTime for every stage, of a microbatch and of the last one, which may be smaller; the
    same layers take the same time."""
    whole, found = plan.but(recompute="none", device="cuda"), {}
    for size in {plan.microbatches[0], plan.microbatches[-1]}:
        different = {kinds: stage_time(plan, plan.mesh(), kinds, size, whole)
                     for kinds in set(plan.stages)}
        found[size] = [different[kinds] for kinds in plan.stages]
    return found[plan.microbatches[0]], found[plan.microbatches[-1]]


def timeline(plan, times, m):
    """pipeline.predict of m microbatches; times: as stage_times() has them."""
    usual, last = ([{"F": t.F, "I": t.I, "W": t.W} for t in stages] for stages in times)
    message = wire_seconds(plan, "pp", message_bytes(plan, plan.mesh(), plan.microbatches[0]))
    return pipeline.predict(*plan.schedule(m), lambda stage, microbatch: (
        last if microbatch == m - 1 else usual)[stage], message)


def busy_times(plan, times):
    """Seconds that each pipeline rank works on a microbatch, and on all of them."""
    each, last = ([sum(t.all for t, at in zip(stages, plan.placement) if at == rank)
                   for rank in range(plan.args.pp)] for stages in times)
    m = len(plan.microbatches)
    return each, [(m - 1) * usual + end for usual, end in zip(each, last)]


def pipeline_time(plan, times, simulated=True):
    """Time of a step's microbatches through the stages: simulated until the schedule has reached
    its steady phase, and the rest at the rate of that, or of the slowest rank's work. Or a quick
    guess: the slowest rank's work, and the first microbatch's way there and back."""
    a, m, (each, work) = plan.args, len(plan.microbatches), busy_times(plan, times)
    if not simulated:
        share = {"zb-v": 0.1, "dualpipe-v": 0.2, "zb-h1": 0.4}.get(
            a.pp_schedule, a.pp / len(plan.placement))
        return max(work) + (sum(each) - max(each)) * share
    few = 2 * a.pp + m % a.pp
    if m <= max(few + a.pp, 64):
        return timeline(plan, times, m)["makespan"]
    first, then = (timeline(plan, times, n)["makespan"] for n in (few, few + a.pp))
    return max(first + (m - few) * max((then - first) / a.pp, max(each)), max(work))


def model_flops(plan, causal=True):
    """FLOPs a token of a step, recompute not counted: model.flops_per_token, or for older families
    6 a matrix number and 12 L H Q T for attention (PaLM, appendix B)."""
    if not plan.old:
        return flops_per_token(plan.config, plan.args.seq_len, causal)
    c = plan.config
    return 6 * (c.n_layers * c.matrices() + c.vocab_size * c.dim) + (
        12 * c.n_layers * c.heads * plan.args.seq_len)


def estimate(plan, simulated=True):
    """(seconds of a step, {what of the slowest rank's work: seconds}): the schedule of the stages,
    then what no compute hides of gradients and parameters, and the optimizer. simulated: as
    pipeline_time() has it. Raises ValueError where no peak of the GPU is known for the dtype."""
    if not plan.peak:
        known = [dtype for dtype, torch_dtype in DTYPES.items()
                 if plan.gpu.name in PEAKS.get(torch_dtype.itemsize, ())]
        raise ValueError(f"--dtype {plan.args.dtype}: the table has no peak of {plan.gpu.name} for "
                         f"it; use {one_of(known)}")
    times, m = stage_times(plan), len(plan.microbatches)
    span, (_, work) = pipeline_time(plan, times, simulated), busy_times(plan, times)
    slowest, parts = work.index(max(work)), collections.Counter()
    for usual, last, at in zip(*times, plan.placement):
        for t, count in ((usual, m - 1), (last, 1)) if at == slowest else ():
            parts.update({what: seconds * count for what, seconds in t.parts.items()})
    parts["bubble"] = span - work[slowest]
    mesh, zero = plan.stage_mesh(slowest), plan.args.zero
    # what is sent each microbatch runs under all of it, what is sent once under one's backward
    data = sum(wire_seconds(plan, axis, sent)
               for axis, sent in by_axis(data_bytes(plan, plan.mesh())).items())
    hidden = 0 if "late" in plan.ways else span if zero > 1 else times[0][-1].I + times[0][-1].W
    parts["gradients, parameters"] = exposed(data, hidden)
    held = held_bytes(plan, mesh)
    touched = 3 * held["optimizer"] + 2 * held["gradients"] / (mesh["shard"].size if zero == 1
                                                               else 1)
    parts["optimizer"] = touched / (plan.gpu.bandwidth * 1e12 * MEMORY)
    return span + parts["gradients, parameters"] + parts["optimizer"], dict(parts)


def mfu(plan, step, causal=True):
    """Of the GPUs' peak, what the model's own FLOPs of a step are."""
    return plan.tokens * model_flops(plan, causal) / (step * plan.world_size * plan.peak * 1e12)


# ---- which layout ----

def candidates(name, gpus, gpu, given, flags):
    """Flags of every layout worth a thought: tp within a node, whole experts, ep and cp where the
    model has use for them. given: the flags that were set, which stay as they are."""
    old, node = name in FAMILIES, GPUS[gpu].node_size
    config = config_of(name, flags["override"])
    experts = 0 if old else config.n_moe_layers() and config.num_experts
    sizes = {"pp": [n for n in divisors(gpus) if n <= min(config.n_layers, 64)],
             "tp": [n for n in divisors(gpus) if n <= node],
             "cp": [n for n in divisors(gpus) if n == 1 or (
                 n <= 64 and flags["seq_len"] >= 16384 and not old)],
             "ep": [n for n in divisors(experts) if n <= 128] or [1]}
    for pp, tp, cp, ep in itertools.product(*(
            [given[axis]] if axis in given else sizes[axis] for axis in sizes)):
        rest, odd = divmod(gpus, pp * tp * cp)
        if odd or rest * tp * cp % ep:
            continue
        shards = sorted({rest, min(rest, node)})
        if "dp" in given:
            shards = [rest // given["dp"]] * (rest % given["dp"] == 0)
        schedules = [("1f1b", 1)] + [("interleaved", v) for v in (2, 4)
                                     if pp * v <= config.n_layers] + [("zb-v", 1)]
        if "pp_schedule" in given or pp == 1:
            schedules = [(given.get("pp_schedule", "1f1b"), given.get("virtual_stages", 1))]
        for (schedule, virtual), zero, fsdp_size in itertools.product(
                schedules, [1] if pp > 1 else [0, 1, 2, 3], shards):
            yield {"pp": pp, "tp": tp, "cp": cp, "ep": ep, "zero": zero, "fsdp": fsdp_size,
                   "pp_schedule": schedule, "virtual_stages": virtual, **given}


def search(name, gpus, gpu, given, flags):
    """The three fastest plans that fit: [(estimate(), Plan)]. Each layout is taken with the least
    recompute and the microbatches that fit; those that a guess finds fastest are simulated, twenty
    and on until three fit on all pipeline ranks. Raises ValueError as make_plan() does when no
    layout can have the given flags, and when none fits."""
    found, tried, possible = [], set(), False
    for layout, micro in itertools.product(candidates(name, gpus, gpu, given, flags), (1, 2, 4, 8)):
        for recompute in ("none", "selective", "full"):
            wanted = {**flags, "micro_batch_size": micro, "recompute": recompute, **layout}
            key = tuple(sorted((flag, str(x)) for flag, x in wanted.items()))
            if key in tried:
                break
            tried.add(key)
            try:
                plan = make_plan(name, gpus, gpu, **wanted)
            except ValueError as error:
                refusal = error
                break
            possible = True
            if fits(plan, sorted({0, min(1, plan.args.pp - 1), plan.args.pp - 1})):
                found.append((estimate(plan, simulated=False)[0], len(tried), plan))
                break
    if not possible:
        make_plan(name, gpus, gpu, **flags)  # what is wrong with the flags as they were given
        raise refusal
    best = []
    for place, (_, _, plan) in enumerate(sorted(found)):
        if place >= 20 and len(best) >= 3:
            break
        best += [(estimate(plan), plan)] if fits(plan) else []
    print(f"{len(tried):,} plans tried; {len(found):,} have room on their first two pipeline ranks "
          "and the last. Not tried unless given: --zero 2 and 3 with pp, --etp, --cp-method, "
          "gpipe, zb-h1 and dualpipe-v, microbatches of more than 8")
    if not best:
        raise ValueError(f"nothing fits: {name} on {gpus} x {gpu} with {GPUS[gpu].memory} GB each; "
                         "use more GPUs, a smaller --batch-size, or fewer fixed flags")
    return sorted(best, key=lambda pair: pair[0][0])[:3]


# ---- what a person reads ----

def gb(number):
    return f"{number / 1e9:,.2f}"


def layout_text(plan):
    a = plan.args
    stages = f" of {a.virtual_stages} stages a rank" * (a.virtual_stages > 1)
    return (f"{plan.mesh()}, zero {a.zero}" + f", {a.pp_schedule}{stages}" * (a.pp > 1)
            + f", cp by {a.cp_method}" * (a.cp > 1)
            + f", recompute {a.recompute}, microbatches of {a.micro_batch_size}")


def show_plan(plan, tokens=None, explain=False):
    """Print memory of each pipeline rank, traffic, time, and what dominates."""
    a, (step, parts) = plan.args, estimate(plan)
    print(f"{plan.name} on {plan.world_size:,} x {plan.gpu.name}: {layout_text(plan)}")
    print(f"{a.batch_size:,} sequences of {a.seq_len:,} a step, {plan.tokens / 1e6:,.1f} M tokens; "
          f"{len(plan.microbatches):,} microbatches a rank; {a.dtype}")
    if plan.old:
        print("by the formulas of its time: gradients travel in 16 bits; dropout masks and, "
              "without recompute, scores are kept; attention's FLOPs count all positions")
    fullest_rank = show_memory(plan)
    show_stages(plan)
    show_traffic(plan, fullest_rank)
    show_time(plan, step, parts, tokens)
    if explain:
        explain_memory(plan, fullest_rank)
        explain_traffic(plan, fullest_rank)
        explain_time(plan, step, parts)


def show_rows(plan, title, rows):
    """A table with a line for each pipeline rank, in a long pipeline for each that differs from the
    one before; rows: of each rank {column: text}."""
    named = ["+".join(f"{n} {kind}" if kind in ("dense", "moe") else kind for kind, n
                      in collections.Counter(kinds_of(plan, r)).items()) for r in range(len(rows))]
    wide = max(map(len, [title, *named])) + 7
    print(f"\n{title:{wide}}" + "".join(f" {column:>11}" for column in rows[0]))
    for r, row in enumerate(rows):
        if plan.args.pp <= 8 or r in (0, len(rows) - 1) or row != rows[r - 1]:
            print(f"pp {r:<4}{named[r]:{wide - 7}}" + "".join(f" {x:>11}" for x in row.values()))


def show_memory(plan):
    """Of each pipeline rank by kind. Returns the fullest."""
    rows = [memory_of(plan, r) for r in range(plan.args.pp)]
    show_rows(plan, "GB", [{what: gb(number) for what, number in {
        **row, "together": sum(row.values())}.items()} for row in rows])
    most, r = max((sum(row.values()), r) for r, row in enumerate(rows))
    largest = max(rows[r], key=rows[r].get)
    print(f"fullest: pp rank {r}, {gb(most)} of {plan.gpu.memory} GB, most of it {largest}: "
          + ("fits" if most <= FREE * plan.gpu.memory * 1e9 else
             "does not fit (10 % are left for CUDA and the network); try --recompute, --fsdp, more "
             "of the other axes, or --search"))
    return r


def show_stages(plan):
    """Of each pipeline rank a microbatch's F, I and W, what it works and waits in a step, and what
    it sends by axis."""
    times, rows = stage_times(plan), []
    span, (_, work) = pipeline_time(plan, times), busy_times(plan, times)
    for r in range(plan.args.pp):
        mine = [t for t, at in zip(times[0], plan.placement) if at == r]
        row = {f"{kind} ms": f"{1e3 * sum(getattr(t, kind) for t in mine):,.2f}" for kind in "FIW"}
        row.update({"busy s": f"{work[r]:,.3f}", "bubble s": f"{span - work[r]:,.3f}"})
        sent = by_axis(bytes_sent(plan, plan.stage_mesh(r).rank))
        rows.append({**row, **{f"{axis} GB": gb(sent.get(axis, 0)) for axis in AXES}})
    used = [column for column in rows[0] if any(row[column] != gb(0) for row in rows)]
    show_rows(plan, "time, and what is sent", [{c: row[c] for c in used} for row in rows])


# the collective behind a line of traffic; of most it is an all-gather and a reduce-scatter
OPERATIONS = {"parameters": "all-gather", "hidden states": "send", "ep tokens": "all-to-all",
              "sums": "all-reduce", "tied embedding": "send", "balance": "all-reduce",
              "shard gradients": "reduce-scatter", "efsdp gradients": "reduce-scatter",
              "gradients": "all-reduce", "ring": "ring", "ulysses": "all-to-all"}


AXES = ("pp", "dp", "data", "shard", "cp", "tp", "ep", "etp", "efsdp", "edata", "world")


def show_traffic(plan, pp_rank):
    """Bytes and time by axis and operation, of the first rank of a pipeline rank's."""
    rank = plan.stage_mesh(pp_rank).rank
    print(f"\n{f'sent by rank {rank:,} (pp {pp_rank}) in a step':46}{'GB':>12}{'link':>9}"
          f"{'seconds':>10}")
    for (axis, what), number in sorted(bytes_sent(plan, rank).items(), key=lambda item: -item[1]):
        key = plan.args.cp_method if (axis, what) == ("cp", "attention") else what
        operation = OPERATIONS.get(f"{axis} {what}") or OPERATIONS.get(key) or (
            "all-gather, reduce-scatter")
        link = "inside" if len(set(line_of(plan, axis))) == 1 else "outside"
        text = what + " (expected)" * (axis in ("ep", "etp"))
        print(f"{axis:7}{text:21}{operation:18.18}{gb(number):>12}{link:>9}"
              f"{wire_seconds(plan, axis, number):10.3f}")


def show_time(plan, step, parts, tokens):
    """The step, in parts of the slowest rank, and what follows from it."""
    work = busy_times(plan, stage_times(plan))[1]
    print(f"\n{f'the slowest rank, pp {work.index(max(work))}':40}{'seconds':>10}{'share':>8}")
    order = sorted((what for what in parts if parts[what] > 0), key=parts.get, reverse=True)
    for what in order:
        print(f"{what:40}{parts[what]:10.3f}{parts[what] / step:8.1%}")
    share, whole, peak = mfu(plan, step), mfu(plan, step, False), plan.peak
    print(f"a step: {step:.3f} s; {plan.tokens / step:,.0f} tokens/s; {share * peak:,.0f} TFLOP/s "
          f"a GPU, MFU {share:.1%}; bubble {parts['bubble'] / step:.1%}")
    if not plan.old:
        print(f"(non-causal attention: {whole * peak:,.0f} TFLOP/s, MFU {whole:.1%})")
    if tokens:
        days = tokens / plan.tokens * step / 86400
        print(f"{tokens / 1e12:g} T tokens: {days:,.1f} days, {days * 24 * plan.world_size:,.0f} "
              "GPU-hours")
    print(f"what dominates: {order[0]}, {parts[order[0]] / step:.0%} of the step")
    if plan.args.cp > 1:
        methods = [method for method in ("ring", "allgather", "ulysses") if method != "ulysses"
                   or plan.config.n_heads // plan.args.tp % plan.args.cp == 0]
        steps = {method: estimate(plan.but(cp_method=method))[0] for method in methods}
        print("--cp-method: " + ", ".join(f"{method} {steps[method]:.3f} s"
                                          for method in sorted(steps, key=steps.get)))


# what --explain says of each kind: T tokens of whole sequences in a microbatch, S of the sequence
# shard, w bytes of a number, W of one that sums up, h and g heads and key/value heads of a tp rank
KEPT = {
    "attention norm": "S (dim x w, once more where a layer reads the output, + W)",
    "ffn norm": "S (dim x w, once more where a layer reads the output, + W)",
    "last norm": "S (dim x w + W)", "gradients of the loss": "(S + vocabulary / tp) dim x w",
    "lse": "T h W", "gathered input": "T dim w", "gathered ffn input": "T dim w",
    "rotations": "positions x rope x 2 W", "rotation table": "positions x rope x W",
    "q, k, v, out": "T w head (2 h + 2 g)", "q, out": "T h (dk + dv) w",
    "k, v": "T h (dk + nope + dv) w, or values as wide as keys", "blocks": "T (latent + rope) w",
    "latents": "norms of T x (kv_lora_rank, q_lora_rank), T x rope x w",
    "SwiGLU": "T inter_dim / tp x 3 w (2 w: selective)", "input": "S dim w",
    "shared experts": "T shared x moe_inter_dim / tp x 3 w (2 w: selective)",
    "router": "S (experts (W + 8) + top_k (2 W + w)) and, in 16 bits, (S + experts) dim W",
    "experts": "rows (2 dim + 3 moe_inter_dim) w (2: selective); rows = tokens x top_k",
    "indices": "rows x 16; sent over ep, rows (36 + 8 top_k)",
    "hidden states received": "S dim w", "messages": "S dim w, sent and not yet read, or coming",
    "left for W": "inputs and output gradients of layers whose W is still to come",
    "linear layers": "s b (2 (heads + kv) + (2, gated 4) ffn) w / tp",
    "norms, inputs, dropout": "s b dim (4 w + 2)", "scores": "heads s^2 b (2 w + 1) / tp; "
    "on a CPU heads s^2 b w / tp", "dropout mask": "s b dim", "last norm, head": "2 s b dim w",
    "logits": "s b vocabulary W / tp"}


def explain_memory(plan, r):
    """Where did all the memory go: each number with its formula, of a pipeline rank."""
    a, mesh = plan.args, plan.stage_mesh(r)
    held, kept, n = held_bytes(plan, mesh), activation_bytes(plan, mesh), mesh["shard"].size
    print(f"\nwhere the memory goes, pp rank {r}: P = {parameters_of(plan, r):,.0f} parameters in "
          "its stages" + f", shared by N = {n}" * (a.zero > 0))
    masters = 0 if plan.width >= 4 else 4
    for kind, text in (
            ("parameters", f"{plan.width} P + {masters} P" if not a.zero else
             f"{plan.width} P + {plan.wide} P/N" if a.zero < 3 else f"{plan.wide} P/N"),
            ("gradients", f"{plan.wide} P" + "/N" * (a.zero > 1)),
            ("optimizer", f"{2 * plan.wide} P" + "/N" * (a.zero > 0))):
        print(f"  {kind:26}{gb(held[kind]):>10} GB   {text if held[kind] else 'sgd has none'}"
              + f" (experts: N = {mesh['efsdp'].size})" * (a.zero > 0 and mesh.experts_apart))
    print(f"  {'activations':26}{gb(sum(kept.values())):>10} GB   at the fullest moment of its "
          "schedule, of which")
    for what, number in sorted(kept.items(), key=lambda item: -item[1]):
        print(f"    {what:24}{gb(number):>10} GB   {KEPT[what]}")
    for kind in sorted(set(kinds_of(plan, r))):
        found, later = kept_bytes(plan, kind, mesh, plan.microbatches[0])
        terms = [f"{what} {number / 1e6:,.1f}" for what, number in found.items() if number]
        print(f"  one {kind} layer, one microbatch: {sum(found.values()) / 1e6:,.1f} MB = "
              + (" + ".join(terms) or "nothing") + f"; {later / 1e6:,.1f} wait for W" * (later > 0))


def explain_traffic(plan, pp_rank):
    """The formula of each line of traffic. N: ranks of the axis."""
    a, m, mesh = plan.args, len(plan.microbatches), plan.stage_mesh(pp_rank)
    w, again = plan.width, " and once more in a repeated forward" * (a.recompute == "full")
    wide = w if plan.old else plan.wide
    gradients = f"2 (N-1)/N x {wide} B a number, once a step"
    scattered = f"(N-1)/N x {wide} B a number, " + ("once a step" if a.zero < 2 else
                                                    f"for each of {m:,} microbatches")
    text = {"shard parameters": f"(N-1)/N x {w} B a number, a gather", "shard gradients": scattered,
            "pp hidden states": f"S dim x {w} B for each stage next door, microbatch and way",
            "pp tied embedding": "the matrix's gradient, to the other end",
            "cp attention": "others' latents, or keys and values, and the gradients of them",
            "cp balance": "counts of experts by sequence",
            "tp latents of cp": "(N-1)/N of the latents that cp brings",
            "ep tokens": f"8 B a rank, then each row sent dim x {w} B with gates and ids, forward "
            "and backward" + again, "etp tokens": "rows gathered, results scattered",
            "tp gradients": f"2 (N-1)/N x {plan.wide} B a number that is a partial sum",
            "tp head": "the head's input and its gradient, two sums a token"}
    print(f"\nwhat is sent, pp rank {pp_rank}; one collective of T tokens over tp is "
          f"(N-1)/N x T dim x {w} B: two a half of a block forward, two backward{again}")
    for axis, what in sorted(bytes_sent(plan, mesh.rank)):
        name = f"{axis} {what}".replace("efsdp", "shard")
        formula = text.get(name) or (gradients if what == "gradients" else
                                     "8 B a sum" if axis == "world" else "collectives as above")
        print(f"  {f'{axis} {what}':26}N = {line_of(plan, axis)[1]:<6}{formula}")


def explain_time(plan, step, parts):
    """The time of one layer with its numbers, and what a step is the sum of."""
    print(f"\nwhere the time goes; {plan.gpu.name}: {plan.peak:g} TFLOP/s x {PRODUCTS} for "
          f"products, x {SCORES} for attention; {plan.gpu.bandwidth} TB/s x {MEMORY}; links "
          f"{plan.gpu.inside} and {plan.gpu.outside} GB/s x {NETWORK}")
    mesh, size, whole = plan.mesh(), plan.microbatches[0], plan.but(recompute="none", device="cuda")
    for kind in sorted(set(itertools.chain(*plan.stages))):
        products, scores = flops_forward(plan, kind, mesh, size)
        kept = sum(kept_bytes(whole, kind, mesh, size)[0].values())
        print(f"  {kind:7}forward of a microbatch: {products / 1e12:.3f} TFLOP of products, "
              f"{scores / 1e12:.3f} of attention, {TOUCHES} x {kept / 1e9:.3f} GB touched")
    print("  F = products + attention + touched; I = products + attention "
          f"x {2 if plan.old else 2.5} + touched x 1.5 + recompute; W = products + touched x 0.5; "
          "and the traffic of each")
    print(f"  traffic that compute can hide costs max(traffic - compute, 0) + {1 - OVERLAP:.2f} x "
          "min(traffic, compute), any other all of it")
    print("  optimizer = (3 x its state + 2 x gradients) / memory's bandwidth = "
          f"{parts['optimizer']:.4f} s")
    span = step - parts["gradients, parameters"] - parts["optimizer"]
    print(f"  step = the schedule's {span:.3f} s (the slowest rank's "
          f"{span - parts['bubble']:.3f} of work and {parts['bubble']:.3f} of bubble) + gradients "
          f"and parameters {parts['gradients, parameters']:.3f} + optimizer")
    print(f"  MFU = tokens/s x {model_flops(plan) / 1e9:,.1f} GFLOP a token / (GPUs x peak) = "
          f"{mfu(plan, step):.1%}")


# ---- drawings ----

def write_trace(plan, path):
    """The predicted step as a chrome trace (chrome://tracing, ui.perfetto.dev)."""
    parts, events = estimate(plan)[1], []
    lines = timeline(plan, stage_times(plan), len(plan.microbatches))
    for rank, line in enumerate(lines["times"]):
        spans, at = [(str(part), part.kind, start, stop) for part, start, stop in line], (
            lines["makespan"])
        for what in ("gradients, parameters", "optimizer"):
            spans.append((what, what, at, at + parts[what]))
            at += parts[what]
        events += [{"name": text, "cat": kind, "ph": "X", "pid": 0, "tid": rank,
                    "ts": start * 1e6, "dur": (stop - start) * 1e6}
                   for text, kind, start, stop in spans]
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank,
                       "args": {"name": f"pp rank {rank}"}})
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


HUES = {"pp": 210, "dp": 30, "fsdp": 50, "cp": 280, "tp": 120, "ep": 340, "etp": 180}


def write_svg(plan, path):
    """The mesh: a cell for each rank with a band for each axis, its hue the axis', its lightness
    the place along it; what a rank holds is in the cell's tooltip. 64 ranks a line."""
    mesh = plan.mesh()
    views = {**mesh.expert_sizes, **mesh.sizes}
    axes = {axis: views[axis] for axis in HUES if views[axis] > 1 and (
        mesh.experts_apart or axis in mesh.sizes)} or {"dp": 1}
    across, big = min(plan.world_size, 64), plan.world_size <= 128
    wide, band = (64, 14) if big else (14, 4)
    high = band * len(axes) + 6

    def cell(x, y, axis, light, text, width=wide - 4):
        return (f'<rect x="{x}" y="{y}" width="{width}" height="{band}" '
                f'fill="hsl({HUES[axis]},70%,{light:.0f}%)"/>'
                + f'<text x="{x + 3}" y="{y + 10}">{text}</text>' * bool(text))
    width, height = max(across * wide, 90 * len(axes)), -(-plan.world_size // across) * high
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 20}" height="{height + 40}" '
           'font-family="monospace" font-size="10">']
    out += [cell(10 + 90 * i, 8, axis, 65, f"{axis} {size}", 80)
            for i, (axis, size) in enumerate(axes.items())]
    for rank in range(plan.world_size):
        place = {**coordinates(rank, mesh.expert_sizes), **coordinates(rank, mesh.sizes)}
        x, y = 10 + rank % across * wide, 30 + rank // across * high
        text = " ".join(f"{axis} {place[axis]}" for axis in axes)
        holds = ", ".join(dict.fromkeys(kinds_of(plan, place["pp"])))
        out.append(f'<g><title>rank {rank}: {text}; holds {holds}</title>')
        out += [cell(x, y + i * band, axis, 85 - 45 * place[axis] / max(size - 1, 1),
                     f"{axis} {place[axis]}" * big) for i, (axis, size) in enumerate(axes.items())]
        out.append("</g>")
    with open(path, "w") as file:
        file.write("\n".join([*out, "</svg>\n"]))


# ---- what was published, beside what is predicted ----

TABLE_1, TABLE_2, TABLE_5 = "2104.04473 table 1", "2104.04473 table 2", "2205.05198 table 5"
A100 = "--gpu a100 --micro-batch-size 1"
OF_2021 = {"no_sp": True, "late": True}  # Megatron-LM before sequence parallelism and overlap
SIZES_5 = [("megatron-22b", 8, 4, "--tp 8 --micro-batch-size 4"),
           ("megatron-175b", 64, 64, "--tp 8 --pp 8 --pp-schedule interleaved --virtual-stages 3"),
           ("megatron-529.6b", 280, 280, "--tp 8 --pp 35 --pp-schedule interleaved "
            "--virtual-stages 3"), ("megatron-1t", 512, 512, "--tp 8 --pp 64")]
LLAMA = "--gpu h100 --tp 8 --pp 16 --pp-schedule interleaved --virtual-stages 4 --zero 1"

# source, what its figures are (TFLOP/s a GPU, or s a step), ways, flags of all its runs, and
# the runs: (model, GPUs, sequences a step, flags, figure)
PUBLISHED = [
    (TABLE_1, "TFLOP/s", OF_2021, A100 + " --recompute full", [
        (f"megatron-{size}", n, batch, f"--tp {tp} --pp {pp}", x)
        for size, n, batch, tp, pp, x in (
            ("1.7b", 32, 512, 1, 1, 137), ("3.6b", 64, 512, 2, 1, 138),
            ("7.5b", 128, 512, 4, 1, 142), ("18.4b", 256, 1024, 8, 1, 135),
            ("39.1b", 512, 1536, 8, 2, 138), ("76.1b", 1024, 1792, 8, 4, 140),
            ("145.6b", 1536, 2304, 8, 8, 148), ("310.1b", 1920, 2160, 8, 16, 155),
            ("529.6b", 2520, 2520, 8, 35, 163), ("1t", 3072, 3072, 8, 64, 163))]),
    (TABLE_2, "TFLOP/s", OF_2021, A100 + " --recompute full --tp 8", [
        *(("megatron-175b", n, 1536, "--pp 12", x) for n, x in (
            (384, 153), (768, 149), (1536, 141))),
        *(("megatron-529.6b", n, 2240, "--pp 35", x) for n, x in (
            (560, 171), (1120, 167), (2240, 159)))]),
    (TABLE_2, "TFLOP/s", {"flat": True}, A100 + " --recompute full --zero 3", [
        (f"megatron-{size}", n, batch, f"--fsdp {n} --micro-batch-size {micro}", x)
        for size, n, micro, batch, x in (
            ("175b", 384, 4, 1536, 144), ("175b", 768, 2, 1536, 88), ("175b", 1536, 1, 1536, 44),
            ("529.6b", 640, 4, 2560, 138), ("529.6b", 1120, 2, 2240, 98),
            ("529.6b", 2240, 1, 2240, 48))]),
    (TABLE_5, "s", OF_2021, A100 + " --recompute full", [
        (*run, x) for run, x in zip(SIZES_5, (1.42, 18.13, 49.05, 94.42))]),
    (TABLE_5, "s", {"late": True}, A100 + " --recompute selective", [
        (*run, x) for run, x in zip(SIZES_5, (1.10, 13.75, 37.83, 71.49))]),
    ("bigscience logs", "s", OF_2021, "--gpu a100 --recompute full", [
        ("bloom-176b", 384, 2048, "--tp 4 --pp 12 --micro-batch-size 2", 105)]),
    ("2407.21783 table 4", "TFLOP/s", {}, LLAMA, [
        ("llama3-405b", 8192, 2048, "--seq-len 8192 --fsdp 64", 430),
        ("llama3-405b", 16384, 2048, "--seq-len 8192 --fsdp 128", 400),
        ("llama3-405b", 16384, 128, "--seq-len 131072 --override max_seq_len=131072 --fsdp 8 "
         "--cp 16 --cp-method allgather", 380)]),
    # its experts' messages travel under compute, to 4 nodes at most
    ("2505.09343 table 4", "s", {"hidden": "ep", "copies": 3.63}, "--gpu h800", [
        ("deepseek-v3", 2048, 15360, "--pp 16 --ep 64 --fsdp 128 --zero 1 --recompute selective "
         "--pp-schedule dualpipe-v", 19.926)]),
    ("2204.02311 section 4.1", "s", {}, "--gpu tpu-v4 --recompute full", [
        ("palm-540b", 6144, 2048, "--tp 12 --fsdp 256 --zero 3", 2048 * 2048 / 238.3e3)])]

# size -> sequences of a microbatch, and GB that a layer keeps (2205.05198, table 2) in five ways
ACTIVATIONS = {"22b": (4, 7.08, 1.325, 0.885, 0.654, 0.214),
               "175b": (1, 2.869, 0.579, 0.359, 0.327, 0.107),
               "529.6b": (1, 4.110, 0.881, 0.514, 0.545, 0.178),
               "1t": (1, 5.138, 1.101, 0.642, 0.682, 0.223)}
FIVE_WAYS = [("one GPU", 1, "none", {}), ("tp 8", 8, "none", {"no_sp": True}),
             ("tp 8, sequence parallel", 8, "none", {}),
             ("tp 8, selective", 8, "selective", {"no_sp": True}),
             ("tp 8, both", 8, "selective", {})]


def published_runs():
    """(source, command line, seconds of a step, Plan) of each. Published rates count what is
    repeated: of full recompute a second forward (2104.04473, equation 3)."""
    parser = build_parser()
    for source, unit, ways, common, rows in PUBLISHED:
        for model, gpus, batch, flags, figure in rows:
            line = f"{model} --gpus {gpus} --batch-size {batch} {flags}"
            plan = plan_of(parser.parse_args(f"{common} {line}".split()), ways)
            flops = plan.tokens * model_flops(plan)
            if plan.old and plan.args.recompute == "full":
                c = plan.config
                flops += plan.tokens * c.n_layers * (2 * c.matrices() + 4 * c.heads * c.seq_len)
            yield source, line, figure if unit == "s" else flops / (gpus * figure * 1e12), plan


def zero_bytes(psi, n, level):
    """Bytes a rank by the ZeRO paper (section 3.1): 2 for a parameter, 2 for its gradient, 12 for
    its float32 copy and two moments. quintet's gradients are float32: fsdp.bytes_held."""
    return psi * {0: 16, 1: 4 + 12 / n, 2: 2 + 14 / n, 3: 16 / n}[level]


def memory_rows():
    """(what, published, predicted, unit) wherever a paper gives a number or a formula of bytes."""
    rows = [(f"ZeRO figure 1, 7.5B on 64, level {level}", gb, zero_bytes(7.5e9, 64, level) / 1e9,
             "GB") for level, gb in enumerate((120, 31.4, 16.6, 1.9))]
    for size, (micro, *figures) in ACTIVATIONS.items():
        for figure, (what, tp, recompute, ways) in zip(figures, FIVE_WAYS):
            plan = make_plan(f"megatron-{size}", tp, tp=tp, seq_len=2048, batch_size=micro,
                             micro_batch_size=micro, recompute=recompute, ways=ways)
            rows.append((f"activations a layer, {size}, {what}", figure,
                         sum(kept_by_shape(plan, "dense", micro)[0].values()) / 1e9, "GB"))
    for model, gpus, figure, axes in (("bloom-176b", 384, 3.672, {"tp": 4, "pp": 12}),
                                      ("deepseek-v3", 2048, 1.708, {"pp": 16, "ep": 64})):
        plan = make_plan(model, gpus, fsdp=gpus // axes["pp"] // axes.get("tp", 1), **axes,
                         batch_size=2048, micro_batch_size=1)
        rows.append((f"parameters a GPU, {model}, {axes}", figure, sum(
            parameters_of(plan, r) for r in range(plan.args.pp)) / plan.args.pp / 1e9, "B"))
    return rows


def constant_error(tflops):
    """The mean error of step times with one rate for Megatron's ten sizes."""
    rates = [row[-1] for row in PUBLISHED[0][-1]]
    return sum(abs(rate / tflops - 1) for rate in rates) / len(rates)


def show_published():
    """Print predicted beside published. Returns the exit code: 0 when memory is within 10 %, time
    within 20 %, the laws within 3 %, and Megatron's ten sizes nearer than with any one rate."""
    errors = collections.defaultdict(list)

    def line(kind, what, published, found, unit):
        errors[kind].append(abs(found / published - 1))
        print(f"{what:72.72}{published:>8.4g} {unit:3}{found:>8.4g} {unit:3}"
              f"{found / published - 1:+7.1%}")
    print(f"{'':72}{'published':>12}{'predicted':>12}")
    for what, figure, found, unit in memory_rows():
        line("memory", what, figure, found, unit)
    for source, command, seconds, plan in published_runs():
        line(source, f"{source}: {command}", seconds, estimate(plan)[0], "s")
    for what, figure, found in scaling_rows():
        line("laws", what, figure, found, "")
    memory, laws, ten = errors.pop("memory"), errors.pop("laws"), errors[TABLE_1]
    steps = list(itertools.chain(*errors.values()))
    best = min((x / 10 for x in range(1000, 2000)), key=constant_error)
    print(f"\n{len(steps)} runs: mean error {sum(steps) / len(steps):.1%}, largest "
          f"{max(steps):.1%}; Megatron's ten sizes {sum(ten) / 10:.1%}, where 150 TFLOP/s for all "
          f"have {constant_error(150):.1%} and the best constant ({best:.0f}) "
          f"{constant_error(best):.1%}")
    good = (max(memory) < 0.1 and max(steps) < 0.2 and max(laws) < 0.03
            and sum(ten) / 10 < constant_error(best))
    print("PASS" if good else "FAILED")
    return 0 if good else 1


# ---- scaling laws: how large a model, and how many tokens, for so much compute ----
#
# N parameters (Kaplan: without embeddings; MoE: of all experts), D tokens, C FLOPs; losses in nats
# a token, each on its authors' own text, so that they are no contest. Chinchilla's optimum is where
# the derivatives of E + A / N^a + B / D^b by log N and log D are equal, a A / N^a = b B / D^b. With
# C = 6 N D: N = G (C / 6)^(b / (a + b)), G = (a A / b B)^(1 / (a + b)). The rounded coefficients
# that Chinchilla prints put 5.76e23 FLOPs at 32 billion parameters, those in the source of its
# paper at 40, the re-fit at 72; its own model, from the first two approaches, has 70. Two digits of
# an exponent are not enough.

# Chinchilla, table 3 and A3: parameters -> (FLOPs by approach 1, by approach 2)
CHINCHILLA = {4e8: (1.92e19, 1.84e19), 1e9: (1.21e20, 1.20e20), 1e10: (1.23e22, 1.32e22),
              6.7e10: (5.76e23, 6.88e23), 1.75e11: (3.85e24, 4.54e24), 1e12: (1.27e26, 1.59e26)}

# E, A, B, alpha, beta
PARAMETRIC = {"Chinchilla 3, as printed": (1.69, 406.4, 410.7, 0.34, 0.28),
              "Chinchilla 3, unrounded": (1.6934, 406.4, 410.7, 0.3392, 0.2849),
              "Chinchilla 3, re-fit": (1.8172, 482.01, 2085.43, 0.3478, 0.3658)}

# parameters active, tokens, granularity, FLOPs, loss (2402.07871, table 2)
MOE_TABLE = [(1e8, 4.37e9, 8, 2.95e18, 3.133), (1e9, 28.94e9, 16, 1.93e20, 2.491),
             (3e9, 72.90e9, 16, 1.41e21, 2.245), (7e9, 137.6e9, 32, 6.46e21, 2.076),
             (7e10, 941.07e9, 32, 4.16e23, 1.694), (3e11, 2.96e12, 64, 5.69e24, 1.503),
             (1e12, 7.94e12, 64, 4.97e25, 1.367)]
EXPANSION = 64  # of the expert parameters over those of a dense layer, as the law was fitted


def kaplan_loss(params=None, tokens=None):
    """Nats a token, of one limit alone (equations 1.1 and 1.2) or of both (1.5, with the constants
    of its fit)."""
    if tokens is None:
        return (8.8e13 / params) ** 0.076
    if params is None:
        return (5.4e13 / tokens) ** 0.095
    return ((6.4e13 / params) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103


def kaplan(flops):
    """1.3e9 parameters at a PF-day, growing with its power 0.73 (table 6)."""
    params = 1.3e9 * (flops / (1e15 * 86400)) ** 0.73
    return params, flops / (6 * params), kaplan_loss(params, flops / (6 * params))


def chinchilla_loss(fit, params, tokens):
    """E + A / N^alpha + B / D^beta; fit: its five numbers."""
    e, a, b, alpha, beta = fit
    return e + a / params ** alpha + b / tokens ** beta


def parametric(fit, flops):
    """Chinchilla's approach 3: the closed form above."""
    _, a, b, alpha, beta = fit
    g = (alpha * a / (beta * b)) ** (1 / (alpha + beta))
    params = g * (flops / 6) ** (beta / (alpha + beta))
    return params, flops / (6 * params), chinchilla_loss(fit, params, flops / (6 * params))


def interpolated(approach, flops):
    """Chinchilla's approach 1 or 2: a straight line, in logarithms, between the rows of its table,
    and on beyond them."""
    rows = [(math.log(c[approach - 1]), math.log(n)) for n, c in CHINCHILLA.items()]
    x = math.log(flops)
    i = max(min(sum(row[0] < x for row in rows), len(rows) - 1), 1)
    (x0, y0), (x1, y1) = rows[i - 1:i + 1]
    params = math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return params, flops / (6 * params), None


def moe_loss(active, tokens, granularity):
    """Loss of a model of `active` parameters a token and 64 times as many in its experts."""
    n = active * (8 * EXPANSION + 4) / 12
    return 0.47 + (2.1 / granularity ** 0.58 + 18.1) / n ** 0.115 + 30.8 / tokens ** 0.147


def moe_flops_per_token(active, granularity):
    """Six for each of 12 d^2 numbers of a block, and fourteen a token for each number of the
    router, d x 64 G (2402.07871, section 5): d = 64 blocks."""
    blocks = (active / (12 * 64 ** 2)) ** (1 / 3)
    dim = 64 * blocks
    return (12 * dim ** 2 * 6 + dim * EXPANSION * granularity * 14) * blocks


def moe_optimum(flops):
    """(active parameters, tokens, loss, granularity) of least loss for these FLOPs: a search, since
    the router's cost has no closed form."""
    def found(log_active, g):
        active = math.exp(log_active)
        tokens = flops / moe_flops_per_token(active, g)
        return moe_loss(active, tokens, g), active, tokens, g

    def best(g):
        low, high = 0.0, math.log(1e20)
        while high - low > 1e-9:  # the loss has one minimum
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (low, b) if found(a, g) < found(b, g) else (a, high)
        return found(low, g)
    loss, active, tokens, g = min(best(2 ** i) for i in range(8))
    return active, tokens, loss, g


# law -> a function of FLOPs that returns (parameters, tokens, loss or None) of the best model
LAWS = {"Kaplan": kaplan, "Chinchilla 1": functools.partial(interpolated, 1),
        "Chinchilla 2": functools.partial(interpolated, 2),
        **{name: functools.partial(parametric, fit) for name, fit in PARAMETRIC.items()},
        "20 tokens a parameter": lambda c: (math.sqrt(c / 120), 20 * math.sqrt(c / 120), None),
        "fine-grained MoE, active": lambda c: moe_optimum(c)[:3]}


def flops_for(law, index, wanted):
    """The FLOPs at which a law's best model has the wanted parameters (index 0) or tokens (1)."""
    low, high = 0.0, math.log(1e40)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if law(math.exp(middle))[index] < wanted else (low, middle)
    return math.exp(low)


def scaling_rows():
    """(what, published, found) of the laws' worked examples."""
    rows = [("Chinchilla's size by approach 1, billions", 67, interpolated(1, 5.76e23)[0] / 1e9)]
    for active, tokens, g, flops, loss in MOE_TABLE:
        name, (_, best_tokens, _, best_g) = f"MoE, {active / 1e9:g} billion active", moe_optimum(
            flops)
        rows += [(f"{name}, loss", loss, moe_loss(active, tokens, g)),
                 (f"{name}, best granularity", g, best_g),
                 (f"{name}, best tokens, billions", tokens / 1e9, best_tokens / 1e9)]
    return rows


def show_scaling(flops=None, params=None, tokens=None):
    """Print the laws side by side. Raises ValueError for a combination that says nothing, and for
    numbers so far from those the laws were fitted to that they say nothing either."""
    for name, number, least, most in (("flops", flops, 1e12, 1e30), ("params", params, 1e4, 1e15),
                                      ("tokens", tokens, 1e6, 1e15)):
        if number is not None and not least <= number <= most:
            raise ValueError(f"--{name} {number:g} must lie between {least:g} and {most:g}: no law "
                             "was fitted to anything near it")
    if flops and (params or tokens):
        raise ValueError("--flops asks for the best size and tokens, which --params and --tokens "
                         "say; leave --flops out, or the other")
    if not (flops or params or tokens):
        raise ValueError("scaling needs --flops, or --params, or --tokens, or the last two; for "
                         "instance --flops 5.76e23")
    if params and tokens:
        print(f"{params / 1e9:g} billion parameters on {tokens / 1e9:g} billion tokens, 6 N D = "
              f"{6 * params * tokens:.3g} FLOPs: loss by")
        losses = {"Kaplan": kaplan_loss(params, tokens),
                  **{name: chinchilla_loss(fit, params, tokens)
                     for name, fit in PARAMETRIC.items()},
                  "fine-grained MoE's dense law": 0.47 + 16.3 / params ** 0.126
                  + 26.7 / tokens ** 0.127,
                  **{f"MoE of that many active, granularity {g}": moe_loss(params, tokens, g)
                     for g in (1, 8, 64)}}
        for name, loss in losses.items():
            print(f"  {name:42}{loss:8.4f}")
        return 0
    print(f"{'the best model by':32}{'FLOPs':>12}{'B parameters':>14}{'B tokens':>12}{'loss':>9}")
    for name, law in LAWS.items():
        c = flops or flops_for(law, 0 if params else 1, params or tokens)
        n, d, loss = law(c)
        print(f"{name:32}{c:12.3g}{n / 1e9:14.4g}{d / 1e9:12.4g}"
              + (f"{loss:9.4f}" if loss else f"{'-':>9}"))
    if flops:
        print(f"granularity of the MoE's experts: {moe_optimum(flops)[3]}")
    return 0


# ---- demonstration: plans beside steps that really run ----

def as_planned(flags, n):
    """The Plan of train.py's flags on n ranks' CPU."""
    args = vars(train.build_parser().parse_args(flags))
    return make_plan(args["model"], n, override=args["override"],
                     **{**{flag: args[flag] for flag in PLAN_FLAGS}, "device": "cpu"})


def held_tensors(run):
    """The tensors that a train.Run holds, as held_bytes() names them."""
    masters = [master for _, master in run.owner.named_masters()]
    gradients = [t for unit in run.owner.units for t in (unit.grad, unit.buffer)
                 ] if run.args.zero else [master.grad for master in masters]
    if run.reducer and not run.args.zero:
        gradients += [bucket.flat for bucket in run.reducer.buckets]
    return {"parameters": [*run.model.parameters(), *masters],
            "gradients": [t for t in gradients if t is not None],
            "optimizer": [t for state in run.optimizer.state.values()
                          for name, t in state.items() if name != "step"]}


def measured_step(run):
    """(bytes by axis, bytes held behind backward) of a step of train.py."""
    held, step = {}, train.forward_backward

    def watched(*args):
        loss = step(*args)
        held.update(fsdp.live_bytes(held_tensors(run)))
        return loss
    with unittest.mock.patch.object(train, "forward_backward", watched):
        sent = train.train_step(run)["comm_bytes"]
    return {axis: number for axis, number in sent.items() if number}, held


def show_steps(rank, n, layouts, data):
    """A step of train.py in each layout: what it sends and holds beside its plan; activations and
    experts' traffic, which depends on the text, are for the tests."""
    from collectives import Mesh
    worst = {}
    for layout in layouts:
        flags = ["--model", "tiny", "--data", data, "--seq-len", "32", "--batch-size", "8",
                 "--micro-batch-size", "2", "--device", "cpu", *layout.split()]
        args = train.build_parser().parse_args(flags)
        with unittest.mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(n)):
            prepared = train.prepare(args, train.quiet)
        run = train.build(prepared, Mesh(n, rank, **layout_of(args)), train.quiet)
        train.train_step(run)  # makes the optimizer's state
        (sent, held), plan = measured_step(run), as_planned(flags, n)
        planned = by_axis(bytes_sent(plan, rank)), held_bytes(plan, plan.mesh(rank))
        if rank == 0:
            print(f"{layout}: sent {sent}, held {held}")
        worst[f"{layout}: bytes sent are the plan's"] = float(planned[0] != sent)
        worst[f"{layout}: bytes held are the plan's within 5 %"] = max(
            max(abs(number / held[what] - 1) - 0.05, 0.0) for what, number in planned[1].items())
    return verdict(rank, worst)


def demo():
    return spawn(show_steps, 2, ["--tp 2 --recompute full", "--fsdp 2", "--pp 2 --dtype bf16",
                                 "--cp 2 --zero 1"], os.path.abspath(__file__), legal=(2,))


# ---- the command line ----

def build_parser():
    """The flags of a plan. Those of the layout have no default here: what was given is fixed for
    --search."""
    parser = argparse.ArgumentParser(
        prog="plan.py", usage="plan.py MODEL --gpus N [flags] | published | scaling --flops C; "
        "-h lists them", description="Plan a training run: memory, traffic, time. Also: plan.py "
        "published, plan.py scaling --flops C.")
    parser.add_argument("model", help="a preset of train.py, or an older family: "
                        + ", ".join(FAMILIES))
    for flag, options in (
            ("--gpus", value(int, 8, "how many")), ("--gpu", choice("h100", list(GPUS), "which")),
            ("--override", value(str, [], "FIELD=VALUE of the model's configuration", nargs="+",
                                 action="extend")),
            ("--tokens", value(float, None, "to train on: days and GPU-hours")),
            ("--search", switch("the best three layouts that fit; given flags stay as they are")),
            ("--explain", switch("each formula with its numbers")),
            ("--trace", value(str, None, "file for the step as a chrome trace")),
            ("--svg", value(str, None, "file for a drawing of the mesh"))):
        parser.add_argument(flag, **options)
    for flag, options in PLAN_FLAGS.items():
        if flag == "device":  # a plan's is --gpu
            continue
        parser.add_argument("--" + flag.replace("_", "-"),
                            **{**options, "default": argparse.SUPPRESS})
    return parser


def flags_of(args):
    """(the flags that were given, all that make_plan() needs): where not said otherwise bf16, one
    sequence a microbatch, and about four million tokens a step in a multiple of the GPUs."""
    given = {flag: x for flag, x in vars(args).items() if flag in PLAN_FLAGS}
    for flag, x in {"gpus": args.gpus, **given}.items():
        if isinstance(x, int) and x < 1 and flag != "zero":
            raise ValueError(f"--{flag.replace('_', '-')} {x} must be at least 1")
    if args.tokens is not None and not 0 < args.tokens < math.inf:
        raise ValueError(f"--tokens {args.tokens:g} must be more than 0")
    config = config_of(args.model, args.override)
    usual = config.seq_len if args.model in FAMILIES else min(4096, config.max_seq_len)
    flags = {"seq_len": usual, "micro_batch_size": 1, "override": args.override, **given}
    rows = max(1, round(4 * 2 ** 20 / flags["seq_len"] / args.gpus)) * args.gpus
    return given, {"batch_size": rows, **flags}


def plan_of(args, ways=None):
    return make_plan(args.model, args.gpus, args.gpu, ways=ways, **flags_of(args)[1])


def plan_command(args):
    """Plan, or search and then plan the best. Returns the exit code."""
    for flag in ("trace", "svg"):
        path = getattr(args, flag)
        if path is not None and (not path or os.path.isdir(path) or not os.access(
                os.path.dirname(path) or ".", os.W_OK)):
            raise ValueError(f"--{flag} {path}: can't write a file there; give one in a folder "
                             "that exists")
    if args.trace and args.trace == args.svg:
        raise ValueError(f"--trace and --svg are the same file, {args.svg}; give two")
    if args.search:
        best = search(args.model, args.gpus, args.gpu, *flags_of(args))
        for place, ((step, parts), plan) in enumerate(best, 1):
            most, r = fullest(plan)
            print(f"{place}. {layout_text(plan)}: {step:.2f} s a step, MFU {mfu(plan, step):.1%}; "
                  f"{gb(most)} GB on pp rank {r}\n   " + ", ".join(
                      f"{what} {parts[what] / step:.0%}"
                      for what in sorted(parts, key=parts.get, reverse=True)[:4]))
        print()
    plan = best[0][1] if args.search else plan_of(args)
    show_plan(plan, args.tokens, args.explain)
    for path, write in ((args.trace, write_trace), (args.svg, write_svg)):
        if path:
            write(plan, path)
            print(f"written: {path}")
    return 0


def main(argv=None):
    """The commands of the module docstring. Returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv:
            return demo()
        if argv[0] == "scaling":
            parser = argparse.ArgumentParser(prog="plan.py scaling")
            for flag in ("--flops", "--params", "--tokens"):
                parser.add_argument(flag, type=float, help="of the whole run")
            return show_scaling(**vars(parser.parse_args(argv[1:])))
        if argv[0] == "published":
            argparse.ArgumentParser(prog="plan.py published").parse_args(argv[1:])
            return show_published()
        return plan_command(build_parser().parse_args(argv))
    except BrokenPipeError:  # the reader of a pipe has seen enough
        sys.stdout = None
        return 0
    except (ValueError, OSError) as error:
        print(f"plan.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
