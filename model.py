"""The model: a DeepSeek-V3-style (or Llama-style) transformer, written as if there were one device.

    tokens -> embed -> [ attn_norm -> attention -> + -> ffn_norm -> SwiGLU or MoE -> + ] x n_layers
           -> norm -> head -> cross-entropy

Pre-norm blocks with RMSNorm; the first n_dense_layers blocks have a dense SwiGLU, the rest a
mixture of experts; attention is multi-head latent attention (mla.py) or, with kv_lora_rank=0,
MHA/GQA/MQA. Nothing here knows of ranks: parallelism plugs in at four seams, plain attributes and
methods that it replaces: linear layers (nn.Linear, and `project`: those that share an input), the
attention core (attn.core), the experts (ffn.routed), and embedding + head + loss (embed,
head_loss).

Shapes: b batch, s sequence, h heads, g key/value heads, d width, v vocabulary, e experts, n tokens.

Papers: DeepSeek-V3 (arXiv 2412.19437), DeepSeek-V2 (2405.04434), Llama 3 (2407.21783), GQA
(2305.13245), selective recomputation (2205.05198, section 5).
Course: 00:16:50 architecture, parameters and FLOPs; 01:50:16 the transformer and its start;
02:19:12 attention and the KV cache.

    python model.py                  checks every piece against an independent formula; prints PASS
    python model.py --bench          RMSNorm timings, and MFU of `small` and `small-dense`
    python model.py count MODEL      parameters (total and active, by part) and FLOPs per token
    python model.py generate --checkpoint DIR --prompt TEXT
"""
import argparse
import dataclasses
import difflib
import functools
import hashlib
import math
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as repeat_forward

import rope
from mla import MLA, attend, cache_mask, document_mask, write_cache
from moe import Experts, MoE, Router, SwiGLU, check_routing, difference

