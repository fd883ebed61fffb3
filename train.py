"""Training: the command line, and the loop that puts the pieces together.

    python train.py                                  `tiny` on the standard library's own text
    python train.py --out runs/tiny --steps 400      the same, with metrics and checkpoints kept
    python train.py --out runs/tiny --resume         goes on from the newest checkpoint
    python train.py --help                           every flag with its default

One optimizer step is train_step(): get the batch, forward, backward, clip, step. Everything in it
is a sum: the token losses of all ranks and microbatches are added up, and backward is seeded with
1 / (the step's valid tokens), known before the first forward, so that accumulation, ragged
microbatches, masked labels and data parallelism need no care.

    torchrun --nproc-per-node 4 train.py --fsdp 2    4 ranks: 2 replicas, each sharded over 2 ranks

Files in --out: metrics.jsonl (one object a step) and checkpoints/step-N/ (checkpoint.py).
Exit codes: 0 done, 1 failed while training, 2 wrong flags or input.

Course: 05:10:47 the training loop, 15:41:22 metrics, optimizers, schedulers and checkpointing,
16:00:33 combining parallelism in the training loop.
"""
import argparse
import codecs
import contextlib
import ctypes
import dataclasses
import datetime
import fcntl
import importlib.util
import json
import math
import os
import resource
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import data
import expert_parallel
import optim
import pipeline
import ring_attention
import tensor_parallel
from collectives import (CollectiveError, Mesh, all_reduce, attributed, counts_here, label_of,
                         leave, ledger, local_part, local_region, mesh_sizes, one_of, refuse)
from ddp import Replicas
from fsdp import Sharded, bytes_held
from model import (DTYPES, PRESETS, ModelConfig, Transformer, apply_recompute, compile_regions,
                   count_parameters, flops_per_token, full_value, generate, make_config,
                   override_config, sample, starting_part, take_memory, total_parameters,
                   zero_buffers)
from moe import expert_load, max_violation, reset_counts, update_expert_bias

# Dense bf16 and fp16 peak of the data sheets, TFLOP/s; the first key that the device's own name
# contains counts.
GPU_PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "H800": 989, "A100": 312,
             "B200": 2250, "L40S": 362, "MI300X": 1300, "MI325X": 1300, "MI355X": 2500}

BEGUN = "quintet/begun"  # key of torchrun's store: this run had begun before a restart

EVAL_SEQUENCES = 512  # of the validation split, whose documents come in random order

# A resumed run must agree with its beginning on these, on the model and on the text; anything else
# may change (logging, how often to save, recompute, the microbatches of a step ...).
SAME_RUN = ["tokenizer", "errors", "seq_len", "batch_size", "mask_boundaries", "isolate_documents",
            "dtype", "seed", "optimizer", "steps", "lr", "min_lr", "warmup", "lr_schedule",
            "weight_decay", "clip"]


def switch(text):
    return dict(action="store_true", help=text)


def choice(default, choices, text):
    return dict(default=default, choices=choices, help=text)


def value(type_, default, text, **more):
    return dict(type=type_, default=default, help=text, metavar="X", **more)


# The command line: group -> flags, each with its default and a line of help.
FLAGS = {
    "model": [
        ("--model", dict(choices=list(PRESETS), help="preset; tiny, or with --init-from or "
                         "--resume the checkpoint's own")),
        ("--override", value(str, [], "FIELD=VALUE of the model's configuration", nargs="+",
                             action="extend")),
        ("--init-from", value(str, None, "checkpoint whose weights start a new run"))],
    "data": [
        ("--data", value(str, None, "files, folders or globs: .txt .md .py .jsonl, .bin token "
                         "files, Megatron .bin+.idx; none = the Python standard library's text",
                         nargs="+", action="extend")),
        ("--tokenizer", value(str, "bytes", "`bytes`, a tiktoken encoding, or a .tiktoken file")),
        ("--errors", choice("strict", ["strict", "replace"], "what to do with text that is not "
                            "UTF-8")),
        ("--seq-len", value(int, 256, "tokens per sequence")),
        ("--batch-size", value(int, 16, "sequences a step, all ranks together")),
        ("--micro-batch-size", value(int, 8, "sequences per forward on one rank")),
        ("--mask-boundaries", switch("no loss on the first token of a document, given the last "
                                     "one")),
        ("--isolate-documents", switch("attention stays within a document"))],
    "layout": [
        ("--dp", value(int, None, "data-parallel replicas; none = the ranks left over")),
        ("--fsdp", value(int, 1, "ranks that share parameters, gradients, optimizer state")),
        ("--zero", dict(type=int, choices=[0, 1, 2, 3], help="what fsdp shards: 1 optimizer state, "
                        "2 gradients too, 3 parameters too; none = 3, or 1 with --pp, or 0 with "
                        "--fsdp 1")),
        ("--cp", value(int, 1, "ranks that share a sequence")),
        ("--cp-method", choice("ring", ["ring", "allgather", "ulysses"], "how they attend")),
        ("--tp", value(int, 1, "ranks that share each layer")),
        ("--pp", value(int, 1, "pipeline ranks")),
        ("--pp-schedule", choice("1f1b", list(pipeline.SCHEDULES), "pipeline schedule")),
        ("--virtual-stages", value(int, 1, "stages per rank of the interleaved schedule")),
        ("--ep", value(int, 1, "ranks that share the experts")),
        ("--etp", value(int, None, "ranks that share each expert: 1 or tp; none = tp with --ep 1, "
                        "else 1")),
        ("--device", choice("auto", ["auto", "cpu", "cuda"], "auto = cuda where there is one"))],
    "numerics": [
        ("--dtype", choice("fp32", list(DTYPES), "compute type; bf16 and fp16 keep float32 master "
                           "weights")),
        ("--seed", value(int, 0, "of the starting values and of the order of the data")),
        ("--recompute", choice("none", ["none", "selective", "full"], "repeat forward work in "
                               "backward instead of storing it")),
        ("--compile", switch("torch.compile the parts of a block that never communicate")),
        ("--check-parity", switch("compare 3 steps with one process, then exit"))],
    "optimizer": [
        ("--optimizer", choice("adamw", ["adamw", "sgd"], "update rule")),
        ("--steps", value(int, 200, "optimizer steps of the whole run")),
        ("--stop-after", value(int, None, "end cleanly after this step")),
        ("--lr", value(float, 3e-3, "peak learning rate")),
        ("--min-lr", value(float, None, "last learning rate; none = a tenth of the peak")),
        ("--warmup", value(int, 20, "steps of linear warmup")),
        ("--lr-schedule", choice("cosine", ["cosine", "wsd", "linear", "constant"], "shape")),
        ("--weight-decay", value(float, 0.1, "on matrices, not on norms")),
        ("--clip", value(float, 1.0, "largest global gradient norm; 0 = no clipping"))],
    "output": [
        ("--out", value(str, None, "folder for metrics.jsonl and checkpoints; none = no files")),
        ("--save-every", value(int, 0, "steps between checkpoints; 0 = at the end only")),
        ("--keep", value(int, 2, "newest checkpoints to keep; 0 = all")),
        ("--async-save", switch("go on training while a checkpoint is written")),
        ("--strict-save", switch("a checkpoint that can't be written ends the run")),
        ("--resume", switch("go on from the newest checkpoint in --out")),
        ("--eval-every", value(int, 0, "steps between validations; 0 = at the end only")),
        ("--eval-only", switch("validate the checkpoint of --init-from or --resume, then exit")),
        ("--log-every", value(int, 10, "steps between progress lines")),
        ("--profile", switch("write a chrome trace of steps 3 to 5 into --out")),
        ("--tensorboard", switch("write the metrics for tensorboard too, into --out")),
        ("--collective-timeout", value(float, 600.0, "seconds until a collective is given up")),
        ("--stop-timeout", value(float, 10.0, "seconds to wait for other ranks when stopping"))],
}


