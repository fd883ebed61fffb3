"""Training: the command line, and the loop that puts the pieces together.

    python train.py                                  `tiny` on the standard library's own text
    python train.py --out runs/tiny --steps 400      the same, with metrics and checkpoints kept
    python train.py --out runs/tiny --resume         goes on from the newest checkpoint
    python train.py --help                           every flag with its default

One optimizer step is train_step(): get the batch, forward, backward, clip, step. Everything in it
is a sum: the microbatches' token losses are added up, and backward is seeded with 1 / (the step's
valid tokens), known before the first forward, so that accumulation, ragged microbatches and masked
labels need no care.

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
import importlib.util
import json
import math
import os
import resource
import signal
import statistics
import sys
import time
from pathlib import Path

import torch

import checkpoint
import data
import optim
from model import (DTYPES, PRESETS, ModelConfig, Transformer, apply_recompute, compile_regions,
                   count_parameters, flops_per_token, generate, initialise, make_config,
                   override_config, sample)
from moe import MoE, max_violation, reset_counts, update_expert_bias

# Dense bf16 and fp16 peak of the data sheets, TFLOP/s; the first key that the device's own name
# contains counts.
GPU_PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "H800": 989, "A100": 312,
             "B200": 2250, "L40S": 362, "MI300X": 1300, "MI325X": 1300, "MI355X": 2500}

EVAL_SEQUENCES = 512  # of the validation split, whose documents come in random order

# Flags whose techniques have no file yet: the value that means "not used", and what is missing.
NOT_YET = {
    "dp": (1, "ddp.py"), "fsdp": (1, "fsdp.py"), "zero": (0, "fsdp.py"),
    "cp": (1, "ring_attention.py"), "cp_method": ("ring", "ring_attention.py"),
    "tp": (1, "tensor_parallel.py"), "pp": (1, "pipeline.py"),
    "pp_schedule": ("1f1b", "pipeline.py"),
    "virtual_stages": (1, "pipeline.py"), "ep": (1, "expert_parallel.py"),
    "etp": (1, "expert_parallel.py"), "check_parity": (False, "ddp.py"),
    "collective_timeout": (600.0, "collectives.py"), "stop_timeout": (10.0, "collectives.py"),
    "async_save": (False, "collectives.py"),
}

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
        ("--dp", value(int, 1, "data-parallel replicas")),
        ("--fsdp", value(int, 1, "ranks that share parameters, gradients, optimizer state")),
        ("--zero", dict(type=int, default=0, help="what fsdp shards", choices=[0, 1, 2, 3])),
        ("--cp", value(int, 1, "ranks that share a sequence")),
        ("--cp-method", choice("ring", ["ring", "allgather", "ulysses"], "how they attend")),
        ("--tp", value(int, 1, "ranks that share each layer")),
        ("--pp", value(int, 1, "pipeline ranks")),
        ("--pp-schedule", choice("1f1b", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v",
                                          "dualpipe-v"], "pipeline schedule")),
        ("--virtual-stages", value(int, 1, "pipeline stages per rank")),
        ("--ep", value(int, 1, "ranks that share the experts")),
        ("--etp", value(int, 1, "ranks that share each expert")),
        ("--device", choice("auto", ["auto", "cpu", "cuda"], "auto = cuda where there is one"))],
    "numerics": [
        ("--dtype", choice("fp32", list(DTYPES), "compute type; bf16 and fp16 keep float32 "
                           "master weights")),
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


def check_flags(args):
    """Raises ValueError for flags that make no sense together, before anything is touched."""
    for name, (unused, missing) in NOT_YET.items():
        if getattr(args, name) != unused:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(args, name)} needs {missing}, which is still to "
                             f"come; leave {flag} out")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1:
        raise ValueError(f"{world_size} ranks were started, and training on several needs ddp.py, "
                         "which is still to come; run `python train.py` without torchrun")
    for name, least in (("seq_len", 1), ("batch_size", 1), ("micro_batch_size", 1), ("steps", 1),
                        ("warmup", 0), ("save_every", 0), ("keep", 0), ("eval_every", 0),
                        ("log_every", 1), ("lr", 0), ("weight_decay", 0), ("clip", 0)):
        number = getattr(args, name)
        if not number >= least or number == math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {number} must be at least {least}")
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
    for name in ("resume", "profile", "tensorboard", "save_every"):
        if getattr(args, name) and not args.out:
            raise ValueError(f"--{name.replace('_', '-')} needs a folder: add --out DIR")
    if args.resume and args.init_from:
        raise ValueError("--resume goes on with a run and --init-from starts one; leave one out")
    if args.eval_only and not (args.resume or args.init_from):
        raise ValueError("--eval-only needs a checkpoint: add --init-from DIR, or --out DIR "
                         "--resume")
    if args.out:
        check_writable(args.out)
    if args.compile:
        check_compiler()


def check_writable(out):
    """Raises ValueError when the folder can't be made or written, without making it."""
    folder = Path(out).absolute()
    while not folder.exists():
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"--out {out}: {folder} "
                         f"{'can not be written' if folder.is_dir() else 'is not a folder'}")


