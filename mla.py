"""Multi-head latent attention (MLA): keys and values are made from one small latent per token.

    x (b, s, d) -> wq_a -> q_norm -> wq_b -> per head [ q_nope | q_pe ]     q_pe is rotated
                   (or wq alone, without query compression)
                -> wkv_a -> [ latent | k_pe ]     one of each per token; k_pe is rotated
       latent -> kv_norm -> wkv_b -> per head [ k_nope | v ]
       score of head i = (q_nope_i k_nope_i + q_pe_i k_pe) x scale;   out = wo [ sum p v ]

A cache needs the normalised latent and the rotated k_pe alone: for DeepSeek-V3 576 numbers a token
and layer where the heads' keys and values take 40,960. Three ways through the same weights:

    expanded   k_nope and v are made from the latents: training, and prompts
    cached     the same from a cache of latents, token by token or in chunks
    absorbed   scores and sums are taken on the latents themselves, and k_nope and v never exist:
               q_nope (W_uk c) = (W_uk^T q_nope) c   and   sum p (W_uv c) = W_uv (sum p c)

Rotation keeps W_uk from being absorbed (it would stand between the two, and differ by position):
hence the decoupled k_pe, which is rotated and shared by all heads.

Shapes: b batch, s queries, t keys, h heads, g key/value heads, d width, c latent, r rotary part.

Papers: DeepSeek-V2 (arXiv 2405.04434, section 2.1 and appendix C), MQA (1911.02150).
Course: 02:19:12 KV cache and arithmetic intensity, 03:02:56 coding MLA, 03:15:35 block matrices,
03:34:58 deriving MLA and decoupled RoPE, 04:10:54 weight absorption.

    python mla.py            cache sizes, and absorption derived step by step; prints PASS
    python mla.py --bench    padded values, and decoding absorbed beside expanded
"""
import argparse
import dataclasses
import sys

import torch
import torch.nn.functional as F
from torch import nn

import rope


def attend(q, k, v, scale, mask=None):
    """softmax(q k^T scale) v by torch's fused kernels, causal, or as `mask` says.

    q (b, s, h, dk), k (b, t, g, dk), v (b, t, g, dv), each key head serving h/g query heads ->
    (b, s, h, dv). mask: bool (b, 1, s, t), True where a query may look; without one s = t.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
        is_causal=mask is None, scale=scale, enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)


def pad_values(v, width):
    """v (b, t, h, dv) padded with zeros to the keys' width where that pays.

    Fused kernels want values as wide as keys. A GPU's are always worth it. On a CPU they are for
    1,024 keys or more, where the unfused path's scores leave the cache, and for narrow heads;
    between, the unfused path is up to 1.4 times faster (--bench).
    """
    pays = v.is_cuda or v.shape[1] >= 1024 or width <= 32
    return F.pad(v, (0, width - v.shape[-1])) if pays and v.shape[-1] < width else v


def document_mask(document_ids):
    """(b, s) -> (b, 1, s, s) bool: a token sees those before it in its own document."""
    s = document_ids.shape[1]
    causal = torch.ones(s, s, dtype=torch.bool, device=document_ids.device).tril()
    return (causal & (document_ids[:, :, None] == document_ids[:, None]))[:, None]


def write_cache(cached, positions, values):
    """Put values (b, s, ...) into the slots `positions`, (s,) or (b, s), of cached (b, t, ...)."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    cached[rows, positions.expand(values.shape[:2])] = values


def cache_mask(positions, batch, slots):
    """(b, 1, s, slots) bool: a query at position p sees the slots 0..p.

    So prompts of different lengths are padded on the right: nothing sees the padding, and decoding
    writes over a padded slot in the very step in which it comes into sight.
    """
    positions = positions.expand(batch, positions.shape[-1])
    return (torch.arange(slots, device=positions.device) <= positions[..., None])[:, None]


@dataclasses.dataclass
class LatentCache:
    """Of one block: latent (b, max_len, c) after kv_norm, k_pe (b, max_len, r) after rotation."""
    latent: torch.Tensor
    k_pe: torch.Tensor


