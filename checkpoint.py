"""Checkpoints: global names and full values, whatever layout wrote them.

    OUT/checkpoints/step-40/    run.json       step, configuration, flags, tokens seen, loss scale
                                .metadata      where each tensor lies (torch.distributed.checkpoint)
                                *.distcp       the tensors

A tensor is known by its global name, `model.blocks.0.attn.wo.weight` or
`optim.exp_avg.blocks.0.attn.wo.weight`, and saved as the float32 (or float64) master value: neither
the layout nor the compute type shows in the file.

Every rank writes and reads its own part (Piece), so that any layout can go on from any other.

A save is whole or not there. It is written as step-40.partial, flushed to disk, and renamed: the
one step that the file system does at once. What a killed save leaves is not taken for a checkpoint
and is removed by the next save. A save that fails on one rank has failed on all.

Background saves in a thread, from copies, while training goes on:

    step 40 | copy | step 41 | step 42 | ...          the training thread waits for the copy alone
                   | write step-40.partial | rename   the saving thread, on a group of its own

Course: 15:41:22 metrics, optimizers, schedulers and checkpointing.

    python checkpoint.py                     a save killed half way, a load bit for bit; prints PASS
    python checkpoint.py show DIR
    python checkpoint.py import-hf DIR OUT   transformers' safetensors of DeepSeek-V2/V3 or Llama
    python checkpoint.py export-hf DIR OUT
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
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
import torch.distributed as dist

from collectives import Axis, attributed

STEP = re.compile(r"step-(\d+)")

# Said of every save of one process. Not by catch_warnings() around it: that is no thread's own.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


# ---- saving and finding ----

def dcp():
    """torch.distributed.checkpoint. Imported when it is needed: that takes a second, which a run's
    first step need not wait for."""
    import torch.distributed.checkpoint
    return torch.distributed.checkpoint


class Piece:
    """A rank's part of a tensor: `local` stands in the full tensor of `shape` from `start` on.

    torch.distributed.checkpoint asks a tensor three things through these methods: what to write,
    which parts to read, and where a part is. An empty part is neither written nor read, the same
    part on several ranks is written by one of them.
    """

    def __init__(self, local, shape, start):
        self.local, self.shape, self.start = local.detach(), torch.Size(shape), torch.Size(start)

    def size(self):
        return self.shape

    def __create_chunk_list__(self):
        chunk = dcp().metadata.ChunkStorageMetadata(self.start, self.local.shape)
        return [chunk] if self.local.numel() else []

    def __create_write_items__(self, name, _):
        planner, metadata = dcp().planner, dcp().metadata
        properties = metadata.TensorProperties.create_from_tensor(self.local)
        return [planner.WriteItem(
            metadata.MetadataIndex(name, chunk.offsets), planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, properties, self.shape))
            for chunk in self.__create_chunk_list__()]


def local_tensor(item):
    return item.local if isinstance(item, Piece) else item.detach()


def on_several_ranks():
    return dist.is_initialized() and dist.get_world_size() > 1


def attributed_to_all(operation):
    """Context: when ranks lose one another inside, it is told as a collective's failure is."""
    if not on_several_ranks():
        return contextlib.nullcontext()
    world = Axis("world", tuple(range(dist.get_world_size())), dist.get_rank())
    return attributed(world, operation, watched=False)


def on_first_rank(function, group=None):
    """function() on rank 0 alone; its result, or its OSError, on every rank (of all, which talk
    over `group`)."""
    if not on_several_ranks():
        return function()
    outcome = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except OSError as error:
            outcome[1] = error
    with attributed_to_all("checkpoint"):
        dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def save(out_dir, step, tensors, run, keep=0, group=None):
    """Write out_dir/checkpoints/step-`step` and keep the `keep` newest (0: all). Called by every
    rank, with its own pieces.

    tensors: global name -> tensor or Piece; run: what run.json is to hold; group: of all ranks,
    None: the default one. Returns the folder. Raises OSError on every rank when it can't be
    written; older checkpoints stand, and nothing is left that takes room.
    """
    folder = Path(out_dir, "checkpoints")
    partial, whole = folder / f"step-{step}.partial", folder / f"step-{step}"
    try:
        on_first_rank(lambda: clear_remains(folder), group)
        write_tensors(tensors, partial, group)
        on_first_rank(lambda: publish(partial, whole, run, keep), group)
    except OSError:  # the same on all ranks, so none of them writes there any more
        on_first_rank(lambda: shutil.rmtree(partial, ignore_errors=True), group)
        raise
    return whole