def check_compiler():
    """Raises ValueError when torch.compile would find no C++ compiler for the CPU's kernels."""
    from torch._inductor import cpp_builder, exc
    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError, OSError):
        raise ValueError("--compile needs a C++ compiler (g++ or clang++) on the PATH and found "
                         "none; install one or leave --compile out") from None


@dataclasses.dataclass
class Run:
    """What a run holds; set_up() makes it, train_step() advances it."""
    args: argparse.Namespace
    device: torch.device
    model: Transformer
    precision: optim.MixedPrecision
    optimizer: torch.optim.Optimizer
    scaler: optim.LossScaler
    batches: data.Batches
    validation: data.Batches
    tokenizer: object
    train_stream: object
    validation_stream: object
    peak_flops: float | None
    step: int = 0     # batches read; the place in the order of the data
    updates: int = 0  # optimizer updates; a step that the loss scaler skips moves no schedule
    tokens: int = 0   # tokens with a target seen so far


def set_up(args, report=print):
    """Everything before the first step, in the order model, data, weights, optimizer.

    Raises ValueError or OSError for flags and input that can't work; nothing is written before.
    """
    check_flags(args)
    resumed = find_resumed(args)
    config = choose_config(args, resumed)
    if args.seq_len > config.max_seq_len:
        raise ValueError(f"--seq-len {args.seq_len} is longer than max_seq_len="
                         f"{config.max_seq_len}; add --override max_seq_len={args.seq_len}")
    device = pick_device(args.device)
    refuse_too_large(args.model or "the model", config, device, training_bytes(args))
    tokenizer = data.load_tokenizer(args.tokenizer)
    data.check_vocabulary(tokenizer, config.vocab_size)
    train_stream, validation_stream = data.open_corpus(args.data, tokenizer, args.errors,
                                                       progress=report)
    batches = data.Batches(train_stream, args.seq_len, args.batch_size, args.seed,
                           args.mask_boundaries, args.isolate_documents)
    validation = data.Batches(validation_stream, args.seq_len, args.batch_size, args.seed,
                              args.mask_boundaries, args.isolate_documents)
    with torch.device("meta"):
        model = Transformer(config)
    dtype = DTYPES[args.dtype]
    initialise(model, args.seed, device, torch.promote_types(dtype, torch.float32))
    if args.compile:
        compile_regions(model)
    apply_recompute(model, args.recompute)
    if args.init_from:
        checkpoint.load_model(checkpoint.resolve(args.init_from), model)
    precision = optim.MixedPrecision(model, dtype)
    masters = dict(precision.named_masters())
    optimizer = optim.make_optimizer(
        args.optimizer, optim.parameter_groups(masters.items(), args.weight_decay), args.lr)
    run = Run(args, device, model, precision, optimizer, optim.LossScaler(dtype), batches,
              validation, tokenizer, train_stream, validation_stream,
              measure_peak(device, args.dtype))
    if resumed:
        load(run, resumed, report)
    return run