IGNORED = -100  # the label of a position that has no target
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
          "fp64": torch.float64}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every number that shapes the model; `python train.py --override FIELD=VALUE` reaches each.

    Raises ValueError, naming the fields, for a combination that no model can have.
    """
    vocab_size: int = 512            # rows of the embedding and of the head; tokens lie below it
    dim: int = 64                    # model width, numbers per token between blocks
    inter_dim: int = 192             # hidden width of a dense SwiGLU
    moe_inter_dim: int = 64          # hidden width of one expert
    n_layers: int = 4                # blocks, dense and MoE together
    n_dense_layers: int = 1          # how many of them, from the first, have a dense SwiGLU
    n_heads: int = 4                 # query heads
    n_kv_heads: int = 0              # key/value heads of MHA/GQA/MQA; 0 under MLA
    q_lora_rank: int = 32            # numbers per token of the compressed query; 0 = not compressed
    kv_lora_rank: int = 16           # numbers per token of MLA's latent; 0 = no MLA but MHA/GQA/MQA
    qk_nope_head_dim: int = 16       # numbers per head of q and k without rotary embedding (MLA)
    qk_rope_head_dim: int = 8        # numbers per head of q and k with rotary embedding
    v_head_dim: int = 16             # numbers per head of v
    num_experts: int = 8             # routed experts per MoE block; 0 = dense blocks only
    num_shared_experts: int = 1      # experts that see every token (one SwiGLU of that many widths)
    top_k: int = 2                   # routed experts per token
    score_func: str = "sigmoid"      # of the router: sigmoid (V3) or softmax (V2)
    route_norm: bool = True          # divide the chosen scores by their sum
    route_scale: float = 1.0         # factor on the gate weights
    n_group: int = 1                 # groups the experts are divided into
    topk_group: int = 1              # groups that a token may choose experts from
    bias_update_speed: float = 0.001  # gamma: how far a step moves an expert's bias; 0 = not at all
    seq_balance_coeff: float = 1e-4  # weight of the sequence-wise balance loss (V3)
    aux_loss_coeff: float = 0.0      # weight of GShard's and Switch's auxiliary loss
    max_seq_len: int = 2048          # positions, the longest sequence the model is made for
    original_seq_len: int = 2048     # positions it was pre-trained with; longer ones need YaRN
    rope_theta: float = 10000.0      # base of the rotary frequencies
    rope_factor: float = 1.0         # YaRN's factor, used when max_seq_len > original_seq_len
    beta_fast: float = 32.0          # YaRN: turns in original_seq_len above which a pair is kept
    beta_slow: float = 1.0           # YaRN: turns below which a pair is slowed by rope_factor
    mscale: float = 1.0              # YaRN: attention magnitude, on cos and sin over mscale_all_dim
    mscale_all_dim: float = 0.0      # YaRN: attention magnitude, squared on the softmax scale
    rope_interleaved: bool = True    # pairs (2i, 2i+1) as DeepSeek; else (i, i+dim/2) as Llama
    norm_eps: float = 1e-6           # added to the mean square in RMSNorm
    tie_embeddings: bool = False     # the head is the embedding's matrix
    init_std: float = 0.02           # standard deviation of every matrix at the start

    @property
    def is_mla(self):
        return self.kv_lora_rank > 0

    @property
    def yarn_factor(self):
        """YaRN's factor where it applies: only a model made longer than it was trained uses it."""
        return self.rope_factor if self.max_seq_len > self.original_seq_len else 1.0

    def n_moe_layers(self):
        return self.n_layers - self.n_dense_layers if self.num_experts else 0

    def __post_init__(self):
        def refuse_if(wrong, text):
            if wrong:
                raise ValueError(text.format(**dataclasses.asdict(self)))

        optional = {"n_kv_heads", "q_lora_rank", "kv_lora_rank", "num_experts",
                    "num_shared_experts", "n_dense_layers", "qk_nope_head_dim"}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < (field.name not in optional):
                raise ValueError(f"{field.name}={value} must be at least "
                                 f"{int(field.name not in optional)}")
            if field.type is float and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}={value} must be a finite number of at least 0")
        refuse_if(self.qk_rope_head_dim % 2, "qk_rope_head_dim={qk_rope_head_dim} must be even: "
                  "a rotary embedding turns pairs of numbers")
        refuse_if(self.is_mla and self.n_kv_heads, "n_kv_heads={n_kv_heads} with "
                  "kv_lora_rank={kv_lora_rank}: MLA has a latent and no key/value heads; "
                  "use n_kv_heads=0, or kv_lora_rank=0 for MHA/GQA/MQA")
        if not self.is_mla:
            legal = [g for g in range(1, self.n_heads + 1) if self.n_heads % g == 0]
            refuse_if(self.n_kv_heads not in legal, "n_kv_heads={n_kv_heads} does not divide "
                      f"n_heads={{n_heads}}; with kv_lora_rank=0 use one of {legal}")
            refuse_if(self.q_lora_rank, "q_lora_rank={q_lora_rank} compresses MLA's queries, but "
                      "kv_lora_rank=0 means no MLA; use q_lora_rank=0")
            refuse_if(self.qk_nope_head_dim or self.qk_rope_head_dim != self.v_head_dim,
                      "with kv_lora_rank=0 a head is v_head_dim={v_head_dim} wide and all of it is "
                      "rotated: use qk_nope_head_dim=0 (not {qk_nope_head_dim}) and "
                      "qk_rope_head_dim={v_head_dim} (not {qk_rope_head_dim})")
        refuse_if(self.n_dense_layers > self.n_layers,
                  "n_dense_layers={n_dense_layers} is more than n_layers={n_layers}; give both "
                  "(for a model without experts the same number)")
        refuse_if(self.original_seq_len < self.max_seq_len and self.rope_factor < 1,
                  "rope_factor={rope_factor} must be at least 1")
        if self.num_experts:
            check_routing(self.num_experts, self.top_k, self.score_func, self.n_group,
                          self.topk_group)


def _deepseek(**changes):
    """What the published DeepSeek models share (their config.json files)."""
    shared = dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512,
                  max_seq_len=163840, original_seq_len=4096, rope_factor=40.0, mscale=1.0,
                  mscale_all_dim=1.0, init_std=0.006)
    return ModelConfig(**{**shared, **changes})


def _dense(**changes):
    """Llama-shaped: no experts, no latent, rotary embedding over the whole head, split halves."""
    head_dim = changes.pop("head_dim")
    return ModelConfig(**{**dict(
        num_experts=0, n_dense_layers=changes["n_layers"], q_lora_rank=0, kv_lora_rank=0,
        qk_nope_head_dim=0, qk_rope_head_dim=head_dim, v_head_dim=head_dim, norm_eps=1e-5,
        rope_interleaved=False), **changes})


def _llama3(**changes):
    return _dense(vocab_size=128256, n_kv_heads=8, head_dim=128, rope_theta=5e5, max_seq_len=8192,
                  original_seq_len=8192, **changes)