class Background:
    """Saves in a thread, one at a time, while training goes on.

    group: of all ranks, for saves alone: on a group that two threads use, one's messages would be
    taken for the other's. None for one rank.
    """

    def __init__(self, group=None):
        self.group, self.running = group, None
        self.thread = concurrent.futures.ThreadPoolExecutor(1)

    def save(self, out_dir, step, tensors, run, keep=0):
        """Copy the tensors, then return: they may change, the copies are written. Takes save()'s
        arguments, `run` not to be changed any more. Waits for the save before, raising as wait()
        does."""
        self.wait()
        copies = {name: copied(item) for name, item in tensors.items()}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.running = self.thread.submit(save, out_dir, step, copies, run, keep, self.group)

    def failed(self):
        """Whether the save under way is known to have failed. wait() then says how, at once."""
        return bool(self.running and self.running.done() and self.running.exception())

    def wait(self):
        """Return when nothing is under way any more. Raises what the save raised, once: OSError on
        every rank, or CollectiveError."""
        running, self.running = self.running, None
        if running:
            running.result()


def copied(item):
    """A tensor or Piece as it is now, in the CPU's memory."""
    tensor = local_tensor(item)
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    copy.copy_(tensor, non_blocking=True)
    return Piece(copy, item.shape, item.start) if isinstance(item, Piece) else copy


