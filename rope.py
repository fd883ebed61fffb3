import math
import torch


def inverse_frequencies(dim, theta, factor=1.0, original_seq_len=4096, beta_fast=32.0, beta_slow=1.0):
    i = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    freq = theta ** (-i / dim)
    if factor <= 1:
        return freq
    def at(n):
        return dim * math.log(original_seq_len / (2 * math.pi * n)) / (2 * math.log(theta))
    low, high = max(math.floor(at(beta_fast)), 0), min(math.ceil(at(beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freq / factor * ramp + freq * (1 - ramp)


def yarn_mscale(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def yarn_amplitude(factor, mscale, mscale_all_dim):
    return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)


def softmax_scale(head_dim, factor=1.0, mscale_all_dim=0.0):
    return head_dim ** -0.5 * yarn_mscale(factor, mscale_all_dim) ** 2


def rotary_table(positions, inv_freq, max_seq_len, amplitude=1.0, dtype=torch.float32):
    if positions.numel() and int(positions.max()) >= max_seq_len:
        raise ValueError(f"position {int(positions.max())} >= max_seq_len={max_seq_len}")
    a = positions.double()[..., None] * inv_freq
    return (a.cos() * amplitude).to(dtype), (a.sin() * amplitude).to(dtype)


def apply_rotary(x, cos, sin, interleaved):
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