PRESETS = {
    "tiny": ModelConfig(init_std=0.05),
    "tiny-dense": _dense(dim=64, inter_dim=192, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16,
                         init_std=0.05),
    "small": ModelConfig(dim=512, inter_dim=1408, moe_inter_dim=352, n_layers=6, n_heads=8,
                         q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=48,
                         qk_rope_head_dim=16, v_head_dim=64, num_experts=16, top_k=4),
    "small-dense": _dense(dim=512, inter_dim=1408, n_layers=8, n_heads=8, n_kv_heads=4,
                          head_dim=64),
    # The V2 models scored with softmax and balanced with auxiliary losses (2405.04434, 2.2.3).
    "deepseek-v2-lite": _deepseek(
        vocab_size=102400, dim=2048, n_layers=27, n_dense_layers=1, inter_dim=10944,
        moe_inter_dim=1408, n_heads=16, q_lora_rank=0, num_experts=64, num_shared_experts=2,
        top_k=6, score_func="softmax", route_norm=False, bias_update_speed=0.0,
        seq_balance_coeff=0.0, aux_loss_coeff=0.001, mscale=0.707, mscale_all_dim=0.707),
    "deepseek-v2": _deepseek(
        vocab_size=102400, dim=5120, n_layers=60, n_dense_layers=1, inter_dim=12288,
        moe_inter_dim=1536, n_heads=128, q_lora_rank=1536, num_experts=160, num_shared_experts=2,
        top_k=6, n_group=8, topk_group=3, score_func="softmax", route_norm=False, route_scale=16.0,
        bias_update_speed=0.0, seq_balance_coeff=0.0, aux_loss_coeff=0.003),
    "deepseek-v3": _deepseek(
        vocab_size=129280, dim=7168, n_layers=61, n_dense_layers=3, inter_dim=18432,
        moe_inter_dim=2048, n_heads=128, q_lora_rank=1536, num_experts=256, num_shared_experts=1,
        top_k=8, n_group=8, topk_group=4, route_scale=2.5),
    "llama3-8b": _llama3(dim=4096, n_layers=32, n_heads=32, inter_dim=14336),
    "llama3-70b": _llama3(dim=8192, n_layers=80, n_heads=64, inter_dim=28672),
    "llama3-405b": _llama3(dim=16384, n_layers=126, n_heads=128, inter_dim=53248),
}


# fields that only a MoE block reads
OF_EXPERTS = ["moe_inter_dim", "num_experts", "num_shared_experts", "top_k", "score_func",
              "route_norm", "route_scale", "n_group", "topk_group", "bias_update_speed",
              "seq_balance_coeff", "aux_loss_coeff"]


def nearest(word, known):
    close = difflib.get_close_matches(word, known, 1)
    return f"did you mean {close[0]}?" if close else "known: " + ", ".join(known)


def make_config(name, overrides=()):
    """The preset `name` with `overrides`. Raises ValueError for an unknown name, and as
    override_config does."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; " + nearest(name, list(PRESETS)))
    return override_config(PRESETS[name], overrides)


def override_config(config, overrides):
    """`config` with a list of "field=value" applied. Raises ValueError, with the nearest right
    spelling, for an unknown field or a value of the wrong type, and for a field of experts where no
    block has them."""
    types = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    changes = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise ValueError(f"--override {item!r} has no '='; write FIELD=VALUE")
        if key not in types:
            raise ValueError(f"--override {key}: no such field; " + nearest(key, list(types)))
        try:
            changes[key] = ({"true": True, "1": True, "false": False, "0": False}[text.lower()]
                            if types[key] is bool else types[key](text))
        except (ValueError, KeyError):
            raise ValueError(f"--override {item}: {text!r} is not of type "
                             f"{types[key].__name__}") from None
    config = dataclasses.replace(config, **changes)
    idle = [field for field in OF_EXPERTS if changes.get(field)]
    if idle and not config.n_moe_layers():
        raise ValueError(f"--override {idle[0]}={changes[idle[0]]}: no block has experts; with "
                         f"num_experts={config.num_experts} and n_dense_layers="
                         f"{config.n_dense_layers} of {config.n_layers} layers add num_experts=8 "
                         f"n_dense_layers=1, or leave {idle[0]} out")
    return config


@dataclasses.dataclass
class KVCache:
    """Rotated keys and values of one block, k and v: (b, max_len, g, head_dim)."""
    k: torch.Tensor
    v: torch.Tensor


class GQA(nn.Module):
    """Multi-head attention with n_kv_heads key/value heads, each serving n_heads/n_kv_heads query
    heads: MHA when equal, MQA with one (arXiv 1911.02150), else GQA (2305.13245)."""

    def __init__(self, dim, n_heads, n_kv_heads, head_dim, scale, rope_interleaved):
        super().__init__()
        self.head_dim, self.scale, self.rope_interleaved = head_dim, scale, rope_interleaved
        self.n_kv_heads = n_kv_heads
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def new_cache(self, batch, max_len, device=None, dtype=None):
        shape = batch, max_len, self.n_kv_heads, self.head_dim
        return KVCache(*(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)))

    def project(self, x):
        """The layers that read x (b, s, d): -> queries, keys, values."""
        return self.wq(x), self.wk(x), self.wv(x)

    def core(self, q, k, v, mask):
        """q (b, s, h, head_dim), k and v (b, s, g, head_dim) -> (b, s, h, head_dim), causal."""
        return attend(q, k, v, self.scale, mask)

    def forward(self, x, rope_table, positions=None, mask=None, cache=None):
        """x (b, s, d) -> (b, s, d); mask, positions and cache are MLA.forward's."""
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in self.project(x))
        q = rope.apply_rotary(q, *rope_table, self.rope_interleaved)  # (b, s, h, head_dim)
        k = rope.apply_rotary(k, *rope_table, self.rope_interleaved)  # (b, s, g, head_dim)
        if cache is not None:
            write_cache(cache.k, positions, k)
            write_cache(cache.v, positions, v)
            k, v = cache.k, cache.v  # (b, t, g, head_dim)
            mask = cache_mask(positions, len(x), k.shape[1])
        return self.wo(self.core(q, k, v, mask).flatten(2))


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then that + ffn(norm(that))."""

    def __init__(self, config, layer):
        super().__init__()
        c = config
        scale = rope.softmax_scale(c.qk_nope_head_dim + c.qk_rope_head_dim, c.yarn_factor,
                                   c.mscale_all_dim)
        self.attn_norm = nn.RMSNorm(c.dim, c.norm_eps)
        if c.is_mla:
            self.attn = MLA(c.dim, c.n_heads, c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim,
                            c.qk_rope_head_dim, c.v_head_dim, c.norm_eps, scale, c.rope_interleaved)
        else:
            self.attn = GQA(c.dim, c.n_heads, c.n_kv_heads, c.v_head_dim, scale, c.rope_interleaved)
        self.ffn_norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.is_moe = layer >= c.n_layers - c.n_moe_layers()
        if self.is_moe:
            self.ffn = MoE(c.dim, c.moe_inter_dim, c.num_experts, c.num_shared_experts,
                           top_k=c.top_k, score_func=c.score_func, route_norm=c.route_norm,
                           route_scale=c.route_scale, n_group=c.n_group, topk_group=c.topk_group,
                           seq_balance_coeff=c.seq_balance_coeff, aux_loss_coeff=c.aux_loss_coeff)
        else:
            self.ffn = SwiGLU(c.dim, c.inter_dim)

    def forward(self, x, rope_table, mask=None, balance_seed=0.0, positions=None, cache=None):
        """x (b, s, d) -> (b, s, d); the other arguments are Transformer.forward's."""
        x = x + self.attn(self.attn_norm(x), rope_table, positions, mask, cache)
        hidden = self.ffn_norm(x)
        return x + (self.ffn(hidden, balance_seed) if self.is_moe else self.ffn(hidden))