def build_parser():
    """An argparse parser of FLAGS."""
    parser = argparse.ArgumentParser(
        description="Train a DeepSeek-V3-style or Llama-style model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for title, flags in FLAGS.items():
        section = parser.add_argument_group(title)
        for name, options in flags:
            section.add_argument(name, **options)
    return parser


def layout_of(args):
    """Axis -> size, as the flags say."""
    return {axis: getattr(args, axis) for axis in ("pp", "dp", "fsdp", "cp", "tp", "ep", "etp")}


def check_layout(args, world_size):
    """Fill in --dp, --etp and --zero. Raises ValueError when world_size ranks are not those of the
    layout, or the batch can't be divided among them."""
    if args.dp is not None and args.dp < 1:
        raise ValueError(f"--dp {args.dp} must be at least 1")
    sizes, experts = mesh_sizes(world_size, **layout_of(args))
    args.dp, args.etp = sizes["dp"], experts["etp"]
    if args.zero is None:
        args.zero = 0 if args.fsdp == 1 else 3 if args.pp == 1 else 1
    readers = args.dp * args.fsdp
    if args.batch_size % readers and not getattr(args, "eval_only", False):  # any number will do
        below = args.batch_size // readers * readers
        raise ValueError(f"--batch-size {args.batch_size} can't be divided among dp {args.dp} x "
                         f"fsdp {args.fsdp} = {readers} ranks; use "
                         + one_of([n for n in (below, below + readers) if n]))
    if args.pp == 1 and (args.pp_schedule, args.virtual_stages) != ("1f1b", 1):
        raise ValueError(f"--pp-schedule {args.pp_schedule} --virtual-stages {args.virtual_stages} "
                         "order the work of pipeline ranks, and there is one; add --pp N or leave "
                         "them out")
    if args.cp == 1 and args.cp_method != "ring":
        raise ValueError(f"--cp-method {args.cp_method} says how the ranks of a sequence attend, "
                         "and there is one; add --cp N or leave it out")


def check_model(args, config):
    """Raises ValueError, with the legal values, for a model that this layout can't cut."""
    if args.seq_len > config.max_seq_len:
        raise ValueError(f"--seq-len {args.seq_len} is longer than max_seq_len="
                         f"{config.max_seq_len}; add --override max_seq_len={args.seq_len}")
    tensor_parallel.check(config, args.tp, args.ep > 1 or args.etp < args.tp)
    expert_parallel.check(config, args.ep, args.etp, args.tp, args.fsdp * args.cp * args.tp)
    ring_attention.check(config, args.cp, args.tp, args.seq_len, args.cp_method)
    check_schedule(args, config)


def check_schedule(args, config):
    """Raises ValueError for a pipeline that can't be; validation needs forwards alone, which come
    in any number."""
    if args.pp == 1:
        return
    pipeline.place_stages(args.pp_schedule, args.pp, args.virtual_stages, config.n_layers)
    if not getattr(args, "eval_only", False):
        microbatches = -(-args.batch_size // (args.dp * args.fsdp * args.micro_batch_size))
        try:
            pipeline.check(args.pp_schedule, args.pp, microbatches, args.virtual_stages)
        except ValueError as error:
            raise ValueError(f"--pp-schedule: {error} (a rank's microbatches: --batch-size / (dp x "
                             "fsdp x --micro-batch-size))") from None


def check_flags(args):
    """Raises ValueError for flags that make no sense together, before anything is touched."""
    for name, least in (("seq_len", 1), ("batch_size", 1), ("micro_batch_size", 1), ("steps", 1),
                        ("warmup", 0), ("save_every", 0), ("keep", 0), ("eval_every", 0),
                        ("log_every", 1), ("lr", 0), ("weight_decay", 0), ("clip", 0),
                        ("fsdp", 1), ("cp", 1), ("tp", 1), ("pp", 1), ("virtual_stages", 1),
                        ("ep", 1), ("collective_timeout", 1), ("stop_timeout", 1)):
        number = getattr(args, name)
        if not least <= number <= 1e9:
            raise ValueError(f"--{name.replace('_', '-')} {number} must be at least {least} and at "
                             "most 1e9")
    if args.check_parity:
        for name in ("resume", "eval_only", "profile", "tensorboard"):
            if getattr(args, name):
                raise ValueError("--check-parity runs 3 steps of a new run and keeps nothing; "
                                 f"leave --{name.replace('_', '-')} out (--init-from DIR starts "
                                 "it from a checkpoint's weights)")
        args.dtype, args.out, args.save_every = "fp64", None, 0
        args.async_save = args.strict_save = False
    check_layout(args, launched()[1])
    args.min_lr = args.lr / 10 if args.min_lr is None else args.min_lr
    if not 0 <= args.min_lr <= args.lr:
        raise ValueError(f"--min-lr {args.min_lr} must lie between 0 and --lr {args.lr}")
    if args.stop_after is not None and args.stop_after < 1:
        raise ValueError(f"--stop-after {args.stop_after} must be at least 1")
    if args.profile and last_step(args) < 5:
        raise ValueError(f"--profile traces steps 3 to 5, and this run ends after "
                         f"{last_step(args)}; use --steps 5 or more")
    if args.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise ValueError("--tensorboard needs the tensorboard package: pip install tensorboard")
    for name in ("resume", "profile", "tensorboard", "save_every", "async_save", "strict_save"):
        if getattr(args, name) and not args.out:
            raise ValueError(f"--{name.replace('_', '-')} needs a folder: add --out DIR")
    if args.resume and args.init_from:
        raise ValueError("--resume goes on with a run and --init-from starts one; leave one out")
    if args.eval_only and not (args.resume or args.init_from):
        raise ValueError("--eval-only needs a checkpoint: add --init-from DIR, or --out DIR "
                         "--resume")
    if args.out:
        check_writable(args.out)
        if not args.eval_only:
            check_free(args.out)
    if args.compile:
        check_compiler()


def launched():
    """(rank, world_size) as torchrun started this process; one rank alone without it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def check_writable(out):
    """Raises ValueError when the folder can't be made or written, without making it."""
    folder = Path(out).absolute()
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"--out {out}: {folder} "
                         f"{'can not be written' if folder.is_dir() else 'is not a folder'}")


def check_free(out):
    """Raises ValueError while another run adds to the folder's metrics.jsonl: open_metrics()."""
    path = Path(out, "metrics.jsonl")
    if path.exists():
        with path.open("rb") as file:
            take_lock(file, fcntl.LOCK_SH, out)


def take_lock(file, kind, out):
    """Lock a file until it is closed. Raises ValueError when another run has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--out {out}: another run is writing there; end it first (also one whose "
                         "torchrun is gone), or give another folder") from None
    except OSError:  # a file system without locks
        pass


def check_compiler():
    """Raises ValueError when torch.compile would find no C++ compiler for the CPU's kernels."""
    from torch._inductor import cpp_builder, exc
    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError):
        raise ValueError("--compile needs a C++ compiler (g++ or clang++) on the PATH and found "
                         "none; install one or leave --compile out") from None


@dataclasses.dataclass
class Plan:
    """What a run will be, known before any process group forms and before any file is written."""
    args: argparse.Namespace
    config: ModelConfig
    resumed: Path | None  # the checkpoint that --resume goes on from
    source: Path | None   # the checkpoint that gives the weights: that one, or --init-from's
    device: torch.device
    tokenizer: object
    train_stream: object
    validation_stream: object
    batches: data.Batches
    validation: data.Batches


@dataclasses.dataclass
class Run(Plan):
    """What a run holds; set_up() makes it, train_step() advances it."""
    mesh: Mesh
    model: Transformer
    stages: pipeline.Pipeline | None  # with --pp: this rank's part of the model, and who runs it
    owner: object    # of master weights: optim.MixedPrecision or fsdp.Sharded
    reducer: object  # of gradients over ranks: ddp.Replicas, fsdp.Sharded, or None on one rank
    counted: list    # masters whose gradients this rank adds to the norm: each part stands once
    optimizer: optim.Optimizer
    scaler: optim.LossScaler
    peak_flops: float | None = None
    step: int = 0     # batches read; the place in the order of the data
    updates: int = 0  # optimizer updates; a step that the loss scaler skips moves no schedule
    tokens: int = 0   # tokens with a target seen so far
    stopping: bool = False  # some rank was asked to stop, and all know it