def clear_remains(folder):
    """Make the folder of checkpoints; remove what killed saves left in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for remains in folder.glob("step-*.partial"):
        shutil.rmtree(remains)


def publish(partial, whole, run, keep):
    """Complete a save whose tensors are written: run.json, all to disk, the name, old ones away."""
    (partial / "run.json").write_text(json.dumps(run, indent=1))
    for path in [*partial.iterdir(), partial]:
        flush(path)
    if whole.exists():
        shutil.rmtree(whole)
    os.rename(partial, whole)
    flush(whole.parent)
    if keep:
        prune(whole, keep)


def prune(newest, keep):
    """Leave, besides the newest checkpoint, the keep - 1 whole ones before it: damaged ones, and
    those of later steps, which a resumed run has passed over, are no use to any."""
    step, others = int(STEP.fullmatch(newest.name)[1]), steps_in(newest.parent)
    before = [p for p in others if int(STEP.fullmatch(p.name)[1]) < step and damage(p) is None]
    for path in set(others) - {newest, *before[:keep - 1]}:
        shutil.rmtree(path)


def write_tensors(tensors, path, group):
    class SavePlanner(dcp().DefaultSavePlanner):
        def lookup_object(self, index):
            return local_tensor(self.state_dict[index.fqn])
    through_dcp(dcp().save, tensors, path, SavePlanner(), group)


def read_tensors(tensors, path):
    """Fill them in place."""
    class LoadPlanner(dcp().DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            """As the default's, without its walk through nested dictionaries, where Pieces get
            lost."""
            self.state_dict, self.metadata = state_dict, metadata
            self.flatten_state_dict, self.is_coordinator = False, is_coordinator

        def lookup_tensor(self, index):
            return local_tensor(self.state_dict[index.fqn])
    through_dcp(dcp().load, tensors, path, LoadPlanner())


def through_dcp(operation, tensors, path, planner, group=None):
    """dcp().save or dcp().load. Its own kind of exception is turned into the OSError that caused
    it, so that a full disk reads as a full disk."""
    try:
        with attributed_to_all("checkpoint"):
            operation(dict(tensors), checkpoint_id=path, planner=planner, process_group=group,
                      no_dist=not on_several_ranks())
    except dcp().api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if "unexpected pos" in str(cause):  # how torch says it
            cause = "a file could not be written to its end, as on a full disk"
        raise OSError(f"{path}: {cause}") from error


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


def damage(path):
    """What is wrong with a checkpoint, in words; None when it is whole: its run.json can be read
    and every file is as long as .metadata says."""
    path = Path(path)
    try:
        json.loads((path / "run.json").read_text())
        stored = dcp().FileSystemReader(path).read_metadata().storage_data.values()
    except Exception as error:  # unpickling a damaged .metadata may raise anything
        return f"{path}: {type(error).__name__}: {error}"
    ends = {}
    for piece in stored:
        ends[piece.relative_path] = max(ends.get(piece.relative_path, 0),
                                        piece.offset + piece.length)
    for name, end in ends.items():
        size = (path / name).stat().st_size if (path / name).exists() else 0
        if size < end:
            return f"{path / name} has {size:,} bytes of {end:,}: it is cut short"
    return None


def newest(out_dir):
    """The newest whole checkpoint of a run's --out folder; None if there is none. A damaged newer
    one is passed over with a warning."""
    for path in steps_in(Path(out_dir, "checkpoints")):
        wrong = damage(path)
        if wrong is None:
            return path
        print(f"warning: passed over a damaged checkpoint: {wrong}", file=sys.stderr)
    return None


def resolve(path):
    """The checkpoint that `path` means: itself, or the newest in a run's folder or in its
    `checkpoints`. Raises ValueError when there is none that is whole."""
    path = Path(path)
    if STEP.fullmatch(path.name) and path.is_dir():
        if wrong := damage(path):
            raise ValueError(f"the checkpoint is damaged: {wrong}")
        return path
    found = newest(path.parent if path.name == "checkpoints" else path)
    if found is None:
        raise ValueError(f"{path}: no whole checkpoint there; give a run's --out folder or one of "
                         "its checkpoints/step-N")
    return found


# ---- loading ----

def read_run(path):
    """run.json of a checkpoint that train.py or import-hf wrote. Raises ValueError when something
    that they write is missing."""
    run = json.loads(Path(path, "run.json").read_text())
    missing = {"step", "tokens", "config", "flags"} - set(run)
    if missing:
        raise ValueError(f"{path}/run.json has no {', '.join(sorted(missing))}: it is damaged, or "
                         "of another program; use another checkpoint")
    return run


def read_tensor_table(path):
    """Global name -> (shape, dtype) of what a checkpoint holds."""
    table = dcp().FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: (tuple(t.size), t.properties.dtype) for name, t in table.items()
            if isinstance(t, dcp().metadata.TensorStorageMetadata)}


def load(path, tensors, prefix=""):
    """Fill `tensors` (global name -> tensor or Piece) in place: all that the checkpoint holds under
    `prefix`, with these shapes. Called by every rank, with its own pieces.

    Raises ValueError when it is damaged, or naming the first few tensors that are missing,
    unexpected or of another shape.
    """
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if on_several_ranks():  # a pipeline's have different layers, and all must refuse alike
        everywhere = [None] * dist.get_world_size()
        with attributed_to_all("checkpoint"):
            dist.all_gather_object(everywhere, shapes)
        for others in everywhere:
            shapes.update(others)
    check_fit(path, shapes, prefix)
    read_tensors(tensors, path)


def check_fit(path, wanted, prefix=""):
    """Raises ValueError unless the checkpoint is whole and holds just what is wanted: global name
    -> shape."""
    if wrong := damage(path):
        raise ValueError(f"the checkpoint is damaged: {wrong}")
    held = {k: v for k, v in read_tensor_table(path).items() if k.startswith(prefix)}
    faults = [f"{name} is missing" for name in wanted if name not in held]
    faults += [f"{name} is not part of this model or optimizer" for name in held
               if name not in wanted]
    faults += [f"{name} has shape {list(held[name][0])} and the model wants "
               f"{list(wanted[name])}" for name in wanted
               if name in held and wanted[name] != held[name][0]]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(f"{path} does not fit: {'; '.join(faults[:3])}{more}")


def load_model(path, model):
    """Fill a model, leaving its optimizer's state alone. Raises as load() does."""
    load(path, {f"model.{name}": t for name, t in model.state_dict().items()}, "model.")


def optimizer_tensors(optimizer, masters):
    """`optim.<state>.<parameter's name>` -> tensor, the optimizer's whole state."""
    names = {p: name for name, p in masters.items()}
    return {f"optim.{key}.{names[p]}": t for group in optimizer.param_groups
            for p in group["params"] for key, t in optimizer.state_of(p).items()}


def check_resume(saved, wanted, keys, name="--{}"):
    """Raises ValueError, with both values, when one of `keys` would change the run; `name` turns a
    key into what a person typed."""
    changed = [f"{name.format(key.replace('_', '-'))} was {saved.get(key)} and is now "
               f"{wanted.get(key)}" for key in keys if saved.get(key) != wanted.get(key)]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ValueError(f"--resume: {'; '.join(changed[:3])}{more}: that would change the run. "
                         "Give the value it had, or start a new run from its weights with "
                         "--init-from")