class Transformer(nn.Module):
    """The whole model. Under `with torch.device("meta")` it costs no memory; see initialise().

    Blocks keep their global index as their name, so that any subset of them still knows its place.
    """

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        # given a matrix, since drawing one on the meta device imports torch's compiler
        self.embed = nn.Embedding.from_pretrained(torch.empty(c.vocab_size, c.dim), freeze=False)
        self.blocks = nn.ModuleDict({str(i): Block(c, i) for i in range(c.n_layers)})
        self.norm = nn.RMSNorm(c.dim, c.norm_eps)
        self.head = None if c.tie_embeddings else nn.Linear(c.dim, c.vocab_size, bias=False)
        self.inv_freq = rope.inverse_frequencies(
            c.qk_rope_head_dim, c.rope_theta, c.yarn_factor, c.original_seq_len, c.beta_fast,
            c.beta_slow)

    def rope_table(self, positions, dtype):
        """cos and sin, each positions.shape + (rope/2,), for every block, in float32 or float64."""
        c = self.config
        return rope.rotary_table(
            positions, self.inv_freq.to(positions.device), c.max_seq_len,
            rope.yarn_amplitude(c.yarn_factor, c.mscale, c.mscale_all_dim),
            torch.promote_types(dtype, torch.float32))

    def forward(self, tokens, positions=None, document_ids=None, balance_seed=0.0, caches=None):
        """tokens (b, s) -> hidden states after the last norm (b, s, d).

        positions     (s,) or (b, s): where each token stands; 0..s-1 when not given. They are
                      checked against max_seq_len: on a GPU give them on the CPU to save a wait
        document_ids  (b, s), on any device: attention stays within equal ids (packed documents)
        balance_seed  loss_scale / sequences of the global batch: the factor on the MoE balance
                      losses' gradients, which enter backward where they arise (moe.py)
        caches        one cache per block (new_caches): tokens are read from and added to them
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1])
        hidden = self.embed(tokens)
        return self.norm(self.through(self.blocks, hidden, positions, document_ids, balance_seed,
                                      caches))

    def through(self, names, x, positions, document_ids=None, balance_seed=0.0, caches=None):
        """x (b, s, d) through the blocks of these names; the rest as forward() has it."""
        table = [t.to(x.device) for t in self.rope_table(positions, x.dtype)]
        positions = positions.to(x.device)
        mask = None if document_ids is None else self.attention_scope(document_ids, x.device)
        for name in names:
            cache = None if caches is None else caches[name]
            x = self.blocks[name](x, table, mask, balance_seed, positions, cache)
        return x

    def attention_scope(self, document_ids, device):
        """What the attention cores take as `mask`."""
        return document_mask(document_ids.to(device, non_blocking=True))

    def new_caches(self, batch, max_len, device=None, dtype=None):
        return {name: block.attn.new_cache(batch, max_len, device, dtype)
                for name, block in self.blocks.items()}

    def head_weight(self):
        """(v, d). Detached under no_grad: a Function asks the tensor alone whether its gradient is
        wanted, and head_loss would form one in every validation."""
        weight = (self.embed if self.head is None else self.head).weight
        return weight if torch.is_grad_enabled() else weight.detach()

    def logits(self, hidden):
        """hidden (..., d) -> (..., v) in float32 (float64 in float64)."""
        logits = F.linear(hidden, self.head_weight())
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def head_loss(self, hidden, labels, seed=1.0):
        """Cross-entropy summed over the tokens whose label is not IGNORED.

        hidden (b, s, d), labels (b, s); `seed` is the number that backward will be given: the
        gradients are formed on the way forward, and float16 needs its loss scale in them by then.
        """
        return ChunkedCrossEntropy.apply(hidden.flatten(0, -2), self.head_weight(),
                                         labels.flatten(), seed)


class ChunkedCrossEntropy(torch.autograd.Function):
    """sum of -log softmax(hidden @ weight.T)[label], in chunks of tokens.

    The logits of one chunk exist at a time: forward turns them into their own gradient, softmax
    minus one-hot, and at once into the gradients of hidden and weight. So backward repeats no
    product, and neither logits nor probabilities are kept: for DeepSeek-V3's vocabulary a token's
    logits take 129,280 numbers, 18 times its hidden state.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, seed):
        """hidden (n, d), weight (v, d), labels (n,) -> a scalar in float32 (float64 in float64)."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        chunk = min(max(2 ** 25 // weight.shape[0], 256), 8192)  # at most 128 MiB of float32 logits
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            valid = labels[rows] != IGNORED
            target = labels[rows].clamp(min=0)[:, None]
            logits = F.linear(hidden[rows], weight).to(wide)  # (chunk, v)
            lse = torch.logsumexp(logits, -1, keepdim=True)
            total += ((lse - logits.gather(-1, target))[:, 0] * valid).sum()
            if not (want_hidden or want_weight):
                continue
            grad = logits.sub_(lse).exp_()  # the softmax
            grad.scatter_add_(-1, target, torch.full_like(lse, -1.0))
            grad = grad.mul_((valid.to(wide) * seed)[:, None]).to(hidden.dtype)
            if want_hidden:
                torch.mm(grad, weight, out=grad_hidden[rows])
            if want_weight:
                grad_weight += grad.T @ hidden[rows]
        ctx.seed = seed
        ctx.grads = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        factor = grad_output / ctx.seed
        grads = [None if g is None else g.mul_(factor.to(g.dtype)) for g in ctx.grads]
        del ctx.grads
        return *grads, None, None


# ---- starting values ----

def full_value(seed, name, shape, std, expert=None):
    """The starting value of a parameter: a function of (seed, global name, expert index) alone.

    Always drawn in float32 by the CPU's generator, so that every layout, device and dtype starts
    alike. Normal with the configuration's init_std; norms are ones (DeepSeek-V3, section 4.2).
    """
    if "norm" in name.split(".")[-2]:
        return torch.ones(shape)
    key = hashlib.blake2b(f"{seed}/{name}/{expert}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def starting_part(seed, name, shape, std, region=None):
    """The part of a parameter's starting value that lies in `region`, (start, length) per dimension
    (None: all of it). Beside it one full tensor exists at a time, of stacked experts one expert."""
    region = region or [(0, size) for size in shape]

    def cut(full, region):
        return full[tuple(slice(start, start + length) for start, length in region)]
    if ".experts." not in name:
        return cut(full_value(seed, name, shape, std), region)
    first, count = region[0]
    part = torch.empty([length for _, length in region])
    for expert in range(first, first + count):
        part[expert - first] = cut(full_value(seed, name, shape[1:], std, expert), region[1:])
    return part


def take_memory(model, dtype, device):
    """Memory for a model on the meta device, not filled; labels of parameters stay. (torch's own
    to_empty() imports half a second of symbolic algebra.)"""
    labels = {name: parameter.__dict__ for name, parameter in model.named_parameters()}
    model.to(dtype)._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
    for name, parameter in model.named_parameters():
        parameter.__dict__.update(labels[name])


@torch.no_grad()
def initialise(model, seed, device="cpu", dtype=torch.float32):
    """Give a model built on the meta device memory on `device` and starting values."""
    take_memory(model, dtype, device)
    for name, parameter in model.named_parameters():
        parameter.copy_(starting_part(seed, name, parameter.shape, model.config.init_std))
    zero_buffers(model, device)
    return model


def zero_buffers(model, device):
    """Counts, biases and balance losses as they are before the first step, on `device`."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


