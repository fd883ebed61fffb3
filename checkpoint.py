"""Checkpoints: global names and full values, whatever layout wrote them.

    OUT/checkpoints/step-40/    run.json       step, configuration, flags, tokens seen, loss scale
                                .metadata      where each tensor lies (torch.distributed.checkpoint)
                                *.distcp       the tensors

A tensor is known by its global name, `model.blocks.0.attn.wo.weight` or
`optim.exp_avg.blocks.0.attn.wo.weight`, and saved as the float32 (or float64) master value: neither
the layout nor the compute type shows in the file.

A save is whole or not there. It is written as step-40.partial, flushed to disk, and renamed: the one
step that the file system does at once. What a killed save leaves is not taken for a checkpoint and is
removed by the next save.

Course: 15:41:22 metrics, optimizers, schedulers and checkpointing.

    python checkpoint.py                     a save killed half way, a load bit for bit; prints PASS
    python checkpoint.py show DIR
    python checkpoint.py import-hf DIR OUT   transformers' safetensors of DeepSeek-V2/V3 or Llama
    python checkpoint.py export-hf DIR OUT
"""
import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

STEP = re.compile(r"step-(\d+)")


# ---- saving and finding ----

def save(out_dir, step, tensors, run, keep=0):
    """Write out_dir/checkpoints/step-`step` and keep the `keep` newest (0: all).

    tensors: global name -> tensor; run: what run.json is to hold. Returns the folder's path.
    Raises OSError when it can't be written; older checkpoints stand.
    """
    folder = Path(out_dir, "checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    for remains in folder.glob("step-*.partial"):
        shutil.rmtree(remains)
    partial, whole = folder / f"step-{step}.partial", folder / f"step-{step}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "no process group: saving in one process" is what we ask
        dcp.save({k: t.detach() for k, t in tensors.items()}, checkpoint_id=partial, no_dist=True)
    (partial / "run.json").write_text(json.dumps(run, indent=1))
    for path in [*partial.iterdir(), partial]:
        flush(path)
    if whole.exists():
        shutil.rmtree(whole)
    os.rename(partial, whole)
    flush(folder)
    for old in steps_in(folder)[keep:] if keep else []:
        shutil.rmtree(old)
    return whole


def flush(path):
    """Have the system write a file, or a folder's list of names, to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def steps_in(folder):
    """Folders named step-N, newest first."""
    found = [p for p in folder.glob("step-*") if STEP.fullmatch(p.name)]
    return sorted(found, key=lambda p: int(STEP.fullmatch(p.name)[1]), reverse=True)


def newest(out_dir):
    """The newest whole checkpoint of a run's --out folder; None if there is none."""
    for path in steps_in(Path(out_dir, "checkpoints")):
        if (path / ".metadata").exists() and (path / "run.json").exists():
            return path
    return None


def resolve(path):
    """The checkpoint that `path` means: itself, or the newest in a run's folder or in its
    `checkpoints`. Raises ValueError when there is none."""
    path = Path(path)
    if (path / ".metadata").exists() and (path / "run.json").exists():
        return path
    found = newest(path) or newest(path.parent) if path.name == "checkpoints" else newest(path)
    if found is None:
        raise ValueError(f"{path}: no whole checkpoint there; give a run's --out folder or one of "
                         "its checkpoints/step-N")
    return found


# ---- loading ----

def read_run(path):
    """run.json of a checkpoint. Raises ValueError when it is damaged."""
    try:
        return json.loads(Path(path, "run.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}/run.json is damaged ({error}); use an older checkpoint") from None


def read_tensor_table(path):
    """Global name -> (shape, dtype) of what a checkpoint holds."""
    table = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: (tuple(t.size), t.properties.dtype) for name, t in table.items()
            if isinstance(t, TensorStorageMetadata)}


def load(path, tensors):
    """Fill `tensors` (global name -> tensor) in place. All must be there with these shapes.

    Raises ValueError naming the first few that are missing, unexpected or of another shape.
    """
    compare(path, tensors, read_tensor_table(path))
    fill(path, tensors)


def load_model(path, model):
    """Fill a model's parameters and expert biases from a checkpoint, leaving its optimizer's state
    alone. Raises ValueError as load() does."""
    held = {k: v for k, v in read_tensor_table(path).items() if k.startswith("model.")}
    wanted = {f"model.{name}": t.detach() for name, t in model.named_parameters()}
    wanted.update((f"model.{name}", b) for name, b in model.named_buffers()
                  if name.endswith("expert_bias"))
    compare(path, wanted, held)
    fill(path, wanted)


def compare(path, wanted, held):
    faults = [f"{name} is missing" for name in wanted if name not in held]
    faults += [f"{name} is not part of this model or optimizer" for name in held
               if name not in wanted]
    faults += [f"{name} has shape {list(held[name][0])} and the model wants "
               f"{list(wanted[name].shape)}" for name in wanted
               if name in held and tuple(wanted[name].shape) != held[name][0]]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(f"{path} does not fit: {'; '.join(faults[:3])}{more}")


def fill(path, tensors):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({k: t.detach() for k, t in tensors.items()}, checkpoint_id=path, no_dist=True)


def optimizer_tensors(optimizer, masters):
    """`optim.<state>.<parameter's name>` -> tensor, the optimizer's whole state. State that a fresh
    AdamW has not made yet is made here, zero, so that a checkpoint can be loaded into it."""
    names, found = {p: name for name, p in masters.items()}, {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            if isinstance(optimizer, torch.optim.AdamW) and not state:
                state.update(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p),
                             exp_avg_sq=torch.zeros_like(p))
            found.update((f"optim.{key}.{names[p]}", t) for key, t in state.items()
                         if isinstance(t, torch.Tensor))
    return found


def check_resume(saved, wanted, keys):
    """Raises ValueError, with both values, when a flag of `keys` would change the run."""
    changed = [f"--{key.replace('_', '-')} was {saved.get(key)} and is now {wanted.get(key)}"
               for key in keys if saved.get(key) != wanted.get(key)]
    if changed:
        raise ValueError(f"--resume: {'; '.join(changed)}: that would change the run. Give the "
                         "value it had, or start a new run from its weights with --init-from")