def prepare(args, report=print, restarted=False):
    """Check flags and input. Raises ValueError or OSError for what can't work. restarted: torchrun
    has begun this run before."""
    check_flags(args)
    resumed = find_resumed(args, restarted)
    source = resumed or (args.init_from and checkpoint.resolve(args.init_from)) or None
    config = choose_config(args, resumed, source)
    check_model(args, config)
    device = pick_device(args.device)
    refuse_too_large(args.model or "the model", config, device, training_bytes(args, config))
    tokenizer = data.load_tokenizer(args.tokenizer)
    data.check_vocabulary(tokenizer, config.vocab_size)
    streams = data.open_corpus(args.data, tokenizer, args.errors, progress=report)
    batches = [data.Batches(stream, args.seq_len, args.batch_size, args.seed, args.mask_boundaries,
                            args.isolate_documents) for stream in streams]
    if source:
        with torch.device("meta"):
            held = Transformer(config).state_dict()
        checkpoint.check_fit(source, {f"model.{k}": tuple(t.shape) for k, t in held.items()},
                             "model.")
    if resumed:
        check_same_data(args, resumed, streams[0])
    return Plan(args, config, resumed, source, device, tokenizer, *streams, *batches)


def set_up(args, report=print):
    """A run in this one process, ready for its first step. Raises as prepare() does."""
    run = build(prepare(args, report), Mesh(), report)
    run.peak_flops = measure_peak(run.device, args.dtype)
    return run


def build(plan, mesh, report=print):
    """Model, starting values or a checkpoint's, and optimizer, each rank its own part of them. One
    line a technique; each cuts or replaces what those before it have left."""
    args, stages = plan.args, None
    with torch.device("meta"):
        model = Transformer(plan.config)
    if args.compile:
        compile_regions(model)
    if args.pp > 1:
        stages = pipeline.split(model, mesh, args.pp_schedule, args.virtual_stages)
    tensor_parallel.parallelize(model, mesh)
    expert_parallel.parallelize(model, mesh)
    ring_attention.parallelize(model, mesh, args.seq_len, args.cp_method)
    apply_recompute(model, args.recompute)
    owner, reducer = (shard if args.zero else replicate)(plan, mesh, model, stages)
    optimizer = optim.Optimizer(
        args.optimizer, optim.parameter_groups(owner.named_masters(), args.weight_decay), args.lr)
    counted = [master for _, master in owner.named_masters()
               if counts_here(label_of(master), mesh)]
    run = Run(**vars(plan), mesh=mesh, model=model, stages=stages, owner=owner, reducer=reducer,
              counted=counted, optimizer=optimizer, scaler=optim.LossScaler(DTYPES[args.dtype]))
    if plan.resumed:
        load(run, plan.resumed, report)
    elif plan.source:
        checkpoint.load(plan.source, model_pieces(run), "model.")
        owner.refresh()
    return run


def shard(plan, mesh, model, stages):
    """fsdp.py: memory for this rank's shards, and their starting values. (owner, reducer)"""
    zero_buffers(model, plan.device)
    sharded = Sharded(model, mesh, plan.args.zero, DTYPES[plan.args.dtype], plan.device,
                      stages and stages.layer_names())
    fill(sharded.named_masters(), plan, mesh)
    return sharded, sharded


def replicate(plan, mesh, model, stages):
    """Memory and starting values, then ddp.py where other ranks hold the same. (owner, reducer)"""
    dtype, alone = DTYPES[plan.args.dtype], mesh["data"].size == mesh["edata"].size == 1
    take_memory(model, torch.promote_types(dtype, torch.float32), plan.device)
    zero_buffers(model, plan.device)
    fill(model.named_parameters(), plan, mesh)
    owner = optim.MixedPrecision(model, dtype, accumulate=alone)
    if alone:
        return owner, None
    return owner, Replicas(
        model, mesh["data"], {p: owner.copies.get(p, p) for p in model.parameters()},
        [model.get_parameter(name) for name in stages.twice] if stages else (), mesh["edata"])


@torch.no_grad()
def fill(named, plan, mesh):
    """Starting values for this rank's part of each parameter: named is (global name, tensor)."""
    for name, tensor in named:
        label = label_of(tensor)
        tensor.copy_(starting_part(plan.args.seed, name, label.shape, plan.config.init_std,
                                   local_region(label, mesh)))


def choose_config(args, resumed, source):
    """The model's configuration: --model's, or that of the checkpoint that a run begins with, with
    --override applied. Raises ValueError when a resumed run's would be another."""
    if not source:
        return make_config(args.model or "tiny", args.override)
    saved = ModelConfig(**checkpoint.read_run(source)["config"])
    base = make_config(args.model) if args.model else saved
    config = override_config(base, args.override)
    if resumed:
        before, now = dataclasses.asdict(saved), dataclasses.asdict(config)
        checkpoint.check_resume(before, now, list(before), "--model's or --override's {}")
    return config