# ---- recompute: store less in forward, repeat it in backward ----

def apply_recompute(model, mode):
    """--recompute full | selective (none: leave the model as it is).

    full       keeps each block's input alone and repeats the block's forward in backward: a third
               more compute.
    selective  repeats what is large and cheap: norms, the SwiGLU product and MLA's up-projection of
               the latent into keys and values. Linear layers and attention are not repeated, and
               nothing that communicates is (arXiv 2205.05198, section 5, applied to this model).
    """
    for block in model.blocks.values():
        if mode == "full":
            block.forward = functools.partial(_repeat_block, block.forward)
        elif mode == "selective":
            _recompute_selected(block)


def _repeat_block(forward, *args):
    return repeat_forward(forward, *args, use_reentrant=False, preserve_rng_state=False)


class Recomputed:
    """Outputs of `function(*inputs)` that backward repeats from the inputs instead of keeping.

    Autograd asks twice about each tensor it wants for backward: `pack` when forward hands it over
    and `unpack` when backward needs it. Where the tensor is an output (or a view of one) pack
    hands back this record; the first unpack repeats the function, the last one frees the result.
    """

    def __init__(self, function, inputs, outputs):
        self.function, self.inputs, self.outputs = function, inputs, outputs
        self.repeated, self.pending = None, 0

    def pack(self, tensor):
        index = [out.untyped_storage().data_ptr() for out in self.outputs].index(
            tensor.untyped_storage().data_ptr())
        self.pending += 1
        return self, index, tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, index, shape, stride, offset):
        """The tensor that pack was given, made again."""
        if self.repeated is None:
            with torch.no_grad():
                repeated = self.function(*self.inputs)
            self.repeated = repeated if isinstance(repeated, tuple) else (repeated,)
        tensor = self.repeated[index].as_strided(shape, stride, offset)
        self.pending -= 1
        if not self.pending:
            self.repeated = None
        return tensor