# ---- transformers' format ----
#
# Ours on the left, transformers' on the right.

NAMES = {
    "embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn.wq": "self_attn.q_proj", "attn.wk": "self_attn.k_proj", "attn.wv": "self_attn.v_proj",
    "attn.wq_a": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm",
    "attn.wq_b": "self_attn.q_b_proj", "attn.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_norm": "self_attn.kv_a_layernorm", "attn.wkv_b": "self_attn.kv_b_proj",
    "attn.wo": "self_attn.o_proj", "ffn.router": "mlp.gate"}
MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FFN = re.compile(r"(ffn|ffn\.shared_experts|ffn\.experts)\.(w[123])(\.weight)?")


def hf_names(name, experts):
    """transformers' name(s) of our tensor `name`: a list of `experts` for a stacked weight, else of
    one."""
    if name in NAMES:
        return [NAMES[name]]
    block, rest = re.fullmatch(r"blocks\.(\d+)\.(.+)", name).groups()
    prefix = f"model.layers.{block}."
    ffn = FFN.fullmatch(rest)
    if rest == "ffn.expert_bias":
        return [prefix + "mlp.gate.e_score_correction_bias"]
    if ffn is None:
        return [f"{prefix}{BLOCK_NAMES[rest.removesuffix('.weight')]}.weight"]
    part, matrix = ffn[1].replace("ffn", "mlp"), MATRICES[ffn[2]]
    if ffn[1] == "ffn.experts":
        return [f"{prefix}{part}.{e}.{matrix}.weight" for e in range(experts)]
    return [f"{prefix}{part}.{matrix}.weight"]


# configuration field -> config.json key; the same for all families, or for DeepSeek's
SHARED_KEYS = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "inter_dim": "intermediate_size",
    "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings", "init_std": "initializer_range"}
DEEPSEEK_KEYS = {
    "moe_inter_dim": "moe_intermediate_size", "n_dense_layers": "first_k_dense_replace",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim", "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts", "top_k": "num_experts_per_tok",
    "route_norm": "norm_topk_prob", "route_scale": "routed_scaling_factor", "n_group": "n_group",
    "topk_group": "topk_group"}


def refuse_unknown(hf, rope):
    """Raises ValueError, naming the key, for what our model can't be: better than wrong logits."""
    family = hf.get("model_type")
    refused = {
        "model_type": family not in ("llama", "deepseek_v2", "deepseek_v3"),
        "quantization_config": bool(hf.get("quantization_config")),
        "attention_bias": bool(hf.get("attention_bias")), "mlp_bias": bool(hf.get("mlp_bias")),
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "moe_layer_freq": hf.get("moe_layer_freq", 1) != 1,
        "rope_type": rope.get("rope_type", rope.get("type", "default")) not in ("default", "yarn"),
        "attention_factor": rope.get("attention_factor") is not None,
        "truncate": not rope.get("truncate", True),
        "partial_rotary_factor": family == "llama" and hf.get("partial_rotary_factor", 1) != 1,
        # DeepSeek's code normalises latents with 1e-6 whatever the configuration says.
        "rms_norm_eps": family != "llama" and hf.get("rms_norm_eps", 1e-6) != 1e-6,
        # transformers' V2 ignores it, DeepSeek's own code then leaves out the scaling factor.
        "norm_topk_prob": family == "deepseek_v2" and bool(hf.get("norm_topk_prob")),
        "topk_method": hf.get("topk_method", "greedy") not in (
            "greedy", "group_limited_greedy", "noaux_tc")}
    for key, wrong in refused.items():
        if wrong:
            value = rope.get(key, rope.get("type")) if key == "rope_type" else hf.get(
                key, rope.get(key))
            raise ValueError(f"config.json: {key} = {value} is not something this model has; "
                             "Llama, DeepSeek-V2 and DeepSeek-V3 without biases, quantisation or "
                             "other rotary scaling than YaRN can be read")