def pick_device(name):
    """The torch.device of --device. Raises ValueError for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def available_memory(device):
    """Bytes that a program can still have on `device`; on a CPU caches that give way count."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def training_bytes(args, config):
    """Bytes per parameter of the whole model on this rank, on average: itself and, when training,
    gradient, master weight, optimizer state (the table of fsdp.py). tp cuts all but a few, ep and
    etp the experts, pp by blocks."""
    def held(cut, shards):
        return [size / cut / args.pp for size in bytes_held(
            1, 1 / shards, 1 / shards, args.zero, DTYPES[args.dtype].itemsize, shards)]
    experts = count_parameters(config)["routed experts"][0] / total_parameters(config)[0]
    shards, cut = args.fsdp * args.cp, args.ep * args.etp
    parameters, gradients, moments = (
        (1 - experts) * dense + experts * expert for dense, expert in zip(
            held(args.tp, shards), held(cut, shards * args.tp // cut)))
    if args.eval_only:  # levels 2 and 3 have their shard of the gradients from the start
        return parameters + (gradients if args.zero > 1 else 0)
    return parameters + gradients + (moments if args.optimizer == "adamw" else 0)


def refuse_too_large(name, config, device, bytes_each):
    """Raises ValueError when the parameters, at bytes_each, do not fit the device's free memory."""
    number, _ = total_parameters(config)
    free = available_memory(device)
    if device.type == "cpu":  # which the ranks of a machine share
        free /= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if number * bytes_each > free:
        raise ValueError(f"{name}: {number:,} parameters at {bytes_each:g} bytes each take "
                         f"{number * bytes_each / 1e9:,.1f} GB, and {device} has "
                         f"{free / 1e9:,.1f} GB free for this rank; use a smaller model or dtype, "
                         "more ranks with --fsdp, --tp or --ep, or a machine with more memory")


def find_resumed(args, restarted=False):
    """The checkpoint that a run goes on from, its flags checked; None for a new run. One that
    torchrun restarted goes on from its newest checkpoint without --resume, or anew if it has none.

    Raises ValueError when --out already holds a run that --resume was not given for, when there is
    nothing to resume, or when a flag would change the run.
    """
    if not args.resume and not (restarted and args.out):
        held = checkpoint.steps_in(Path(args.out, "checkpoints")) if args.out else []
        if held:
            raise ValueError(f"--out {args.out} already holds a run (checkpoint {held[0].name}); "
                             "add --resume to go on with it, or choose another folder")
        return None
    newest = checkpoint.newest(args.out)
    if newest is None and not args.resume:
        return None
    if newest is None:
        raise ValueError(f"--resume: no whole checkpoint in {args.out}; leave --resume out to "
                         "start a new run")
    # Without a decay, how many steps there will be changes none of them.
    same = [key for key in SAME_RUN if key != "steps" or args.lr_schedule != "constant"]
    if args.eval_only:  # nothing goes on
        same = ["tokenizer", "errors"]
    checkpoint.check_resume(checkpoint.read_run(newest)["flags"], vars(args), same)
    if args.stop_after and args.stop_after < int(newest.name.split("-")[1]):
        raise ValueError(f"--stop-after {args.stop_after} lies before the checkpoint {newest.name}")
    return newest


def measure_peak(device, dtype):
    """Peak FLOP/s that MFU is a fraction of: the data sheet's for a known GPU in 16 bits (None for
    others), this machine's own best matrix product on a CPU, measured now."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = next((GPU_PEAKS[key] for key in GPU_PEAKS if key in name), None)
        return peak * 1e12 if peak and dtype in ("bf16", "fp16") else None
    n = 512 if dtype in ("bf16", "fp16") else 1024  # processors without bf16 units are slow at it
    a = torch.ones(n, n, dtype=DTYPES[dtype])
    best = math.inf
    for _ in range(6):
        start = time.perf_counter()
        torch.nn.functional.linear(a, a)  # a @ a.T: there a @ a is many times slower in 16 bits
        best = min(best, time.perf_counter() - start)
    return 2 * n ** 3 / best


def keep_freed_memory():
    """Ask glibc to keep freed memory: by default each large tensor is returned to the system and
    page-faulted in again, which doubles the time of element-wise work on a CPU."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2 ** 31 - 1)


# ---- the loop ----

def train_step(run, asked=()):
    """One optimizer step on the global batch of run.step. Returns its metrics as a dict.

    asked: signals that this process has had; when any rank had one, run.stopping becomes True on
    all. Raises FloatingPointError when the loss, or without loss scaling a gradient, is not finite.
    """
    args, model, scale = run.args, run.model, run.scaler.scale
    start = time.perf_counter()
    ledger.clear()
    readers = run.mesh["batch"]
    count = args.batch_size // readers.size
    batch = run.batches.get(run.step, readers.rank * count, count)  # this rank's rows
    batch = own_positions(run, batch)
    valid = (batch.labels != data.IGNORED).sum().double().to(run.device) * speaks_for_batch(run)
    valid = int(all_reduce(valid, run.mesh["world"]))
    seed, balance_seed = scale / max(valid, 1), scale / args.batch_size
    loss = forward_backward(run, batch, seed, balance_seed)
    masters = [master for _, master in run.owner.named_masters()]
    tensor_parallel.sum_partial_gradients(masters, run.mesh["tp"])
    if run.stages:
        run.stages.sum_tied_gradients(masters)
    loss, norm, balance_loss, busy, counts = sum_over_ranks(run, loss * speaks_for_batch(run),
                                                            asked)
    loss, norm = loss / max(valid, 1), norm / scale
    stop_if_not_finite(run, "loss", loss)
    overflow = not math.isfinite(norm)
    if not run.scaler.active:
        stop_if_not_finite(run, "gradient norm", norm)

    lr = optim.learning_rate(run.updates, args.steps, args.lr, args.min_lr, args.warmup,
                             args.lr_schedule)
    if not overflow:
        update(run, masters, lr, norm, scale)
    run.optimizer.zero_grad()
    reset_counts(model)
    run.scaler.update(overflow)
    run.step += 1
    run.tokens += valid
    seconds = time.perf_counter() - start
    return metrics(run, loss, norm, lr, seconds, counts, balance_loss / args.batch_size, busy,
                   overflow)


def speaks_for_batch(run):
    """Whether this rank is the one whose losses and counts stand for its batch in sums over all
    ranks: those of a tp group know the same, and of a pipeline's only the last stage's the loss."""
    return run.mesh["tp"].rank == 0 and (run.stages is None or run.stages.has_last)


def forward_backward(run, batch, seed, balance_seed):
    """The microbatches of this rank's rows, one after the other or by the pipeline's schedule; all
    gradients are then summed over the ranks. Returns this rank's summed token loss."""
    size, count, losses = run.args.micro_batch_size, len(batch.tokens), []
    rows = [slice(first, first + size) for first in range(0, count, size)]
    bracket = run.owner.microbatch if run.args.zero else lambda *_: contextlib.nullcontext()
    if run.reducer and not run.args.zero:
        run.reducer.start(len(rows))
    if run.stages:
        losses = run.stages.train(
            len(rows), lambda stage, i, x: token_loss(run, batch, rows[i], seed, balance_seed,
                                                      stage, x),
            lambda i: blank(run, len(batch.tokens[rows[i]])), seed,
            lambda last, stage: bracket(last, run.stages.stages.index(stage)))
    else:
        for part in rows:
            with bracket(part is rows[-1]):
                loss = token_loss(run, batch, part, seed, balance_seed)
                loss.backward(torch.full_like(loss, seed))
            losses.append(loss.detach())
            del loss  # and with it its graph, before the next one's is made
    if run.reducer:
        run.reducer.finish()
    return sum(loss.item() for loss in losses)


def blank(run, sequences):
    """Memory for the hidden states of so many sequences, as they travel between stages: of this
    rank's positions, which its neighbours of the pipeline have too."""
    length = tensor_parallel.shard_length(len(context_positions(run)), run.mesh["tp"])
    return torch.empty(sequences, length, run.model.config.dim, dtype=DTYPES[run.args.dtype],
                       device=run.device)


def own_positions(run, batch):
    """Of each sequence the positions that this rank has under cp; document ids stay whole."""
    positions = context_positions(run)
    return batch._replace(tokens=batch.tokens[:, positions], labels=batch.labels[:, positions])


def context_positions(run):
    axis = run.mesh["cp"]
    return ring_attention.Slices(axis, run.args.seq_len).positions(axis.rank)


def token_loss(run, batch, rows, seed=1.0, balance_seed=0.0, stage=None, x=None):
    """Token loss summed over some rows of a batch, which come to the device for it (document ids
    where attention wants them). Of a pipeline rank: a stage's output, given the one before's."""
    tokens, labels, document_ids = (None if t is None else t[rows] for t in batch)
    tokens, labels = (t.to(run.device, non_blocking=True) for t in (tokens, labels))
    if run.stages:
        return run.stages.forward(run.model, stage, x, tokens, labels, context_positions(run),
                                  document_ids, seed, balance_seed)
    hidden = run.model(tokens, context_positions(run), document_ids, balance_seed)
    return run.model.head_loss(hidden, labels, seed)


def sum_over_ranks(run, loss, asked):
    """The step's sums: token loss, gradient norm (scaled as the gradients are), balance loss, the
    seconds that pipeline stages worked, and the token counts of all MoE layers (layers, e), which
    those of this rank get in place. One message: all of it is a few numbers in float64.

    A part that several ranks hold is counted on the first of them (run.counted).
    """
    norm, config = float(optim.gradient_norm(run.counted)), run.model.config
    # global index of a block -> its layer, where it is here
    here = {int(name): block.ffn for name, block in run.model.blocks.items() if block.is_moe}
    moe = range(config.n_layers - config.n_moe_layers(), config.n_layers)
    balance = sum(float(layer.balance_loss) for layer in here.values())
    nothing = torch.zeros(config.num_experts, dtype=torch.float64, device=run.device)
    busy = run.stages.seconds()[0] if run.stages else 0.0
    sums = torch.tensor([loss, norm * norm, balance, busy, float(bool(asked))],
                        dtype=torch.float64, device=run.device)
    sums = torch.cat([sums, *(here[i].tokens_per_expert.double() if i in here else nothing
                              for i in moe)])
    sums = all_reduce(sums, run.mesh["world"])
    counts = sums[5:].view(len(moe), config.num_experts)
    for i, row in zip(moe, counts):
        if i in here:
            here[i].tokens_per_expert.copy_(row)
    loss, square, balance, busy, stopping = sums[:5].tolist()
    run.stopping = stopping > 0
    return loss, math.sqrt(square) if square >= 0 else math.nan, balance, busy, counts


def update(run, masters, lr, norm, scale):
    """Unscale, clip, step, and move the experts' biases. A skipped step does none of it."""
    grads = [master.grad for master in masters if master.grad is not None]
    if scale != 1:
        torch._foreach_mul_(grads, 1 / scale)
    if run.args.clip:
        optim.clip_(masters, norm, run.args.clip)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.owner.refresh()
    update_expert_bias(run.model, run.model.config.bias_update_speed)
    run.updates += 1


def stop_if_not_finite(run, what, number):
    if not math.isfinite(number):
        first = run.step * run.args.batch_size
        raise FloatingPointError(
            f"step {run.step + 1}: the {what} is {number}, on sequences {first} to "
            f"{first + run.args.batch_size - 1} of the data order (seed {run.args.seed}); "
            f"{what_stands(run.args.out)}. Try a smaller --lr, --clip 1, or --dtype fp32")


@torch.no_grad()
def evaluate(run):
    """Mean token loss over the first EVAL_SEQUENCES of the validation split, in order, divided
    among the ranks."""
    readers, sums = run.mesh["batch"], torch.zeros(2, dtype=torch.float64, device=run.device)
    for batch in run.validation.in_order(EVAL_SEQUENCES):
        batch = own_positions(run, batch)
        share, size = -(-len(batch.tokens) // readers.size), run.args.micro_batch_size
        begin, stop = (min(r * share, len(batch.tokens)) for r in (readers.rank, readers.rank + 1))
        starts = range(readers.rank * share, (readers.rank + 1) * share, size)
        # where nothing is left, other ranks need this one all the same to gather with
        rows = [slice(i, min(i + size, stop)) if i < stop else slice(0, 1) for i in starts]
        if run.stages:
            losses = run.stages.evaluate(
                len(rows), lambda stage, i, x: token_loss(run, batch, rows[i], stage=stage, x=x),
                lambda i: blank(run, len(batch.tokens[rows[i]])))
        else:
            losses = [token_loss(run, batch, part) for part in rows]
        if speaks_for_batch(run):
            sums[0] += sum(loss.double() for i, loss in zip(starts, losses) if i < stop)
            sums[1] += (batch.labels[begin:stop] != data.IGNORED).sum()
    total, count = all_reduce(sums, run.mesh["world"]).tolist()
    return total / count


def metrics(run, loss, norm, lr, seconds, counts, balance_loss, busy, skipped):
    """A line of metrics.jsonl, with the same keys in every layout: losses are per token, mfu counts
    causal attention alone, memory and sent bytes are this rank's. counts: the step's tokens
    (layers, e); busy: the seconds that all ranks' stages worked. The load of each expert, which are
    many numbers, is in every --log-every-th line."""
    args, config = run.args, run.model.config
    rate = args.batch_size * args.seq_len / seconds
    flops = flops_per_token(config, args.seq_len)
    found = {"step": run.step, "loss": loss, "grad_norm": norm, "lr": lr, "tokens": run.tokens,
             "tokens_per_second": rate,
             "mfu": (rate * flops / (run.peak_flops * run.mesh.world_size)
                     if run.peak_flops else None),
             "memory_bytes": memory_bytes(run.device), "bubble": bubble(run, busy),
             "comm_bytes": dict.fromkeys(run.mesh.axes, 0) | ledger.by_axis()}
    if config.num_experts:
        found.update(max_vio=max_violation(counts), balance_loss=balance_loss)
        if run.step % args.log_every == 0:
            found.update(expert_load=expert_load(counts))
    if run.scaler.active:
        found.update(loss_scale=run.scaler.scale, skipped=skipped)
    return found


def bubble(run, busy):
    """The part of a pipeline's time that its ranks waited for one another, on average; 0 without a
    pipeline. busy: seconds that all ranks worked off their lists, without the waits in between.

    The time of the whole is this rank's: rank 0 has the first stage, whose forward begins the step
    and whose backward ends it, in every schedule.
    """
    if not run.stages:
        return 0.0
    return max(0.0, 1 - busy / (run.mesh.world_size * run.stages.seconds()[1]))


def memory_bytes(device):
    """Peak bytes: of the allocator on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def progress_line(found, args, run):
    """What a person sees of a step."""
    left = (last_step(args) - found["step"]) * args.batch_size * args.seq_len
    line = (f"step {found['step']:>{len(str(args.steps))}}/{args.steps}  loss {found['loss']:.4f}  "
            f"norm {found['grad_norm']:.3f}  lr {found['lr']:.2e}  "
            f"{found['tokens_per_second']:,.0f} tok/s")
    if found["mfu"] is not None:
        config = run.model.config
        whole = flops_per_token(config, args.seq_len, causal=False) / flops_per_token(
            config, args.seq_len)
        line += f"  mfu {found['mfu']:.1%} (non-causal {found['mfu'] * whole:.1%})"
    if "max_vio" in found:
        line += f"  maxvio {found['max_vio']:.2f}"
    if found.get("skipped"):
        line += f"  skipped, loss scale now {found['loss_scale']:g}"
    return line + f"  {left / found['tokens_per_second']:.0f} s left"


# ---- files ----

def piece(tensor, master, mesh):
    """This rank's part of what belongs to a parameter: itself, or its optimizer state."""
    label = label_of(master)
    return checkpoint.Piece(tensor, label.shape, [s for s, _ in local_region(label, mesh)])


def model_pieces(run):
    """`model.<name>` -> master weights, and the buffers that are part of the model's state."""
    pieces = {f"model.{name}": t for name, t in run.model.state_dict().items()}
    pieces.update((f"model.{name}", piece(master, master, run.mesh))
                  for name, master in run.owner.named_masters())
    return pieces


def saved_tensors(run):
    """Global name -> what this rank holds of it: the model's, and the optimizer's state."""
    masters = dict(run.owner.named_masters())
    tensors = model_pieces(run)
    for name, tensor in checkpoint.optimizer_tensors(run.optimizer, masters).items():
        if tensor.dim():
            tensor = piece(tensor, masters[name.split(".", 2)[2]], run.mesh)
        tensors[name] = tensor
    return tensors


def checkpoint_of(run):
    """What checkpoint.save() is to write now: its arguments."""
    state = {"step": run.step, "updates": run.updates, "tokens": run.tokens,
             "config": dataclasses.asdict(run.model.config), "flags": vars(run.args),
             "data": run.train_stream.fingerprint, "loss_scaler": run.scaler.state_dict(),
             "threads": torch.get_num_threads(), "torch": torch.__version__}
    return run.args.out, run.step, saved_tensors(run), state, run.args.keep


def save_group(run):
    """A gloo group of all ranks for the thread that saves; None for one rank. Its messages wait for
    the slowest rank's files, on gloo also where training talks over nccl."""
    if run.mesh.world_size == 1:
        return None
    return dist.new_group(backend="gloo", timeout=time_limit(run.args))


class Saver:
    """Writes a run's checkpoints into --out; with --async-save in a thread, while training goes on.

    A save that fails is a warning, or with --strict-save an OSError. What has become of a save in
    the thread is said at the next one or, on the rank that speaks, after the step in which it was
    known; with --strict-save all ranks then stop after the same step, as for a signal.
    """

    def __init__(self, run):
        self.run, self.step = run, run.step  # of the newest save, or of where the run began
        self.written = run.step              # of the newest that succeeded
        self.background = checkpoint.Background(save_group(run)) if run.args.async_save else None

    def save(self):
        """The checkpoint of this step; one at a time."""
        self.finish()
        self.step = self.run.step
        if self.background:
            self.background.save(*checkpoint_of(self.run))
        else:
            self._attempt(lambda: checkpoint.save(*checkpoint_of(self.run)))

    def look(self):
        """After a step: whether a save has failed and --strict-save wants the run to end. Without
        it, a failure is told."""
        if not (self.background and self.background.failed()):
            return False
        if not self.run.args.strict_save:
            self.finish()
        return self.run.args.strict_save

    def finish(self):
        """Return when no save is under way any more."""
        if self.background and self.background.running:
            self._attempt(self.background.wait)

    def close(self):
        """After the last step: save it, if it is not saved. Raises OSError when that fails."""
        self.finish()
        if self.run.args.out and self.step != self.run.step:
            self.save()
            self.finish()
        if self.run.args.out and self.written != self.run.step:
            raise OSError(f"the steps after step {self.written} are lost: "
                          f"{what_stands(self.run.args.out)}")

    def _attempt(self, save):
        try:
            save()
            self.written = self.step
        except OSError as error:
            what = f"checkpoint of step {self.step} not written ({error})"
            if self.run.args.strict_save:
                raise OSError(f"{what}; --strict-save ends the run here") from error
            ended = self.run.stopping or self.run.step == last_step(self.run.args)
            if self.run.mesh.rank == 0:
                print(f"warning: {what}" + ("" if ended else "; training goes on. --strict-save "
                      "would stop here"), file=sys.stderr, flush=True)


def check_same_data(args, path, stream):
    """Raises ValueError when a resumed run would read another text than it began with."""
    state = checkpoint.read_run(path)
    if state["data"] != stream.fingerprint:
        raise ValueError(f"--resume: --data was {state['flags']['data']} and is now "
                         f"{args.data}, and the text is not the same: a resumed run would read "
                         "other batches. Restore it, or start a new run with --init-from")


def load(run, path, report=print):
    """Bring a run to where a checkpoint left it, whatever layout wrote it."""
    state = checkpoint.read_run(path)
    if state["threads"] != torch.get_num_threads():
        report(f"warning: {path.name} was written with {state['threads']} threads and this run has "
               f"{torch.get_num_threads()}; rounding may differ, the run is otherwise the same")
    checkpoint.load(path, saved_tensors(run))
    run.owner.refresh()
    run.scaler.load_state_dict(state["loss_scaler"])
    run.step, run.updates, run.tokens = state["step"], state["updates"], state["tokens"]
    report(f"resumed from {path} after step {run.step}")


def open_metrics(run):
    """metrics.jsonl, cut back to the steps that the checkpoint knows, ready to be added to.

    Cut where it stands: whenever this is killed, the lines that are to be kept are there. Locked,
    so that no second run writes into the folder.
    """
    folder = Path(run.args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path, kept = folder / "metrics.jsonl", 0
    file = path.open("ab", buffering=0)  # a write tells how much of it the disk took
    take_lock(file, fcntl.LOCK_EX, run.args.out)
    if path.exists() and run.step:
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                known = json.loads(line)["step"] <= run.step and line.endswith(b"\n")
            except ValueError:  # the last line of a killed run, written half
                known = False
            if not known:
                break
            kept += len(line)
    file.truncate(kept)
    return file


class Logger:
    """Progress lines for a person, metrics.jsonl and tensorboard for programs."""

    def __init__(self, run):
        self.run, self.unwritten = run, b""
        self.speaks = run.mesh.rank == 0
        self.file = open_metrics(run) if run.args.out and self.speaks else None
        self.board = None
        if run.args.tensorboard and self.speaks:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(run.args.out, purge_step=run.step + 1)

    def step(self, found):
        """Write a step's metrics; show every --log-every-th to the person."""
        if self.file:
            self._write(json.dumps(found).encode() + b"\n")
        if self.board:
            for name, number in scalars(found):
                self.board.add_scalar(name, number, found["step"])
        step, args = found["step"], self.run.args
        shown = step % args.log_every == 0 or step in (1, last_step(args)) or found.get("skipped")
        if shown and self.speaks:
            print(progress_line(found, args, self.run), flush=True)

    def _write(self, line):
        """Add a line to metrics.jsonl. What a full disk does not take waits for room there, and
        training goes on; with --strict-save OSError is raised."""
        had_room, self.unwritten = not self.unwritten, self.unwritten + line
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten):]
        except OSError as error:
            if self.run.args.strict_save:
                raise
            if had_room:
                print(f"warning: metrics of step {self.run.step} not written ({error}); they wait "
                      "for room on the disk. --strict-save would stop here", file=sys.stderr,
                      flush=True)

    def close(self):
        if self.unwritten:
            print("warning: there was no room for the last lines of metrics.jsonl, "
                  f"{len(self.unwritten):,} bytes", file=sys.stderr, flush=True)
        for writer in (self.file, self.board):
            if writer:
                writer.close()


def scalars(found, prefix=""):
    """(name, number) of a step's metrics, `comm_bytes/tp` of those that are an object; lists are
    left out."""
    for name, item in found.items():
        if isinstance(item, dict):
            yield from scalars(item, f"{prefix}{name}/")
        elif isinstance(item, (int, float)):
            yield prefix + name, item


def last_step(args):
    return min(args.steps, args.stop_after or args.steps)


def train(run, told=None):
    """The loop: steps until the last one or a signal, with validations and checkpoints between.

    told: by signals, to stop. Returns True when it came to the end of the run, False when it was
    asked to stop. Raises OSError when the run's last state could not be saved.
    """
    args, told = run.args, told or Told(run.args)
    torchrun = dist.is_torchelastic_launched() and os.getppid()
    logger, saver = Logger(run), Saver(run)
    told.at = None
    with profiler(run) as profile:
        try:
            while run.step < last_step(args) and not run.stopping:
                if torchrun and os.getppid() != torchrun:  # no one would end or restart this rank
                    told.why = "torchrun is gone"
                logger.step(train_step(run, told.why or saver.look()))
                if profile:
                    profile.step()
                if args.save_every and run.step % args.save_every == 0:
                    saver.save()
                if args.eval_every and run.step % args.eval_every == 0 and run.step < args.steps:
                    loss = evaluate(run)
                    if run.mesh.rank == 0:
                        print(f"step {run.step}  validation loss {loss:.4f}", flush=True)
        except FloatingPointError:  # of sums over all ranks: a save under way is whole all the same
            saver.finish()
            raise
        logger.close()
        saver.close()
    if not run.stopping:
        told.at = "after the last step"
    elif run.mesh.rank == 0:
        print(f"{told.why or 'another rank was told to stop'}: stopped after step {run.step}" + (
            f", saved in {args.out}; --resume goes on from here" if args.out else ""), flush=True)
    return run.step >= args.steps and not run.stopping


class Told:
    """What signals tell this process: a context in which SIGTERM and SIGINT do not end it there and
    then. `why`: what the run is to stop for, None at first. At its steps it does so after the next;
    watch() sees to the rest.

    A rank that waits in a collective for one that is gone would not even notice a signal: Python
    runs handlers between two of its own instructions. So the system also writes its number into a
    socket, at which a thread waits. store: of the ranks, to leave a sign of life in.
    """

    def __init__(self, args, store=None):
        self.args, self.store, self.why = args, store, None
        self.at = "before the first step"  # None: at the steps, or saving them

    def __enter__(self):
        self.over, (reader, self.writer) = threading.Event(), socket.socketpair()
        self.writer.setblocking(False)
        self.before = {number: signal.signal(number, lambda *_: None)
                       for number in (signal.SIGTERM, signal.SIGINT)}
        self.fd_before = signal.set_wakeup_fd(self.writer.fileno())
        threading.Thread(target=self.watch, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, kind, *_):
        for number, handler in self.before.items():
            # torchrun sends SIGTERM as soon as another rank has died, when this is about to say who
            signal.signal(number, signal.SIG_IGN if kind is CollectiveError else handler)
        signal.set_wakeup_fd(self.fd_before)
        self.over.set()
        self.writer.close()

    def watch(self, reader):
        """From the first signal on: when --stop-timeout has passed, end the process if it waits all
        that time for other ranks (nothing is saved: the last checkpoint stands), or if there are no
        steps now after which it could stop, and nothing to save."""
        number = reader.recv(1)
        if not number:  # closed: there was none
            return
        self.why, told = signal.Signals(number[0]).name, time.monotonic()
        limit, (rank, world_size) = self.args.stop_timeout, launched()
        # a thread, since the store's lock is taken while a collective waits in it
        sign = threading.Thread(target=self.sign, args=(rank,), daemon=True)
        while not self.over.wait(0.2):
            now, waiting = time.monotonic(), ledger.waiting
            if waiting and self.store and not sign.ident:
                sign.start()
            if self.at and (now - told > limit or world_size == 1):
                self.end_outside_steps(rank, number[0])
            if waiting and now - max(waiting[2], told) > limit:
                print(f"train.py: told to stop, and {waiting[0]} over {waiting[1]} took longer than"
                      f" --stop-timeout {limit:g} s; ending without saving", file=sys.stderr)
                os._exit(1)

    def sign(self, rank):
        """For end_abandoned() on other ranks: this one is there, and may not notice for long."""
        with contextlib.suppress(RuntimeError):  # the store is a process too
            self.store.set(f"waits/{rank}", "")

    def end_outside_steps(self, rank, number):
        """A training run has lost nothing then; others have not done what they were started for."""
        trains = not (self.args.eval_only or self.args.check_parity)
        if rank == 0:
            print(f"{self.why} {self.at}: ended, {what_stands(self.args.out)}" if trains
                  else f"{self.why}: ended", flush=True)
        os._exit(0 if trains else 128 + number)


def profiler(run):
    """--profile: a chrome trace of the third to the fifth step of every rank."""
    if not run.args.profile:
        return contextlib.nullcontext()
    path = Path(run.args.out, f"trace-{run.mesh.rank}.json" if run.mesh.rank else "trace.json")
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)))


