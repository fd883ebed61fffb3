"""Rotary position embedding: turn pairs of numbers by an angle that grows with the position.

Pair i of a query at position p is turned by p theta_i, that of a key at position q by q theta_i:

    | cos a  -sin a | | x0 |        theta_i = base^(-2 i / dim),  a = position x theta_i
    | sin a   cos a | | x1 |

A product of rotations by -a and b is a rotation by b - a, so a query's score with a key depends on
q - p alone. Which numbers form a pair is a convention: DeepSeek takes neighbours (2i, 2i+1), Llama
in the transformers library takes halves (i, i + dim/2). Permuting the rows of the weights that make
queries and keys turns one into the other, and no score changes as long as both use the same.

YaRN makes a model trained on original_seq_len positions fit for factor times as many: pairs that
turn often within the original length keep their speed, pairs that turn less than once are slowed by
the factor (so that they see no angle they were not trained on), with a ramp between.

Papers: RoFormer (arXiv 2104.09864, section 3.2), YaRN (2309.00071, sections 3.2 to 3.4),
DeepSeek-V2 (2405.04434, section 3.1.4).
Course: 00:51:57 RoPE from first principles, 01:11:25 implementing RoPE and YaRN.

    python rope.py     the frequencies before and after YaRN, and checks; prints PASS
"""
import math
import sys

import torch


def inverse_frequencies(dim, theta, factor=1.0, original_seq_len=4096, beta_fast=32.0,
                        beta_slow=1.0):
    """theta_i, radians per position, of the dim/2 pairs: (dim/2,) float64 on the CPU.

    With factor > 1 YaRN's: kept for pairs that turn at least beta_fast times in original_seq_len
    positions, divided by factor for those that turn at most beta_slow times, a linear mix between.
    (DeepSeek's ramp is linear in the pair's number, the paper's in its turns.)
    """
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if factor <= 1:
        return frequencies
    low, high = yarn_range(dim, theta, original_seq_len, beta_fast, beta_slow)
    pair = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
    slowed = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / factor * slowed + frequencies * (1 - slowed)


def yarn_range(dim, theta, original_seq_len, beta_fast=32.0, beta_slow=1.0):
    """(last pair that is kept, first pair that is slowed fully): where the turns of a pair in
    original_seq_len positions, L theta^(-2 i / dim) / 2 pi, are beta_fast and beta_slow."""
    def pair_that_turns(times):
        return dim * math.log(original_seq_len / (2 * math.pi * times)) / (2 * math.log(theta))
    low, high = math.floor(pair_that_turns(beta_fast)), math.ceil(pair_that_turns(beta_slow))
    return max(low, 0), min(high, dim - 1)


def yarn_mscale(factor, mscale):
    """0.1 mscale ln(factor) + 1: how much larger attention's logits should be made, since a longer
    context spreads the softmax (YaRN, equation 22). 1 without extension."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_amplitude(factor, mscale, mscale_all_dim):
    """Factor on cos and sin, so that it acts on the rotary part of q and k alone; 1 for DeepSeek,
    whose two mscales are equal."""
    return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)


def softmax_scale(head_dim, factor=1.0, mscale_all_dim=0.0):
    """Factor on q k before the softmax: head_dim^-1/2, times YaRN's mscale squared (once for q and
    once for k, on all numbers of a head)."""
    return head_dim ** -0.5 * yarn_mscale(factor, mscale_all_dim) ** 2


def rotary_table(positions, inv_freq, max_seq_len, amplitude=1.0, dtype=torch.float32):
    """cos and sin of every angle: each positions.shape + (dim/2,).

    Angles are formed in float64: at position 16,000 float32 is off by 1e-3 rad, and bfloat16 can't
    even tell neighbours apart. `dtype` is float32, or float64 when training in it.
    Raises ValueError for positions beyond max_seq_len, and for a narrower dtype.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"a rotary table in {dtype} is too coarse; use float32 or float64")
    if positions.numel():
        least, most = positions.min().item(), positions.max().item()
        if least < 0 or most >= max_seq_len:
            raise ValueError(f"position {least if least < 0 else most} lies outside 0.."
                             f"{max_seq_len - 1}; raise max_seq_len={max_seq_len}, or use a "
                             "shorter sequence")
    angles = positions.double()[..., None] * inv_freq  # (..., dim/2)
    return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)