def choose_config(args, resumed):
    """The model's configuration: --model's, or that of the checkpoint that a run begins with, with
    --override applied. Raises ValueError when a resumed run's would be another."""
    source = resumed or (args.init_from and checkpoint.resolve(args.init_from))
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
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def available_memory(device):
    """Bytes that a program can still have on `device`; on a CPU caches that give way count."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def training_bytes(args):
    """Bytes per parameter: itself and, when training, gradient, master weight, optimizer state."""
    wide = 8 if args.dtype == "fp64" else 4
    compute = DTYPES[args.dtype].itemsize if DTYPES[args.dtype].itemsize < wide else 0
    if args.eval_only:
        return compute + wide
    return compute + wide + wide + (2 * wide if args.optimizer == "adamw" else 0)


def refuse_too_large(name, config, device, bytes_each):
    """Raises ValueError when the parameters, at bytes_each, do not fit the device's free memory."""
    number = sum(total for total, _ in count_parameters(config).values())
    free = available_memory(device)
    if number * bytes_each > free:
        raise ValueError(f"{name}: {number:,} parameters at {bytes_each} bytes each take "
                         f"{number * bytes_each / 1e9:,.1f} GB, and {device} has "
                         f"{free / 1e9:,.1f} GB free; use a smaller model or dtype, or a machine "
                         "with more memory")


def find_resumed(args):
    """The checkpoint that --resume goes on from, its flags checked; None for a new run.

    Raises ValueError when --out already holds a run that --resume was not given for, when there is
    nothing to resume, or when a flag would change the run.
    """
    if not args.resume:
        held = checkpoint.steps_in(Path(args.out, "checkpoints")) if args.out else []
        if held:
            raise ValueError(f"--out {args.out} already holds a run (checkpoint {held[0].name}); "
                             "add --resume to go on with it, or choose another folder")
        return None
    newest = checkpoint.newest(args.out)
    if newest is None:
        raise ValueError(f"--resume: no whole checkpoint in {args.out}; leave --resume out to "
                         "start a new run")
    # Without a decay, how many steps there will be changes none of them.
    same = [key for key in SAME_RUN if key != "steps" or args.lr_schedule != "constant"]
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
    n = 256 if dtype in ("bf16", "fp16") else 1024  # processors without bf16 units are slow at it
    a = torch.ones(n, n, dtype=DTYPES[dtype])
    best = math.inf
    for _ in range(6):
        start = time.perf_counter()
        a @ a
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

def train_step(run):
    """One optimizer step on the global batch of run.step. Returns its metrics as a dict.

    Raises FloatingPointError when the loss, or without loss scaling a gradient, is not finite.
    """
    args, model, scale = run.args, run.model, run.scaler.scale
    start = time.perf_counter()
    batch = run.batches.get(run.step)
    valid = int((batch.labels != data.IGNORED).sum())
    seed, balance_seed = scale / max(valid, 1), scale / args.batch_size
    loss = 0.0
    for first in range(0, args.batch_size, args.micro_batch_size):
        rows = slice(first, first + args.micro_batch_size)
        loss += forward_backward(run, batch, rows, seed, balance_seed)
    loss /= max(valid, 1)
    stop_if_not_finite(run, "loss", loss)

    masters = [master for _, master in run.precision.named_masters()]
    norm = float(optim.gradient_norm(masters)) / scale
    overflow = not math.isfinite(norm)
    if overflow and not run.scaler.active:
        stop_if_not_finite(run, "gradient norm", norm)
    violation = max_violation(model)
    balance_loss = sum(float(m.balance_loss) for m in model.modules() if isinstance(m, MoE))
    lr = optim.learning_rate(run.updates, args.steps, args.lr, args.min_lr, args.warmup,
                             args.lr_schedule)
    if not overflow:
        update(run, masters, lr, norm, scale)
    run.optimizer.zero_grad(set_to_none=True)
    reset_counts(model)
    run.scaler.update(overflow)
    run.step += 1
    run.tokens += valid
    seconds = time.perf_counter() - start
    return metrics(run, loss, norm, lr, seconds, violation, balance_loss / args.batch_size,
                   overflow)


def forward_backward(run, batch, rows, seed, balance_seed):
    """One microbatch, rows of the batch. Returns its summed token loss."""
    tokens, labels = (t[rows].to(run.device, non_blocking=True) for t in batch[:2])
    document_ids = batch.document_ids
    if document_ids is not None:
        document_ids = document_ids[rows].to(run.device, non_blocking=True)
    hidden = run.model(tokens, document_ids=document_ids, balance_seed=balance_seed)
    loss = run.model.head_loss(hidden, labels, seed)
    loss.backward(torch.full_like(loss, seed))
    return loss.item()


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
    run.precision.refresh()
    update_expert_bias(run.model, run.model.config.bias_update_speed)
    run.updates += 1