class MLA(nn.Module):
    """Multi-head latent attention; the module docstring draws it. Without query compression
    (q_lora_rank=0) wq takes the place of wq_a, q_norm and wq_b."""

    def __init__(self, dim, n_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim,
                 v_head_dim, norm_eps, scale, rope_interleaved=True):
        super().__init__()
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.scale, self.rope_interleaved = scale, rope_interleaved
        q_dim = n_heads * (qk_nope_head_dim + qk_rope_head_dim)
        if q_lora_rank:
            self.wq_a = nn.Linear(dim, q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(q_lora_rank, norm_eps)
            self.wq_b = nn.Linear(q_lora_rank, q_dim, bias=False)
        else:
            self.wq = nn.Linear(dim, q_dim, bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(kv_lora_rank, norm_eps)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.wo = nn.Linear(n_heads * v_head_dim, dim, bias=False)
        self.absorb = None  # True or False overrules the choice between the two ways to use a cache

    def new_cache(self, batch, max_len, device=None, dtype=None):
        return LatentCache(*(torch.zeros(batch, max_len, width, device=device, dtype=dtype)
                             for width in (self.kv_lora_rank, self.qk_rope_head_dim)))

    def project(self, x):
        """The layers that read x (b, s, d): -> the queries or their latent, [latent | k_pe]."""
        return (self.wq_a if hasattr(self, "wq_a") else self.wq)(x), self.wkv_a(x)

    def queries(self, q):
        """What project() made -> q_nope (b, s, h, nope), q_pe (b, s, h, r), not yet rotated."""
        q = self.wq_b(self.q_norm(q)) if hasattr(self, "wq_a") else q
        nope, r = self.qk_nope_head_dim, self.qk_rope_head_dim
        return q.unflatten(-1, (-1, nope + r)).split([nope, r], -1)

    def expand(self, latent, k_pe):
        """latent (b, t, c), k_pe (b, t, r) -> k (b, t, h, nope + r), v (b, t, h, at least v)."""
        k, v = self.keys_and_values(self.wkv_b(latent), k_pe)
        return k, pad_values(v, k.shape[-1])

    def keys_and_values(self, expanded, k_pe):
        """What wkv_b made (b, t, h (nope + v)), k_pe -> k (b, t, h, nope + r), v (b, t, h, v)."""
        nope, dv = self.qk_nope_head_dim, self.v_head_dim
        k_nope, v = expanded.unflatten(-1, (-1, nope + dv)).split([nope, dv], -1)
        return torch.cat([k_nope, k_pe[:, :, None].expand(-1, -1, k_nope.shape[2], -1)], -1), v

    def core(self, q_nope, q_pe, latent, k_pe, mask):
        """The attention core, from latents: -> (b, s, h, v)."""
        k, v = self.expand(latent, k_pe)
        return attend(torch.cat([q_nope, q_pe], -1), k, v, self.scale, mask)[..., :self.v_head_dim]

    def absorbed_core(self, q_nope, q_pe, latent, k_pe, mask):
        """core() on the latents themselves: one key head of width c + r that all heads share."""
        heads = self.wkv_b.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        w_uk, w_uv = heads.split([self.qk_nope_head_dim, self.v_head_dim], 1)  # (h, ., c)
        q = torch.cat([torch.einsum("bshn,hnc->bshc", q_nope, w_uk), q_pe], -1)  # (b, s, h, c + r)
        kv = torch.cat([latent, k_pe], -1)[:, :, None]  # (b, t, 1, c + r)
        # The sums over k_pe's columns are of no use; they spare a narrower copy of the values.
        out = attend(q, kv, kv, self.scale, mask)[..., :self.kv_lora_rank]
        return torch.einsum("bshc,hvc->bshv", out, w_uv)

    def absorbing_pays(self, queries):
        """Whether absorbed is less work than expanded for this many queries on a long cache.

        Per cached token and head, in multiply-adds: expanding takes c (nope + v), then each query
        nope + r + v; absorbed, each query takes 2 c + r. So up to c (nope + v) / (2 c - nope - v)
        queries: 170 for DeepSeek-V3.
        """
        c, heads = self.kv_lora_rank, self.qk_nope_head_dim + self.v_head_dim
        return queries * (2 * c - heads) <= c * heads

    def forward(self, x, rope_table, positions=None, mask=None, cache=None):
        """x (b, s, d) -> (b, s, d). rope_table: cos and sin of the tokens' positions.

        Without a cache: causal, or as `mask` (document_mask) says. With one, latents are written to
        the slots `positions`, (s,) or (b, s), and a query at position p sees the slots 0..p.
        """
        q, kv = self.project(x)
        q_nope, q_pe = self.queries(q)
        latent, k_pe = kv.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = self.kv_norm(latent)  # (b, s, c)
        q_pe = rope.apply_rotary(q_pe, *rope_table, self.rope_interleaved)
        k_pe = rope.apply_rotary(k_pe[:, :, None], *rope_table, self.rope_interleaved)[:, :, 0]
        core = self.core
        if cache is not None:
            write_cache(cache.latent, positions, latent)
            write_cache(cache.k_pe, positions, k_pe)
            latent, k_pe = cache.latent, cache.k_pe  # (b, t, c), (b, t, r)
            mask = cache_mask(positions, len(x), latent.shape[1])
            absorb = self.absorbing_pays(x.shape[1]) if self.absorb is None else self.absorb
            core = self.absorbed_core if absorb else self.core
        return self.wo(core(q_nope, q_pe, latent, k_pe, mask).flatten(2))


# ---- demonstration ----

# layers, query heads, key/value heads or latent + rotary part, head width (published shapes)
SHAPES = {"DeepSeek-V2-Lite": (27, 16, (512, 64), 128), "DeepSeek-V2": (60, 128, (512, 64), 128),
          "DeepSeek-V3": (61, 128, (512, 64), 128), "Llama-3-8B": (32, 32, 8, 128),
          "Llama-3-70B": (80, 64, 8, 128), "Llama-3.1-405B": (126, 128, 8, 128)}


def cache_numbers(kind, n_heads, kv, head_dim):
    """Numbers per token and layer that a cache keeps."""
    if kind == "MLA":
        return sum(kv)
    return 2 * head_dim * {"MHA": n_heads, "GQA": kv, "MQA": 1}[kind]


def decode_intensity(kind, n_heads, kv, head_dim):
    """FLOPs per byte of cache read (2 bytes a number) when one token attends to the cache."""
    if kind == "MLA":  # absorbed: scores over c + r numbers, sums over c
        flops = 2 * n_heads * (2 * kv[0] + kv[1])
    else:
        flops = 4 * n_heads * head_dim
    return flops / (2 * cache_numbers(kind, n_heads, kv, head_dim))


def show_caches():
    """Print the table and return its figures: (model, kind) -> (bytes per token, FLOP/byte)."""
    print("cache bytes per token in bf16, all layers (and FLOPs per byte of it when decoding)")
    print(f"{'':18}{'MHA':>20}{'GQA':>20}{'MQA':>20}{'MLA':>18}")
    figures = {}
    for model, (layers, n_heads, kv, head_dim) in SHAPES.items():
        row = f"{model:18}"
        for kind in ("MHA", "GQA", "MQA", "MLA"):
            if (kind in ("GQA", "MLA")) and (kind == "MLA") != isinstance(kv, tuple):
                row += f"{'-':>20}" if kind == "GQA" else f"{'-':>18}"
                continue
            size = 2 * layers * cache_numbers(kind, n_heads, kv, head_dim)
            figures[model, kind] = size, decode_intensity(kind, n_heads, kv, head_dim)
            cell = f"{size:,} ({figures[model, kind][1]:.1f})"
            row += f"{cell:>18}" if kind == "MLA" else f"{cell:>20}"
        print(row)
    return figures


def derive_absorption(say):
    """The steps of the derivation on a small example; say(what, left side, right side)."""
    torch.manual_seed(0)
    h, nope, v, c, d, t = 2, 3, 3, 4, 5, 6

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64)
    latent, q, p = random(t, c), random(h, nope), random(h, t).softmax(-1)
    w_uk, w_uv, w_o = random(h, nope, c), random(h, v, c), random(d, h * v)
    stacked = latent @ torch.cat(list(w_uk)).T
    say("one product = one block of columns per head",
        stacked, torch.cat([latent @ w.T for w in w_uk], -1))
    scores = torch.stack([k @ q_i for k, q_i in zip(stacked.split(nope, -1), q)])
    absorbed_q = torch.stack([w.T @ q_i for w, q_i in zip(w_uk, q)])  # (h, c)
    say("q (W_uk c) = (W_uk^T q) c: keys absorbed into the query", absorbed_q @ latent.T, scores)
    values = torch.stack([p_i @ (latent @ w.T) for p_i, w in zip(p, w_uv)])
    sums = p @ latent  # (h, c)
    say("sum p (W_uv c) = W_uv (sum p c): values after the sum",
        torch.stack([w @ s for w, s in zip(w_uv, sums)]), values)
    blocks = w_o.split(v, -1)
    say("W_o [o_1; o_2] = sum of block columns times heads",
        sum(block @ o for block, o in zip(blocks, values)), w_o @ values.flatten())
    say("W_o block times W_uv: values absorbed into the output",
        sum((block @ w) @ s for block, w, s in zip(blocks, w_uv, sums)), w_o @ values.flatten())


def rotation_stands_between():
    """Largest difference, relative, between rotated keys' scores and absorbing W_uk as if it could
    pass the rotation: not small, which is why k_pe is apart."""
    torch.manual_seed(0)
    latent, q = torch.randn(6, 4).double(), torch.randn(4).double()
    w_uk = torch.randn(4, 4).double()
    table = rope.rotary_table(torch.arange(6), rope.inverse_frequencies(4, 10000.0), 6,
                              dtype=torch.float64)
    keys = rope.apply_rotary((latent @ w_uk.T)[None, :, None], *table, True)[0, :, 0]
    absorbed = rope.apply_rotary(latent[None, :, None], *table, True)[0, :, 0] @ (w_uk.T @ q)
    return difference(absorbed, keys @ q)


def difference(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def three_ways(q_lora_rank):
    """Largest difference of cached and of absorbed outputs from expanded ones, for two prompts of
    different lengths, decoded token by token after a prefill and in chunks."""
    torch.manual_seed(1)
    attn = MLA(32, 4, q_lora_rank, 12, 8, 4, 6, 1e-6, 12 ** -0.5).double()
    for norm in (m for m in attn.modules() if isinstance(m, nn.RMSNorm)):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    x, prompts = torch.randn(2, 11, 32).double(), torch.tensor([5, 3])
    inv_freq = rope.inverse_frequencies(4, 10000.0)

    def run(inputs, positions, cache=None):
        table = rope.rotary_table(positions, inv_freq, 64, dtype=torch.float64)
        return attn(inputs, table, positions, cache=cache)
    expected, worst = run(x, torch.arange(11)), 0.0
    for attn.absorb in (False, True):
        for chunk in (1, 2):
            cache = attn.new_cache(2, 11, dtype=torch.float64)
            prefill = run(x[:, :5], torch.arange(5), cache)
            found = [difference(prefill[i, :n], expected[i, :n]) for i, n in enumerate(prompts)]
            for start in range(0, 6, chunk):
                at = prompts[:, None] + start + torch.arange(chunk)  # (b, chunk)
                rows = torch.arange(2)[:, None]
                found.append(difference(run(x[rows, at], at, cache), expected[rows, at]))
            worst = max(worst, *found)
    return worst


@torch.no_grad()
def demo():
    """Print the caches' sizes, derive absorption, compare the three ways; exit 1 on a mismatch."""
    figures = show_caches()
    published = {("DeepSeek-V3", "MLA"): 70272, ("DeepSeek-V2", "MLA"): 69120,
                 ("DeepSeek-V2-Lite", "MLA"): 31104, ("Llama-3-8B", "GQA"): 131072,
                 ("Llama-3-70B", "GQA"): 327680, ("Llama-3.1-405B", "GQA"): 516096}
    checks = {"cache sizes as published": all(figures[k][0] == n for k, n in published.items()),
              "intensity of MLA": round(figures["DeepSeek-V3", "MLA"][1], 1) == 241.8}

    def say(what, left, right):
        value = difference(left, right)
        checks[what] = value < 1e-12
        print(f"{value:8.1e}  {what}")
    print("largest difference between the two sides of each step:")
    derive_absorption(say)
    apart = rotation_stands_between()
    checks["rotation keeps W_uk from being absorbed"] = apart > 0.1
    print(f"{apart:8.1e}  rotated keys, absorbed all the same: wrong, hence the decoupled k_pe")
    for q_lora_rank in (0, 16):
        value = three_ways(q_lora_rank)
        checks[f"three ways agree, q_lora_rank {q_lora_rank}"] = value < 1e-10
        print(f"{value:8.1e}  expanded, cached and absorbed outputs, q_lora_rank={q_lora_rank}")
    failed = [what for what, right in checks.items() if not right]
    print(f"FAILED: {', '.join(failed)}" if failed or not checks else "PASS")
    return 1 if failed or not checks else 0


def bench():
    """Padded values beside values as they are; decoding absorbed beside expanded."""
    from collectives import paired_ratio
    for s, wide, narrow in ((256, 24, 16), (512, 96, 64), (1024, 96, 64), (1024, 192, 128)):
        q, k, v = (torch.randn(1, s, 8, w, requires_grad=True) for w in (wide, wide, narrow))
        pull = torch.randn(1, s, 8, narrow)

        def padded():
            attend(q, k, F.pad(v, (0, wide - narrow)), 0.1)[..., :narrow].backward(pull)

        def unpadded():
            attend(q, k, v, 0.1).backward(pull)
        chosen = "padded" if pad_values(v, wide) is not v else "unpadded"
        print(f"attention forward and backward, {s} keys, values padded from {narrow} to {wide} / "
              f"not: {paired_ratio(padded, unpadded)[0]} x, chosen: {chosen}")
    attn = MLA(1024, 16, 0, 512, 128, 64, 128, 1e-6, 192 ** -0.5)
    cache, position = attn.new_cache(1, 2048), torch.tensor([2047])
    table = rope.rotary_table(position, rope.inverse_frequencies(64, 1e4), 2048)

    def decode(absorb):
        attn.absorb = absorb
        with torch.no_grad():
            attn(torch.ones(1, 1, 1024), table, position, cache=cache)
    print(f"decoding a token on 2,048 cached ones (V2-Lite's heads), absorbed / expanded: "
          f"{paired_ratio(lambda: decode(True), lambda: decode(False))[0]} x")
    return 0


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    flags.add_argument("--bench", action="store_true", help="timings instead of checks")
    sys.exit(bench() if flags.parse_args().bench else demo())