def describe(run):
    """What this run is, before its first line of progress."""
    args, config = run.args, run.model.config
    total, active = total_parameters(config)
    print(f"{args.model or 'tiny'}: {total:,} parameters, {active:,} active per token; "
          f"{args.dtype} on {run.device}, {torch.get_num_threads()} threads")
    if run.mesh.world_size > 1:
        print(f"layout: {run.mesh.world_size} ranks as {run.mesh}, zero {args.zero}; order: build "
              "on meta, pipeline, tensor, expert, context, recompute, "
              f"{'shard, values' if args.zero else 'values, replicate'}, optimizer")
    print(f"data: {run.train_stream.name}: {run.train_stream.n_tokens:,} tokens to train on, "
          f"{run.validation_stream.n_tokens:,} to validate on; tokenizer {args.tokenizer}")
    if run.peak_flops:
        kind = "data sheet" if run.device.type == "cuda" else "measured matrix product"
        print(f"peak for MFU: {run.peak_flops / 1e9:,.0f} GFLOP/s ({kind})")
    print("flags: " + " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}"
                               for k, v in vars(args).items()
                               if v not in (None, False, [])), flush=True)


def report_validation(run):
    """The validation loss beside what counting letters and pairs of letters would reach."""
    loss = evaluate(run)
    if run.mesh.rank:
        return loss
    unigram, bigram = data.ngram_entropies(
        run.train_stream, run.validation_stream, run.tokenizer.n_vocab,
        limit=EVAL_SEQUENCES * run.args.seq_len)
    print(f"validation loss {loss:.4f} nats per token; the corpus's own entropies: unigram "
          f"{unigram:.4f}, bigram {bigram:.4f}", flush=True)
    return loss