def stop_if_not_finite(run, what, number):
    if not math.isfinite(number):
        first = run.step * run.args.batch_size
        raise FloatingPointError(
            f"step {run.step + 1}: the {what} is {number}, on sequences {first} to "
            f"{first + run.args.batch_size - 1} of the data order (seed {run.args.seed}); "
            "the last checkpoint stands. Try a smaller --lr, --clip 1, or --dtype fp32")


@torch.no_grad()
def evaluate(run):
    """Mean token loss over the first EVAL_SEQUENCES of the validation split, in order."""
    total, count = 0.0, 0
    for batch in run.validation.in_order(EVAL_SEQUENCES):
        for first in range(0, len(batch.tokens), run.args.micro_batch_size):
            rows = slice(first, first + run.args.micro_batch_size)
            ids = None if batch.document_ids is None else batch.document_ids[rows].to(run.device)
            hidden = run.model(batch.tokens[rows].to(run.device), document_ids=ids)
            labels = batch.labels[rows].to(run.device)
            total += run.model.head_loss(hidden, labels).item()
            count += int((labels != data.IGNORED).sum())
    return total / count


def metrics(run, loss, norm, lr, seconds, violation, balance_loss, skipped):
    """A line of metrics.jsonl: losses are per token, mfu counts causal attention alone."""
    args, config = run.args, run.model.config
    rate = args.batch_size * args.seq_len / seconds
    flops = flops_per_token(config, args.seq_len)
    found = {"step": run.step, "loss": loss, "grad_norm": norm, "lr": lr, "tokens": run.tokens,
             "tokens_per_second": rate,
             "mfu": rate * flops / run.peak_flops if run.peak_flops else None,
             "memory_bytes": memory_bytes(run.device), "comm_bytes": {}}
    if config.num_experts:
        found.update(max_vio=violation, balance_loss=balance_loss)
    if run.scaler.active:
        found.update(loss_scale=run.scaler.scale, skipped=skipped)
    return found


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

def saved_tensors(run):
    """Global name -> tensor: master weights, the experts' biases, the optimizer's state."""
    masters = dict(run.precision.named_masters())
    tensors = {f"model.{name}": master for name, master in masters.items()}
    tensors.update((f"model.{name}", buffer) for name, buffer in run.model.named_buffers()
                   if name.endswith("expert_bias"))
    tensors.update(checkpoint.optimizer_tensors(run.optimizer, masters))
    return tensors


def save(run):
    """Write --out's checkpoint of this step. With --strict-save a failure ends the run."""
    state = {"step": run.step, "updates": run.updates, "tokens": run.tokens,
             "config": dataclasses.asdict(run.model.config), "flags": vars(run.args),
             "data": run.train_stream.fingerprint, "loss_scaler": run.scaler.state_dict(),
             "threads": torch.get_num_threads(), "torch": torch.__version__}
    try:
        checkpoint.save(run.args.out, run.step, saved_tensors(run), state, run.args.keep)
    except OSError as error:
        if run.args.strict_save:
            raise
        print(f"warning: checkpoint of step {run.step} not written ({error}); training goes on. "
              "--strict-save would stop here", file=sys.stderr)


def load(run, path, report=print):
    """Bring a run to where a checkpoint left it. Raises ValueError when its data has changed."""
    state = checkpoint.read_run(path)
    if state["data"] != run.train_stream.fingerprint:
        raise ValueError(f"--resume: --data was {state['flags']['data']} and is now "
                         f"{run.args.data}, and the text is not the same: a resumed run would read "
                         "other batches. Restore it, or start a new run with --init-from")
    if state["threads"] != torch.get_num_threads():
        report(f"warning: {path.name} was written with {state['threads']} threads and this run has "
               f"{torch.get_num_threads()}; rounding may differ, the run is otherwise the same")
    checkpoint.load(path, saved_tensors(run))
    run.precision.refresh()
    run.scaler.load_state_dict(state["loss_scaler"])
    run.step, run.updates, run.tokens = state["step"], state["updates"], state["tokens"]
    report(f"resumed from {path} after step {run.step}")