def _recompute_selected(block):
    """Have a block keep Recomputed records in place of the outputs of the selected methods."""
    records = {}  # address of an output's storage -> its Recomputed, while the block runs

    def repeatable(function):
        """`function` with a record of what it made."""
        def run(*inputs):
            result = function(*inputs)
            outputs = result if isinstance(result, tuple) else (result,)
            record = Recomputed(function, [t.detach() for t in inputs], outputs)
            records.update((out.untyped_storage().data_ptr(), record) for out in outputs
                           if out.numel())  # all empty tensors have the address 0
            return result
        return run

    def pack(tensor):
        record = records.get(tensor.untyped_storage().data_ptr())
        return tensor if record is None else record.pack(tensor)

    def unpack(packed):
        return packed[0].unpack(*packed[1:]) if isinstance(packed, tuple) else packed

    def forward(*args):
        """The block's forward, with the records of what it made looked up as autograd saves."""
        if not torch.is_grad_enabled():
            return plain_forward(*args)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = plain_forward(*args)
        for record in records.values():
            record.outputs = None  # they lived until here so that no address was used twice
        records.clear()
        return out

    plain_forward, block.forward = block.forward, forward
    selected = {nn.RMSNorm: "forward", SwiGLU: "product", Experts: "product", MLA: "expand"}
    for module in block.modules():
        name = selected.get(type(module))
        if name:
            setattr(module, name, repeatable(getattr(module, name)))


def compile_regions(model):
    """--compile: torch.compile the parts of a block that never communicate, one by one, so that a
    technique can later put its collectives between them. Context parallelism communicates inside
    the attention core, puts its own in that place, and leaves it uncompiled."""
    regions = {nn.RMSNorm: "forward", SwiGLU: "product", Experts: "product", Router: "forward",
               MLA: "core", GQA: "core"}
    for module in model.modules():
        name = regions.get(type(module))
        if name:
            setattr(module, name, torch.compile(getattr(module, name)))


# ---- how many parameters, how much compute ----