def bench(name, rounds=5):
    """Print MFU of whole steps of a preset, the machine's peak measured anew beside each."""
    args = build_parser().parse_args(["--model", name])
    run = set_up(args, report=lambda text: None)
    train_step(run)
    fractions = []
    for _ in range(rounds):
        peak = measure_peak(run.device, args.dtype)
        found = train_step(run)
        fractions.append(found["mfu"] * run.peak_flops / peak)
    print(f"{name}: MFU {statistics.median(fractions):.1%} of {peak / 1e9:.0f} GFLOP/s, "
          f"{found['tokens_per_second']:,.0f} tokens/s, {torch.get_num_threads()} threads")


# ---- sampling from a checkpoint: python model.py generate ----

def check_sampling(args):
    """Raises ValueError for numbers that no sampling can have."""
    for name, right, rule in (("temperature", 0 <= args.temperature < math.inf, "at least 0"),
                              ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1"),
                              ("top_k", args.top_k >= 0, "at least 0 (0: all)"),
                              ("max_new_tokens", args.max_new_tokens >= 0, "at least 0")):
        if not right:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be {rule}")


def generate_command(args):
    """Load a checkpoint, stream a continuation of the prompt to the terminal."""
    check_sampling(args)
    path = checkpoint.resolve(args.checkpoint)
    run = checkpoint.read_run(path)
    config = ModelConfig(**run["config"])
    spec = args.tokenizer or run["flags"]["tokenizer"]
    if not spec:
        raise ValueError(f"{path} was imported and does not know its tokenizer; add --tokenizer, "
                         "an encoding's name or a .tiktoken file")
    tokenizer = data.load_tokenizer(spec)
    prompt = tokenizer.encode_ordinary(args.prompt) or [tokenizer.eot_token]
    data.check_vocabulary(tokenizer, config.vocab_size)
    device, dtype = pick_device(args.device), DTYPES[args.dtype]
    refuse_too_large(args.checkpoint, config, device, dtype.itemsize)
    with torch.device("meta"):
        model = Transformer(config)
    take_memory(model, dtype, device)
    checkpoint.load_model(path, model)
    generator = torch.Generator().manual_seed(args.seed)

    def choose(logits):
        logits[:, tokenizer.n_vocab:] = -math.inf  # rows of the head that no text uses
        return sample(logits, args.temperature, args.top_k, args.top_p, generator)

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(args.prompt, end="", flush=True)
    for chosen in generate(model, torch.tensor([prompt], device=device), args.max_new_tokens,
                           choose):
        if chosen.item() == tokenizer.eot_token:
            break
        text = tokenizer.decode_single_token_bytes(chosen.item())
        print(decoder.decode(text), end="", flush=True)
    print(decoder.decode(b"", final=True))