def config_from_hf(hf):
    """Our configuration's fields (a dict) from the contents of a config.json.

    Reads `rope_scaling` (transformers 4) and `rope_parameters` (5). Raises ValueError for what our
    model can't be.
    """
    rope = {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_scaling") or {}),
            **(hf.get("rope_parameters") or {})}
    refuse_unknown(hf, rope)
    fields = {ours: hf[key] for ours, key in SHARED_KEYS.items() if hf.get(key) is not None}
    if hf["model_type"] == "llama":
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        fields.update(
            n_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"], num_experts=0,
            n_dense_layers=hf["num_hidden_layers"], q_lora_rank=0, kv_lora_rank=0,
            qk_nope_head_dim=0, qk_rope_head_dim=head_dim, v_head_dim=head_dim,
            rope_interleaved=False)
    else:
        v3 = hf["model_type"] == "deepseek_v3"
        fields.update((ours, hf[key]) for ours, key in DEEPSEEK_KEYS.items()
                      if hf.get(key) is not None)
        fields["q_lora_rank"] = hf.get("q_lora_rank") or 0
        fields.update(score_func="sigmoid" if v3 else "softmax",
                      rope_interleaved=bool(hf.get("rope_interleave", True)),
                      bias_update_speed=1e-3 if v3 else 0.0,
                      seq_balance_coeff=1e-4 if v3 else 0.0,
                      aux_loss_coeff=0.0 if v3 else hf.get("aux_loss_alpha", 0.001))
        if not v3 and hf.get("topk_method", "greedy") == "greedy":
            fields.update(n_group=1, topk_group=1)
    fields.update(rope_theta=float(rope["rope_theta"]),
                  original_seq_len=hf["max_position_embeddings"])
    if "factor" in rope:
        fields.update(rope_factor=float(rope["factor"]),
                      beta_fast=float(rope.get("beta_fast") or 32),
                      beta_slow=float(rope.get("beta_slow") or 1),
                      original_seq_len=rope.get("original_max_position_embeddings"))
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        fields.update(mscale=float(rope["mscale"] if both else 1),
                      mscale_all_dim=float(rope.get("mscale_all_dim") or 0))
        if not (fields["original_seq_len"] or 0) < fields["max_seq_len"]:
            raise ValueError(
                f"config.json: YaRN extends original_max_position_embeddings="
                f"{fields['original_seq_len']} to max_position_embeddings="
                f"{fields['max_seq_len']}, which is no extension")
    return fields


def config_to_hf(c):
    """The contents of a config.json for our configuration `c`. Raises ValueError for a model that
    none of transformers' three classes is."""
    hf = {key: getattr(c, ours) for ours, key in SHARED_KEYS.items()}
    hf.update(hidden_act="silu", rope_theta=c.rope_theta, rope_scaling=None, attention_bias=False,
              torch_dtype="float32", use_cache=True)
    if c.yarn_factor > 1:
        hf["rope_scaling"] = {
            "rope_type": "yarn", "type": "yarn", "factor": c.rope_factor,
            "beta_fast": c.beta_fast, "beta_slow": c.beta_slow, "mscale": c.mscale,
            "mscale_all_dim": c.mscale_all_dim, "original_max_position_embeddings":
            c.original_seq_len}
    if not c.is_mla:
        if c.num_experts:
            raise ValueError("export-hf: grouped-query attention with experts is none of "
                             "transformers' Llama, DeepSeek-V2 and DeepSeek-V3 classes")
        return hf | {"model_type": "llama", "architectures": ["LlamaForCausalLM"],
                     "num_key_value_heads": c.n_kv_heads, "head_dim": c.v_head_dim,
                     "mlp_bias": False}
    v3 = c.score_func == "sigmoid"
    if not c.n_moe_layers() or not c.num_shared_experts:
        raise ValueError(f"export-hf: num_experts={c.num_experts}, num_shared_experts="
                         f"{c.num_shared_experts}: transformers' DeepSeek classes have both")
    if not v3 and (c.route_norm or not c.rope_interleaved):
        raise ValueError("export-hf: transformers' DeepSeek-V2 (score_func=softmax) has "
                         "route_norm=False and rope_interleaved=True")
    hf.update((key, getattr(c, ours)) for ours, key in DEEPSEEK_KEYS.items())
    hf.update(q_lora_rank=c.q_lora_rank or None, num_key_value_heads=c.n_heads, moe_layer_freq=1,
              rope_interleave=c.rope_interleaved, scoring_func=c.score_func,
              aux_loss_alpha=c.aux_loss_coeff or c.seq_balance_coeff)
    if v3:
        return hf | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
                     "topk_method": "noaux_tc"}
    return hf | {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"],
                 "topk_method": "group_limited_greedy" if c.n_group > 1 else "greedy"}


def safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ValueError("transformers' files need the safetensors package, which nothing else "
                         "here does: pip install safetensors") from None
    return safetensors


def model_tensors(config):
    """Our tensors' names and shapes for a configuration, from a model that takes no memory."""
    from model import Transformer
    with torch.device("meta"):
        model = Transformer(config)
    return {name: t.shape for name, t in model.state_dict().items()}


def import_hf(source, out_dir):
    """A folder of config.json and *.safetensors -> out_dir/checkpoints/step-0. Returns the
    configuration and a list of notices.

    Raises ValueError for a model that ours can't be, and for tensors missing or of another shape.
    """
    from model import ModelConfig
    st, source = safetensors(), Path(source)
    if not (source / "config.json").is_file():
        raise ValueError(f"{source}: no config.json there; give a folder with config.json and "
                         "*.safetensors")
    hf = json.loads((source / "config.json").read_text())
    config = ModelConfig(**config_from_hf(hf))
    where = {}
    for path in sorted(source.glob("*.safetensors")):
        with st.safe_open(path, "pt") as file:
            where.update((name, path) for name in file.keys())
    tensors, used = {}, set()
    for name, shape in model_tensors(config).items():
        wanted = hf_names(name, config.num_experts)
        if name.endswith("expert_bias") and wanted[0] not in where:  # V2 has none
            tensors[f"model.{name}"] = torch.zeros(shape)
            continue
        missing = [w for w in wanted if w not in where]
        if missing:
            raise ValueError(f"{source}: {missing[0]} is missing, which config.json calls for")
        tensor = torch.empty(shape)
        for slot, w in zip(tensor if len(wanted) > 1 else [tensor], wanted):
            with st.safe_open(where[w], "pt") as file:
                value = file.get_tensor(w)
            if value.shape != slot.shape:
                raise ValueError(f"{source}: {w} has shape {list(value.shape)}, and config.json "
                                 f"calls for {list(slot.shape)}")
            slot.copy_(value)
        tensors[f"model.{name}"] = tensor
        used.update(wanted)
    left = sorted(name for name in set(where) - used if not name.endswith("rotary_emb.inv_freq")
                  and not (config.tie_embeddings and name == "lm_head.weight"))
    mtp = [n for n in left if re.match(rf"model\.layers\.{config.n_layers}\.", n)]
    if set(left) - set(mtp):
        raise ValueError(f"{source}: {sorted(set(left) - set(mtp))[0]} has no place in this model")
    run = {"step": 0, "updates": 0, "tokens": 0, "config": dataclasses.asdict(config),
           "flags": {"tokenizer": None}, "imported_from": hf["model_type"]}
    save(out_dir, 0, tensors, run)
    return config, [f"left out {len(mtp)} tensors of multi-token prediction"] if mtp else []


def export_hf(source, out_dir, shard_bytes=5 * 10 ** 9):
    """A checkpoint -> config.json and safetensors files of at most about shard_bytes each."""
    from model import ModelConfig
    from rope import to_half_split
    st, path, out = safetensors(), resolve(source), Path(out_dir)
    config = ModelConfig(**read_run(path)["config"])
    hf, table = config_to_hf(config), read_tensor_table(path)
    tensors = {name: torch.empty(shape) for name, shape in model_tensors(config).items()}
    read_tensors({f"model.{name}": t for name, t in tensors.items() if f"model.{name}" in table},
                 path)
    shards, size = [{}], 0
    for name, tensor in tensors.items():
        if name.endswith("expert_bias") and hf["model_type"] == "deepseek_v2":
            if tensor.any():
                raise ValueError(f"export-hf: {name} is not zero, and transformers' DeepSeek-V2 "
                                 "has no expert bias; it would choose other experts")
            continue
        is_rotated = name.endswith(("wq.weight", "wk.weight")) and not config.is_mla
        if is_rotated and config.rope_interleaved:  # Llama's pairs are half a head apart
            heads = tensor.unflatten(0, (-1, config.v_head_dim))
            tensor = heads[:, to_half_split(config.v_head_dim)].flatten(0, 1)
        names = hf_names(name, config.num_experts)
        for w, value in zip(names, tensor if len(names) > 1 else [tensor]):
            if size and size + value.nbytes > shard_bytes:
                shards.append({})
                size = 0
            shards[-1][w] = value.contiguous()
            size += value.nbytes
    out.mkdir(parents=True, exist_ok=True)
    index = {}
    for i, shard in enumerate(shards, 1):
        file = ("model.safetensors" if len(shards) == 1
                else f"model-{i:05}-of-{len(shards):05}.safetensors")
        st.torch.save_file(shard, out / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for t in shard.values())
        (out / "model.safetensors.index.json").write_text(json.dumps(
            {"metadata": {"total_size": total}, "weight_map": index}, indent=1))
    (out / "config.json").write_text(json.dumps(hf, indent=1))
    return config


