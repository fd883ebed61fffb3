from dataclasses import dataclass
import torch
import torch.nn.functional as F
from torch import nn
import rope


def attend(q, k, v, scale, causal=True, mask=None):
    dk, dv = q.shape[-1], v.shape[-1]
    if dv < dk:
        v = F.pad(v, (0, dk - dv))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
        is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)[..., :dv]


def document_mask(ids):
    s = ids.shape[1]
    return ((ids[:, :, None] == ids[:, None]) & torch.ones(s, s, dtype=torch.bool, device=ids.device).tril())[:, None]


@dataclass
class LatentCache:
    latent: torch.Tensor
    k_pe: torch.Tensor


class MLA(nn.Module):
    def __init__(self, dim, n_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, norm_eps, scale, rope_interleaved):
        super().__init__()
        self.nope, self.rope, self.v, self.c = qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank
        self.scale, self.rope_interleaved, self.q_lora_rank = scale, rope_interleaved, q_lora_rank
        q = n_heads * (self.nope + self.rope)
        if q_lora_rank:
            self.wq_a = nn.Linear(dim, q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(q_lora_rank, norm_eps)
            self.wq_b = nn.Linear(q_lora_rank, q, bias=False)
        else:
            self.wq = nn.Linear(dim, q, bias=False)
        self.wkv_a = nn.Linear(dim, self.c + self.rope, bias=False)
        self.kv_norm = nn.RMSNorm(self.c, norm_eps)
        self.wkv_b = nn.Linear(self.c, n_heads * (self.nope + self.v), bias=False)
        self.wo = nn.Linear(n_heads * self.v, dim, bias=False)

    def new_cache(self, batch, max_len, device=None, dtype=None):
        return LatentCache(torch.zeros(batch, max_len, self.c, device=device, dtype=dtype), torch.zeros(batch, max_len, self.rope, device=device, dtype=dtype))

    def expand(self, latent):
        return self.wkv_b(latent).unflatten(-1, (-1, self.nope + self.v)).split([self.nope, self.v], -1)

    def core(self, q_nope, q_pe, latent, k_pe, mask):
        k_nope, v = self.expand(latent)
        k = torch.cat([k_nope, k_pe[:, :, None].expand(-1, -1, k_nope.shape[2], -1)], -1)
        return attend(torch.cat([q_nope, q_pe], -1), k, v, self.scale, mask is None, mask)

    def forward(self, x, table, positions=None, mask=None, cache=None):
        q = self.wq_b(self.q_norm(self.wq_a(x))) if self.q_lora_rank else self.wq(x)
        q_nope, q_pe = q.unflatten(-1, (-1, self.nope + self.rope)).split([self.nope, self.rope], -1)
        latent, k_pe = self.wkv_a(x).split([self.c, self.rope], -1)
        latent = self.kv_norm(latent)
        q_pe = rope.apply_rotary(q_pe, *table, self.rope_interleaved)
        k_pe = rope.apply_rotary(k_pe[:, :, None], *table, self.rope_interleaved)[:, :, 0]
        if cache is not None:
            slots = positions.expand(x.shape[:2])
            rows = torch.arange(len(x))[:, None]
            cache.latent[rows, slots], cache.k_pe[rows, slots] = latent, k_pe
            latent, k_pe = cache.latent, cache.k_pe
            mask = (torch.arange(latent.shape[1]) <= slots[..., None])[:, None]
        return self.wo(self.core(q_nope, q_pe, latent, k_pe, mask).flatten(2))