# ---- is this layout the same run? ----

def quiet(*text, **options):
    pass


def parity_steps(plan, mesh, steps=3):
    """Losses, gradient norms, MaxVio, and this rank's parts of all gradients and weights of some
    steps, (kind, name) -> tensor or checkpoint.Piece.

    Norms, biases and router are randomised first: as they start, they would hide errors of scale.
    """
    run, found = build(plan, mesh, quiet), {}
    masters = dict(run.owner.named_masters())
    with torch.no_grad():
        for name, master in masters.items():
            label = label_of(master)
            noise = full_value(plan.args.seed, f"{name}.parity.noise", label.shape, 0.1)
            master += local_part(noise, label, mesh)
        for name, bias in run.model.named_buffers():
            if name.endswith("expert_bias"):
                bias += full_value(plan.args.seed, f"{name}.parity.noise", bias.shape, 0.1).to(
                    plan.device)
    run.owner.refresh()

    def keep_gradients_and_step(step=run.optimizer.step):
        found.update((("gradient", f"{name}, step {run.step + 1}"), piece(
            master.grad.clone(), master, mesh)) for name, master in masters.items())
        step()
    run.optimizer.step = keep_gradients_and_step
    for _ in range(steps):
        metrics = train_step(run)
        for kind in ("loss", "grad_norm", "max_vio", "balance_loss"):
            if kind in metrics:
                found[kind, f"step {run.step}"] = torch.tensor([metrics[kind]], dtype=torch.float64)
    found.update((("weight", name), piece(master, master, mesh))
                 for name, master in masters.items())
    return found


def assemble(found, mesh):
    """The full tensors of parity_steps() on rank 0, from the ranks' pieces; None elsewhere. Where
    several ranks hold a number and theirs differ, it is infinite: no reference can equal it."""
    parts = [None] * mesh.world_size if mesh.rank == 0 else None
    if mesh.world_size > 1:
        with attributed(mesh["world"], "gather"):
            dist.gather_object(found, parts)
    else:
        parts = [found]
    if mesh.rank:
        return None
    whole = {}
    for part in parts:
        for key, item in part.items():
            if not isinstance(item, checkpoint.Piece):
                whole[key] = item
                continue
            full = whole.setdefault(key, torch.full(item.shape, math.nan, dtype=torch.float64))
            region = tuple(slice(s, s + n) for s, n in zip(item.start, item.local.shape))
            apart = (full[region] - item.local).abs() > 1e-9 * item.local.abs()
            full[region] = item.local.double().masked_fill(apart, math.inf)
    return whole


def worst_differences(ours, reference):
    """Kind -> (largest max |a - b| / max |b| of its tensors, the name of that tensor).

    A tensor that should be zero is rounding in both (the query's gradient when a token sees itself
    alone): max |b| counts as at least a millionth of the kind's largest number, which forgives
    differences of 1e-15 of that.
    """
    worst, largest = {}, {}
    for (kind, _), expected in reference.items():
        largest[kind] = max(largest.get(kind, 1e-300), expected.abs().max().item())
    for (kind, name), expected in reference.items():
        spread = (ours[kind, name] - expected).abs().max() / expected.abs().max().clamp(
            min=1e-6 * largest[kind])
        value = math.inf if spread.isnan() else spread.item()
        worst[kind] = max(worst.get(kind, (-1, "")), (value, name))
    return worst