# ---- commands and demonstration ----

def show(path):
    """Print what a checkpoint is and holds."""
    path = resolve(path)
    run, table = read_run(path), read_tensor_table(path)
    print(f"{path}: step {run['step']}, {run['tokens']:,} tokens seen")
    print("model: " + ", ".join(f"{k}={v}" for k, v in run["config"].items()))
    print("flags: " + ", ".join(f"{k}={v}" for k, v in run["flags"].items() if v is not None))
    for kind in ("model", "optim"):
        found = {k: v for k, v in table.items() if k.startswith(kind + ".")}
        numbers = sum(torch.Size(shape).numel() for shape, _ in found.values())
        print(f"{kind}: {len(found)} tensors, {numbers:,} numbers")
        for name, (shape, dtype) in found.items():
            if kind == "model":
                print(f"  {name:50} {str(list(shape)):24} {str(dtype).removeprefix('torch.')}")


VICTIM = """
import os, signal, sys, torch, checkpoint
out, rename = sys.argv[1], os.rename
tensors = {"model.w": torch.arange(6.0).view(2, 3) / 7}
checkpoint.save(out, 1, tensors, {"step": 1})
os.rename = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save(out, 2, tensors, {"step": 2})
"""


def demo():
    """Kill a program in the middle of its second save; the first must be found, bit for bit."""
    checks = {}
    with tempfile.TemporaryDirectory() as out:
        child = subprocess.run([sys.executable, "-c", VICTIM, out], capture_output=True,
                               cwd=Path(__file__).resolve().parent)
        checks["the program was killed"] = child.returncode == -signal.SIGKILL
        folder = Path(out, "checkpoints")
        left = sorted(p.name for p in folder.iterdir())
        print(f"killed while saving step 2; in its folder: {left}")
        found = newest(out)
        print(f"newest whole checkpoint: {found.name}")
        checks["step 1 is the newest"] = found.name == "step-1"
        w = torch.zeros(2, 3)
        load(found, {"model.w": w})
        checks["loaded bit for bit"] = torch.equal(w, torch.arange(6.0).view(2, 3) / 7)
        for wrong in ({"model.v": w}, {"model.w": torch.zeros(3, 2)}, {}):
            try:
                load(found, wrong)
                checks[f"{[*wrong]} refused"] = False
            except ValueError as error:
                print(f"refused: {str(error).replace(str(found), found.name)}")
        for step in (3, 4, 5):
            save(out, step, {"model.w": w}, {"step": step}, keep=2)
        left = sorted(p.name for p in folder.iterdir())
        print(f"three more saves, keeping 2: {left}")
        checks["the two newest are kept, no remains"] = left == ["step-4", "step-5"]
    failed = [what for what, right in checks.items() if not right]
    print(f"FAILED: {', '.join(failed)}" if failed or not checks else "PASS")
    return 1 if failed or not checks else 0


def main(argv=None):
    """The commands of the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    command = commands.add_parser("show", help="what a checkpoint holds")
    command.add_argument("source", metavar="DIR")
    for name, text in (("import-hf", "transformers' safetensors to a checkpoint"),
                       ("export-hf", "a checkpoint to transformers' safetensors")):
        command = commands.add_parser(name, help=text)
        command.add_argument("source", metavar="DIR")
        command.add_argument("out", metavar="OUT")
    args = parser.parse_args(argv)
    try:
        if args.command is None:
            return demo()
        if args.command == "show":
            show(args.source)
        elif args.command == "import-hf":
            _, notices = import_hf(args.source, args.out)
            print("\n".join([*notices, f"wrote {newest(args.out)}; start from it with train.py "
                                       f"--init-from {args.out}"]))
        else:
            export_hf(args.source, args.out)
            print(f"wrote {args.out}")
    except (ValueError, OSError) as error:
        print(f"checkpoint.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