def open_metrics(run):
    """metrics.jsonl, cut back to the steps that the checkpoint knows, ready to be added to."""
    folder = Path(run.args.out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() and run.step else []
    kept = []
    for line in lines:
        try:
            if json.loads(line)["step"] <= run.step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            continue  # the last line of a killed run, written half
    path.write_text("".join(kept))
    return path.open("a", buffering=1)


class Logger:
    """Progress lines for a person, metrics.jsonl and tensorboard for programs."""

    def __init__(self, run):
        self.run = run
        self.file = open_metrics(run) if run.args.out else None
        self.board = None
        if run.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.board = SummaryWriter(run.args.out, purge_step=run.step + 1)

    def step(self, found):
        """Write a step's metrics; show every --log-every-th to the person."""
        if self.file:
            self.file.write(json.dumps(found) + "\n")
        if self.board:
            for name, value in found.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(name, value, found["step"])
        step, args = found["step"], self.run.args
        if step % args.log_every == 0 or step in (1, last_step(args)) or found.get("skipped"):
            print(progress_line(found, args, self.run), flush=True)

    def close(self):
        for writer in (self.file, self.board):
            if writer:
                writer.close()


def last_step(args):
    return min(args.steps, args.stop_after or args.steps)


def train(run):
    """The loop: steps until the last one or a signal, with validations and checkpoints between.

    Returns True when it came to the end of the run, False when it was asked to stop before.
    """
    args, asked = run.args, []
    logger, saved = Logger(run), run.step
    with profiler(run) as profile, stop_signals(asked):
        while run.step < last_step(args) and not asked:
            logger.step(train_step(run))
            if profile:
                profile.step()
            if args.save_every and run.step % args.save_every == 0:
                save(run)
                saved = run.step
            if args.eval_every and run.step % args.eval_every == 0 and run.step < args.steps:
                print(f"step {run.step}  validation loss {evaluate(run):.4f}", flush=True)
    logger.close()
    if args.out and saved != run.step:
        save(run)
    if asked:
        print(f"{asked[0]}: stopped after step {run.step}" + (
            f", saved in {args.out}; --resume goes on from here" if args.out else ""), flush=True)
    return run.step >= args.steps


@contextlib.contextmanager
def stop_signals(asked):
    """SIGTERM and SIGINT only put their name into the list `asked`, while this lasts."""
    def note(number, frame):
        asked.append(signal.Signals(number).name)
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def profiler(run):
    """--profile: a chrome trace of the third to the fifth step of this process."""
    if not run.args.profile:
        return contextlib.nullcontext()
    path = Path(run.args.out, "trace.json")
    return torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)))


def describe(run):
    """What this run is, before its first line of progress."""
    args, config = run.args, run.model.config
    counts = count_parameters(config).values()
    total, active = (sum(n[i] for n in counts) for i in (0, 1))
    print(f"{args.model or 'tiny'}: {total:,} parameters, {active:,} active per token; "
          f"{args.dtype} on {run.device}, {torch.get_num_threads()} threads")
    print(f"data: {run.train_stream.name}: {run.train_stream.n_tokens:,} tokens to train on, "
          f"{run.validation_stream.n_tokens:,} to validate on; tokenizer {args.tokenizer}")
    if run.peak_flops:
        kind = "data sheet" if run.device.type == "cuda" else "measured matrix product"
        print(f"peak for MFU: {run.peak_flops / 1e9:,.0f} GFLOP/s ({kind})")
    print("flags: " + " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}"
                               for k, v in vars(args).items()
                               if v not in (None, False, []) and k not in NOT_YET), flush=True)


def report_validation(run):
    """The validation loss beside what counting letters and pairs of letters would reach."""
    loss = evaluate(run)
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
    model.to(dtype).to_empty(device=device)
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


def main(argv=None):
    """Set up, train, validate. Returns the exit code."""
    args = build_parser().parse_args(argv)
    keep_freed_memory()
    try:
        run = set_up(args)
    except (ValueError, OSError) as error:
        if int(os.environ.get("RANK", 0)) == 0:  # one rank speaks for all
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    describe(run)
    try:
        if args.eval_only or train(run):
            report_validation(run)
    except (FloatingPointError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