def check_parity(plan, mesh, report=print):
    """Run 3 steps in this layout, then on rank 0 the same in one process; report the largest
    differences. Returns the exit code, the same on every rank."""
    ours, code = assemble(parity_steps(plan, mesh), mesh), [0]
    if mesh.rank == 0:
        sizes = dict.fromkeys(layout_of(plan.args), 1)
        args = argparse.Namespace(**{**vars(plan.args), **sizes, "zero": 0, "pp_schedule": "1f1b",
                                     "virtual_stages": 1})
        alone = Mesh()
        reference = assemble(parity_steps(dataclasses.replace(plan, args=args), alone), alone)
        worst = worst_differences(ours, reference)
        report(f"3 steps of {mesh.world_size} ranks as {mesh}, zero {plan.args.zero}, beside one "
               "process, in float64; largest relative differences:")
        for kind, (difference, name) in worst.items():
            report(f"{difference:8.1e}  {kind} ({name})")
        code = [int(set(ours) != set(reference) or any(  # MaxVio comes from whole numbers
            found > (0 if kind == "max_vio" else 1e-9) for kind, (found, _) in worst.items()))]
        report("FAILED: this layout is not the same run" if code[0] else "PASS")
    if mesh.world_size > 1:
        with attributed(mesh["world"], "broadcast"):
            dist.broadcast_object_list(code)
    return code[0]


# ---- beginning and end of a process ----

def find_store(patience):
    """The store that all ranks reach, and that outlives a failed collective; None for a process
    that was started alone. Raises OSError when it is not there within `patience` seconds."""
    if launched()[1] == 1 and not dist.is_torchelastic_launched():
        return None
    try:
        return next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=patience)))[0]
    except dist.DistError as error:
        raise OSError(gone(error)) from None


def gone(error):
    """Of a store that can't be reached."""
    return (f"no answer from torchrun's store at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']}: {str(error).splitlines()[0]}")


def meet(store, rank, world_size, patience):
    """The part of the store that this start of the ranks alone uses. Raises OSError when ranks do
    not come within `patience` seconds.

    torchrun's own store outlives a restart, and so do the addresses in it of processes that are
    gone; nor do its agents on several nodes count restarts alike. So each rank names itself anew,
    and rank 0 answers every name with its own, until all have confirmed it.
    """
    mine, until = os.urandom(8).hex(), time.monotonic() + patience
    if rank:
        store.set(f"hello/{rank}", mine)
        while not store.check([mine]):  # whoever is not needed, torchrun ends
            if time.monotonic() > until:
                raise OSError(f"rank 0 did not start within {patience:g} s (--collective-timeout)")
            time.sleep(0.005)
        first = store.get(mine).decode()
        store.set(f"{first}/{rank}", "here")
        return dist.PrefixStore(first, store)
    late = set(range(1, world_size))
    while late := {r for r in late if not store.check([f"{mine}/{r}"])}:
        for name in [store.get(f"hello/{r}").decode() for r in late if store.check([f"hello/{r}"])]:
            store.set(name, mine)
        if time.monotonic() > until:
            raise OSError(f"rank {', '.join(map(str, sorted(late)))} did not start within "
                          f"{patience:g} s (--collective-timeout)")
        time.sleep(0.005)
    return dist.PrefixStore(mine, store)


def time_limit(args):
    """--collective-timeout, for every group: none inherits it from the world's."""
    return datetime.timedelta(seconds=args.collective_timeout)


def join(plan, store):
    """Form the process group of the ranks that torchrun started. Returns their part of the store;
    None for one rank. Raises as meet() does."""
    rank, world_size = launched()
    if world_size == 1:
        return None
    store = meet(store, rank, world_size, plan.args.collective_timeout)
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    dist.init_process_group(
        "nccl" if plan.device.type == "cuda" else "gloo", rank=rank, world_size=world_size,
        store=dist.PrefixStore("group", store), timeout=time_limit(plan.args))
    return store


def end_failed(store, rank, text):
    """A failure of this rank's own: say so, once if all ranks fail alike, and end at once. A group
    that is in the middle of a collective can't be taken down in order."""
    if store.add("failures", 1) == 1:
        print(text, file=sys.stderr, flush=True)
    store.set(f"ended/{rank}", "with its own error")
    os._exit(1)


def what_stands(out):
    """What a run that ended without saving can go on from, in words."""
    held = checkpoint.steps_in(Path(out, "checkpoints")) if out else []
    if held:
        return f"--resume goes on from the last checkpoint, {held[0].name}"
    return "no checkpoint had been written yet" + ("" if out else " (--out DIR keeps them)")


def end_abandoned(store, rank, world_size, error, out, patience=4.0):
    """A collective failed because another rank is gone: find out which, say it once, and end."""
    try:
        store.set(f"ended/{rank}", "in a collective")
        until, others = time.monotonic() + patience, [r for r in range(world_size) if r != rank]

        def without(*signs):
            return [r for r in others if not any(store.check([f"{s}/{r}"]) for s in signs)]
        # one that waits for this very rank does not notice before this one ends
        while without("ended", "waits") and time.monotonic() < until:
            time.sleep(0.1)
        gone = without("ended", "waits") or without("ended")
        speaks = store.add("failures", 0) == 0 and store.add("abandoned", 1) == 1
    except RuntimeError:  # DistStoreError: the store is a process too
        gone, speaks = ["that keeps the store (rank 0)"], True
    if speaks:
        fate = "it died or is stuck" if len(gone) == 1 else "one of them died or is stuck"
        who = (f"no sign of rank {', '.join(map(str, gone))}: {fate}" if gone
               else "every rank is still there")
        print(f"train.py: {error}\ntrain.py: {who}; ended without saving, {what_stands(out)}",
              file=sys.stderr, flush=True)
    os._exit(1)


def run_plan(plan, report, store, told):
    """Everything after the group has formed. Returns the exit code."""
    args, (rank, world_size) = plan.args, launched()
    mesh = Mesh(world_size, rank, time_limit(args), **layout_of(args))
    if args.check_parity:
        return check_parity(plan, mesh, report)
    try:
        run = build(plan, mesh, report)
    except ValueError as error:  # a checkpoint that does not fit, the same on every rank
        report(f"train.py: {error}", file=sys.stderr)
        return 2
    run.peak_flops = measure_peak(run.device, args.dtype)
    if mesh.rank == 0:
        describe(run)
        if store:
            store.set(BEGUN, args.out or "")
    try:
        if args.eval_only or train(run, told):
            report_validation(run)
    except FloatingPointError as error:  # of sums over all ranks, so every rank is here
        report(f"train.py: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv=None):
    """Check, form the group, train, validate. Returns the exit code."""
    args = build_parser().parse_args(argv)
    keep_freed_memory()
    rank, world_size = launched()
    report = print if rank == 0 else quiet  # one rank speaks for all
    launch = store = None
    try:
        launch = find_store(min(max(1, args.collective_timeout), 1e9))
        plan = prepare(args, report, restarted=launch is not None and launch.check([BEGUN]))
    except (ValueError, OSError) as error:
        if launch and launch.add(f"refused {rank}: {error}", 1) > 1:
            return 2  # torchrun has started this again, and it was said
        return refuse("train.py", error)
    try:
        store = join(plan, launch)
        with Told(args, store) as told:
            code = run_plan(plan, report, launch, told)
    except CollectiveError as error:
        end_abandoned(store, rank, world_size, error, args.out)
    except OSError as error:
        if store:
            end_failed(store, rank, f"train.py: rank {rank}: {error}")
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not store and isinstance(error, dist.DistError):
            print(f"train.py: rank {rank}: {gone(error)}", file=sys.stderr)
            return 1
        if not store:
            raise
        end_failed(store, rank, f"train.py: rank {rank} failed:\n{traceback.format_exc()}")
    if store:
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    exit_code = main()
    if launched()[1] > 1:
        leave(exit_code)
    sys.exit(exit_code)