def apply_rotary(x, cos, sin, interleaved):
    """Turn the pairs of x (b, s, h, dim) by the table's angles, (s, dim/2) or (b, s, dim/2).

    interleaved: pairs (2i, 2i+1), else (i, i + dim/2). Computed in the table's type; x's is kept.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (..., s, 1, dim/2): the same for every head
    if interleaved:
        # A pair is a complex number, and turning it is a product with cos a + i sin a.
        pairs = torch.view_as_complex(x.to(cos.dtype).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2).to(x.dtype)
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)


def to_half_split(dim):
    """Indices (dim,): x[..., to_half_split(dim)] holds interleaved pairs as split halves."""
    return torch.arange(dim).view(-1, 2).T.flatten()


def to_interleaved(dim):
    """Indices (dim,): x[..., to_interleaved(dim)] holds split halves as interleaved pairs."""
    return torch.arange(dim).view(2, -1).T.flatten()


def scores(q, k, start, inv_freq, interleaved):
    """q k of one head, (s, s), for positions that begin at `start`."""
    table = rotary_table(torch.arange(start, start + len(q)), inv_freq, 10 ** 6,
                         dtype=torch.float64)
    q, k = (apply_rotary(t[None, :, None], *table, interleaved)[0, :, 0] for t in (q, k))
    return q @ k.T


def demo():
    """Show what YaRN does to each pair's speed; check the identities above in float64."""
    dim, length, factor = 64, 4096, 40
    plain = inverse_frequencies(dim, 10000.0)
    slowed = inverse_frequencies(dim, 10000.0, factor, length)
    low, high = yarn_range(dim, 10000.0, length)
    print(f"DeepSeek's rotary part: {dim // 2} pairs, trained on {length}, made for "
          f"{factor * length} positions")
    print(f"{'pair':>5}{'radians/position':>18}{f'turns in {length}':>16}{'YaRN divides by':>17}")
    for i in (0, low, low + 1, 16, high - 1, high, 31):
        turns = length * plain[i] / (2 * math.pi)
        print(f"{i:5}{plain[i]:18.3e}{turns:16.2f}{plain[i] / slowed[i]:17.2f}")
    checks = {
        "pairs up to 10 are kept": low == 10 and torch.equal(slowed[:11], plain[:11]),
        "pairs from 23 are divided by 40": high == 23 and torch.allclose(
            slowed[high:], plain[high:] / factor, rtol=1e-15),
        "DeepSeek-V3's softmax scale": math.isclose(softmax_scale(192, 40, 1.0), 0.1352338,
                                                    rel_tol=1e-6),
    }
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, dim, dtype=torch.float64)
    here, there = (scores(q, k, start, slowed, True) for start in (0, 1000))
    checks["scores depend on distances alone"] = torch.allclose(here, there, atol=1e-10)
    order = to_half_split(dim)
    checks["both conventions give the same scores"] = torch.allclose(
        here, scores(q[:, order], k[:, order], 0, slowed, False), atol=1e-12)
    angle = 3 * plain[0]  # position 3, pair 0, by the rotation matrix itself
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]),
                        torch.stack([angle.sin(), angle.cos()])])
    table = rotary_table(torch.tensor([3]), plain, 4, dtype=torch.float64)
    turned = apply_rotary(q[None, :1, None], *table, True)
    checks["a pair turns as the matrix says"] = torch.allclose(turned[0, 0, 0, :2], turn @ q[0, :2])
    failed = [what for what, right in checks.items() if not right]
    print(f"{len(checks)} checks: {', '.join(checks)}")
    print(f"FAILED: {', '.join(failed)}" if failed or not checks else "PASS")
    return 1 if failed or not checks else 0


if __name__ == "__main__":
    sys.exit(demo())