def count_parameters(config):
    """Part of the model -> (parameters, those that one token uses), by formula.

    A token uses top_k of the routed experts and everything else. The expert bias is a buffer.
    """
    c, dense = config, config.n_layers - config.n_moe_layers()
    qk_dim, expert = c.qk_nope_head_dim + c.qk_rope_head_dim, 3 * c.dim * c.moe_inter_dim
    norms = 2 * c.dim
    if c.is_mla:
        q = c.n_heads * qk_dim
        attention = (c.q_lora_rank * (c.dim + q) if c.q_lora_rank else c.dim * q)
        attention += c.dim * (c.kv_lora_rank + c.qk_rope_head_dim)
        attention += c.kv_lora_rank * c.n_heads * (c.qk_nope_head_dim + c.v_head_dim)
        attention += c.n_heads * c.v_head_dim * c.dim
        norms += c.q_lora_rank + c.kv_lora_rank
    else:
        attention = 2 * c.dim * c.v_head_dim * (c.n_heads + c.n_kv_heads)
    moe = c.n_moe_layers()
    both = {"embedding": c.vocab_size * c.dim,
            "attention": c.n_layers * attention,
            "dense FFN": dense * 3 * c.dim * c.inter_dim,
            "router": moe * c.num_experts * c.dim,
            "shared experts": moe * c.num_shared_experts * expert,
            "norms": c.n_layers * norms + c.dim,
            "head": 0 if c.tie_embeddings else c.vocab_size * c.dim}
    counts = {part: (number, number) for part, number in both.items()}
    counts["routed experts"] = moe * c.num_experts * expert, moe * c.top_k * expert
    return counts


def total_parameters(config):
    """(all parameters, those that one token uses)."""
    return tuple(map(sum, zip(*count_parameters(config).values())))


def flops_per_token(config, seq_len, causal=True):
    """Training FLOPs per token: 6 for each matrix parameter a token uses (2 forward, 4 backward;
    head included, embedding look-up and norms not), and attention's 6 for each of q k and p v.

    A causal mask leaves half of the attention (PaLM, arXiv 2204.02311, appendix B, counts all).
    """
    c, counts = config, count_parameters(config)
    matrices = sum(counts[part][1] for part in ("attention", "dense FFN", "router",
                                                "shared experts", "routed experts"))
    heads = c.n_layers * c.n_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    return 6 * (matrices + c.vocab_size * c.dim) + 6 * heads * seq_len // (2 if causal else 1)


def print_counts(name, config, seq_len):
    """The table of `python model.py count`."""
    counts = count_parameters(config)
    rows = [(part, *counts[part]) for part in counts if counts[part][0]]
    rows.append(("total", *total_parameters(config)))
    print(f"{name:18}{'parameters':>20}{'active per token':>20}")
    for part, total, active in rows:
        print(f"{part:18}{total:20,}{active:20,}")
    without = rows[-1][2] - counts["embedding"][1]
    print(f"{'without embedding':38}{without:20,}")
    for causal, label in ((True, "causal"), (False, "non-causal")):
        flops = flops_per_token(config, seq_len, causal)
        print(f"training FLOPs per token at seq_len {seq_len}, {label} attention: {flops:,}")


# ---- sampling ----

def sample(logits, temperature, top_k, top_p, generator=None):
    """One token id (b,) from logits (b, v). temperature 0 takes the largest; top_k > 0 keeps that
    many; top_p < 1 keeps the fewest likeliest tokens that hold that much probability."""
    if temperature == 0:
        return logits.argmax(-1)
    values, ids = (logits / temperature).sort(-1, descending=True)
    if top_k:
        values[:, top_k:] = -math.inf
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # what the likelier tokens already hold
    probabilities = probabilities.masked_fill(before >= top_p, 0.0)
    choice = torch.multinomial(probabilities.cpu(), 1, generator=generator).to(ids.device)
    return ids.gather(-1, choice)[:, 0]


@torch.no_grad()
def generate(model, tokens, max_new_tokens, choose):
    """Yield `max_new_tokens` token ids (b,), each chosen by choose(logits (b, v)) -> (b,).

    The prompt, tokens (b, s), goes through once; then one token at a time with the caches.
    Raises ValueError when prompt and new tokens together are longer than max_seq_len.
    """
    end, limit = tokens.shape[1] + max_new_tokens, model.config.max_seq_len
    if end > limit:
        raise ValueError(f"{tokens.shape[1]} prompt tokens and {max_new_tokens} new ones are "
                         f"{end}, more than max_seq_len={limit}; use --max-new-tokens "
                         f"{max(limit - tokens.shape[1], 0)} or a shorter prompt")
    weight = model.embed.weight
    caches = model.new_caches(len(tokens), end, weight.device, weight.dtype)
    start = 0
    for _ in range(max_new_tokens):
        positions = torch.arange(start, start + tokens.shape[1])
        hidden = model(tokens, positions, caches=caches)
        chosen = choose(model.logits(hidden[:, -1]))
        yield chosen
        start, tokens = start + tokens.shape[1], chosen[:, None]


# ---- demonstration, benchmark, command line ----

def built(config, seed=0, dtype=torch.float32, device="cpu"):
    """A model with starting values: built on the meta device, then given memory."""
    with torch.device("meta"):
        model = Transformer(config)
    return initialise(model, seed, device, dtype)


def loss_and_grads(model, tokens, labels):
    loss = model.head_loss(model(tokens, balance_seed=1.0), labels)
    loss.backward()
    return [loss.detach()] + [p.grad for p in model.parameters()]


def demo():
    """Check counts, loss, norm and recompute against independent computations."""
    worst = {}
    print(f"{'preset':18}{'parameters':>18}{'active':>18}{'GFLOP/token':>13}")
    for name, config in PRESETS.items():
        with torch.device("meta"):
            held = sum(p.numel() for p in Transformer(config).parameters())
        total, active = total_parameters(config)
        worst["parameter formulas"] = max(worst.get("parameter formulas", 0), abs(held - total))
        print(f"{name:18}{total:18,}{active:18,}{flops_per_token(config, 4096) / 1e9:13,.2f}")

    config = make_config("tiny", ["vocab_size=61"])
    tokens, labels = torch.randint(61, (2, 2, 24))
    labels[0, 3:9] = IGNORED
    model = built(config, dtype=torch.float64)
    hidden = torch.randn(48, 64, dtype=torch.float64, requires_grad=True)
    weight = model.head.weight
    ours = torch.autograd.grad(model.head_loss(hidden, labels), [hidden, weight])
    plain = F.cross_entropy(hidden @ weight.T, labels.flatten(), reduction="sum")
    worst["cross-entropy gradients"] = max(map(difference, ours, torch.autograd.grad(
        plain, [hidden, weight])))
    norm = hidden / (hidden.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
    worst["RMSNorm"] = difference(model.norm(hidden), norm * model.norm.weight)
    reference = loss_and_grads(model, tokens, labels)
    for mode in ("selective", "full"):
        other = built(config, dtype=torch.float64)
        apply_recompute(other, mode)
        worst[f"recompute {mode}"] = max(map(difference, loss_and_grads(other, tokens, labels),
                                             reference))
    for what, value in worst.items():
        print(f"largest difference, {what:24} {value:.1e}")
    failed = [what for what, value in worst.items() if not value < 1e-10]
    print(f"FAILED: {', '.join(failed)}" if failed else "PASS")
    return 1 if failed else 0


def bench():
    """Time RMSNorm beside its formula, and whole training steps beside the matrix-product peak."""
    import train
    from collectives import paired_ratio
    train.keep_freed_memory()
    x = torch.randn(8192, 512, requires_grad=True)
    norm, grad = nn.RMSNorm(512, 1e-6), torch.randn(8192, 512)

    def unfused(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight

    ratio, _ = paired_ratio(lambda: norm(x).backward(grad), lambda: unfused(x).backward(grad), 11)
    print(f"RMSNorm forward and backward, torch's fused / formula: {ratio}")
    for name in ("small-dense", "small"):
        train.bench(name)


def main(argv=None):
    """The commands of the module docstring. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Check, count or sample from the model.")
    parser.add_argument("--bench", action="store_true", help="time it instead of checking it")
    commands = parser.add_subparsers(dest="command")
    count = commands.add_parser("count", help="parameters and FLOPs per token of a preset",
                                formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    count.add_argument("model", help=", ".join(PRESETS))
    count.add_argument("--override", nargs="+", action="extend", default=[],
                       metavar="FIELD=VALUE", help="changes")
    count.add_argument("--seq-len", type=int, default=4096, help="for attention's FLOPs")
    sampling = commands.add_parser("generate", help="continue a prompt",
                                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for flag, type_, default, text in (
            ("--checkpoint", str, None, "a run's --out folder or one of its checkpoints"),
            ("--prompt", str, None, "text to continue"),
            ("--tokenizer", str, "", "as for train.py; the one the checkpoint was trained with"),
            ("--max-new-tokens", int, 256, "tokens to add"),
            ("--temperature", float, 0.8, "0 = always the likeliest token"),
            ("--top-k", int, 0, "choose among that many; 0 = all"),
            ("--top-p", float, 1.0, "choose among the likeliest that hold this probability"),
            ("--seed", int, 0, "of the choices")):
        sampling.add_argument(flag, type=type_, default=default, required=default is None,
                              help=text)
    sampling.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of the weights")
    sampling.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto",
                          help="auto = cuda where there is one")
    args = parser.parse_args(argv)
    try:
        if args.command == "count":
            print_counts(args.model, make_config(args.model, args.override), args.seq_len)
        elif args.command == "generate":
            import train
            train.generate_command(args)
        else:
            return bench() if args.bench else demo()
    except (ValueError, OSError) as error:
        print(f"model.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
