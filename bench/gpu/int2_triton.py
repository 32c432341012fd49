"""Decode attention on paged INT2 rows in Triton, in the form of the published OSCAR kernel, as an anchor for ours.

Per token, KV head and side: D codes of 2 bits, byte i with dimensions i, i + D/4, i + D/2, i + 3D/4, and scale and zero in
binary32; x^ = (code - zero) * scale. Rows [token, head] in pages that a table finds. One program per sequence, KV head and
split unpacks a block of tokens, dequantises it to BF16 and multiplies by tl.dot; a second kernel merges the splits. The query is
rotated before, and there are no exact rows: neither is part of the time.
"""
import itertools

import torch
import triton
import triton.language as tl

PAGE = 8  # tokens
HEADS = 16  # query heads of a program, padded: tl.dot needs so many rows
LOG2E = 1.4426950408889634


@triton.jit
def dequantised(codes, shift: tl.constexpr, scale, zero):
    return (((codes >> shift) & 3).to(tl.float32) - zero) * scale


@triton.jit(do_not_specialize=["n_splits"])
def split_kernel(q, k_codes, k_affine, v_codes, v_affine, table, lengths, partial, lse, columns, scale, n_splits,
                 KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
                 HEADS: tl.constexpr):
    sequence = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    Q: tl.constexpr = D // 4
    length = tl.load(lengths + sequence)
    share = tl.cdiv(tl.cdiv(length, n_splits), N) * N
    begin = split * share
    end = tl.minimum(begin + share, length)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, Q)
    row = (sequence * KV_HEADS + kv) * GROUP + head
    q_at = q + row[:, None] * D + d[None, :]
    real = head[:, None] < GROUP
    q0 = tl.load(q_at, mask=real, other=0.0)
    q1 = tl.load(q_at + Q, mask=real, other=0.0)
    q2 = tl.load(q_at + 2 * Q, mask=real, other=0.0)
    q3 = tl.load(q_at + 3 * Q, mask=real, other=0.0)
    most = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    o0 = tl.zeros([HEADS, Q], tl.float32)
    o1 = tl.zeros([HEADS, Q], tl.float32)
    o2 = tl.zeros([HEADS, Q], tl.float32)
    o3 = tl.zeros([HEADS, Q], tl.float32)
    for start in range(begin, end, N):
        t = start + tl.arange(0, N)
        inside = t < end
        page = tl.load(table + sequence * columns + t // PAGE, mask=inside, other=0)
        place = (page * PAGE + t % PAGE) * KV_HEADS + kv  # of less than 2^31 codes, see Cache
        k = tl.load(k_codes + place[None, :] * Q + d[:, None], mask=inside[None, :], other=0)
        ks = tl.load(k_affine + 2 * place, mask=inside, other=0.0)[None, :]
        kz = tl.load(k_affine + 2 * place + 1, mask=inside, other=0.0)[None, :]
        s = tl.dot(q0, dequantised(k, 0, ks, kz).to(tl.bfloat16))
        s = tl.dot(q1, dequantised(k, 2, ks, kz).to(tl.bfloat16), s)
        s = tl.dot(q2, dequantised(k, 4, ks, kz).to(tl.bfloat16), s)
        s = tl.dot(q3, dequantised(k, 6, ks, kz).to(tl.bfloat16), s)
        s = tl.where(inside[None, :], s * scale, -float("inf"))
        higher = tl.maximum(most, tl.max(s, 1))
        factor = tl.exp2(most - higher)
        p = tl.exp2(s - higher[:, None])
        most = higher
        total = total * factor + tl.sum(p, 1)
        p = p.to(tl.bfloat16)
        v = tl.load(v_codes + place[:, None] * Q + d[None, :], mask=inside[:, None], other=0)
        vs = tl.load(v_affine + 2 * place, mask=inside, other=0.0)[:, None]
        vz = tl.load(v_affine + 2 * place + 1, mask=inside, other=0.0)[:, None]
        o0 = tl.dot(p, dequantised(v, 0, vs, vz).to(tl.bfloat16), o0 * factor[:, None])
        o1 = tl.dot(p, dequantised(v, 2, vs, vz).to(tl.bfloat16), o1 * factor[:, None])
        o2 = tl.dot(p, dequantised(v, 4, vs, vz).to(tl.bfloat16), o2 * factor[:, None])
        o3 = tl.dot(p, dequantised(v, 6, vs, vz).to(tl.bfloat16), o3 * factor[:, None])
    if begin < end:
        inverse = (1.0 / total)[:, None]
        to = row * n_splits + split
        at = partial + to[:, None] * D + d[None, :]
        tl.store(at, o0 * inverse, mask=real)
        tl.store(at + Q, o1 * inverse, mask=real)
        tl.store(at + 2 * Q, o2 * inverse, mask=real)
        tl.store(at + 3 * Q, o3 * inverse, mask=real)
        tl.store(lse + to, most + tl.log2(total), mask=head < GROUP)


@triton.jit(do_not_specialize=["n_splits"])
def merge_kernel(partial, lse, lengths, out, n_splits, ROWS: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0)
    length = tl.load(lengths + row // ROWS)
    share = tl.cdiv(tl.cdiv(length, n_splits), N) * N
    used = tl.cdiv(length, tl.maximum(share, 1))
    d = tl.arange(0, D)
    most = -float("inf")
    total = 0.0
    o = tl.zeros([D], tl.float32)
    for split in range(used):
        at = row * n_splits + split
        x = tl.load(lse + at)
        higher = tl.maximum(most, x)
        factor = tl.exp2(most - higher)
        weight = tl.exp2(x - higher)
        o = o * factor + weight * tl.load(partial + at * D + d)
        total = total * factor + weight
        most = higher
    tl.store(out + row * D + d, o / total)


class Cache:
    """Random rows of `batch` sequences of up to `length` tokens, in pages of random order."""

    def __init__(self, batch, length, kv_heads, dim):
        self.columns = -(-length // PAGE)
        pages = batch * self.columns
        shape = (pages * PAGE, kv_heads)
        assert pages * PAGE * kv_heads * dim // 4 < 2**31, "the kernel's indices have 32 bits"
        codes = lambda: torch.randint(0, 256, (*shape, dim // 4), device="cuda", dtype=torch.uint8)
        affine = lambda: torch.rand(*shape, 2, device="cuda") * 0.5 + torch.tensor([0.5, 1.25], device="cuda")
        self.k_codes, self.v_codes, self.k_affine, self.v_affine = codes(), codes(), affine(), affine()
        self.table = torch.randperm(pages, device="cuda").to(torch.int32).reshape(batch, self.columns)


def decode(q, cache, lengths, out, partial, lse, n_splits, block, warps, stages):
    batch, n_head, dim = q.shape
    kv_heads = cache.k_codes.shape[1]
    split_kernel[(batch, kv_heads, n_splits)](
        q, cache.k_codes, cache.k_affine, cache.v_codes, cache.v_affine, cache.table, lengths, partial, lse, cache.columns,
        LOG2E / dim**0.5, n_splits, kv_heads, n_head // kv_heads, dim, block, PAGE, HEADS, num_warps=warps, num_stages=stages)
    merge_kernel[(batch * n_head,)](partial, lse, lengths, out, n_splits, n_head, dim, block, num_warps=1)


def reference(q, cache, lengths):
    """The same in float64, row by row as the format says."""
    batch, n_head, dim = q.shape
    kv_heads = cache.k_codes.shape[1]
    out = torch.empty(batch, n_head, dim, dtype=torch.float64, device="cuda")
    for b, n in enumerate(lengths.tolist()):
        t = torch.arange(n, device="cuda")
        place = cache.table[b, t // PAGE].long() * PAGE + t % PAGE

        def rows(codes, affine):
            code = torch.cat([(codes[place] >> s) & 3 for s in (0, 2, 4, 6)], 2).double()
            return (code - affine[place, :, 1:].double()) * affine[place, :, :1].double()

        k, v = rows(cache.k_codes, cache.k_affine), rows(cache.v_codes, cache.v_affine)
        heads = q[b].double().reshape(kv_heads, -1, dim)
        p = torch.softmax(torch.einsum("hgd,thd->hgt", heads, k) / dim**0.5, 2)
        out[b] = torch.einsum("hgt,thd->hgd", p, v).reshape(n_head, dim)
    return out


class Decode:
    """Buffers of a decode of `batch` sequences, and its launch on a cache."""

    def __init__(self, lengths, n_head, dim, most_splits):
        self.lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        rows = len(lengths) * n_head
        self.q = torch.randn(len(lengths), n_head, dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.full_like(self.q, float("nan"))
        self.partial = torch.empty(rows * most_splits, dim, device="cuda")
        self.lse = torch.empty(rows * most_splits, device="cuda")

    def __call__(self, cache, *config):
        decode(self.q, cache, self.lengths, self.out, self.partial, self.lse, *config)


def check(n_head=32, kv_heads=8, dim=128):
    """Largest relative L2 error of ragged batches against the reference; raises where it is that of another function."""
    lengths = [1, 7, 63, 64, 65, 700, 1000, 4097]
    cache = Cache(len(lengths), max(lengths), kv_heads, dim)
    run = Decode(lengths, n_head, dim, 40)
    want = reference(run.q, cache, run.lengths)
    worst = 0.0
    for config in [(1, 64, 4, 2), (7, 32, 4, 2), (40, 128, 8, 2)]:
        run.out.fill_(float("nan"))
        run(cache, *config)
        error = ((run.out.double() - want).norm() / want.norm()).item()
        if not 1e-6 < error < 1e-2:  # BF16 operands and output
            raise RuntimeError(f"INT2 Triton decode: relative L2 error {error:.2e} with {config}")
        worst = max(worst, error)
    return worst


# Tokens per block, warps, stages. More warps, or more tokens per warp, were slower by a quarter and more.
SHAPES = [(*shape, stages) for shape in [(32, 1), (32, 2), (64, 2), (64, 4), (128, 4)] for stages in (2, 3)]
FILLS = (1, 2, 4, 8, 16)  # programs per multiprocessor


def splits_to_try(batch, kv_heads, length, fills):
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    tried = {max(1, round(multiprocessors * fill / (batch * kv_heads))) for fill in fills}
    return sorted(s for s in tried if s * 32 <= max(length, 32))


def measure(batch, length, time_graph, touched, shapes, fills=FILLS, n_head=32, kv_heads=8, dim=128):
    """The best of the shapes and splits: dict of us, bytes, configuration; and all shapes, the fastest first."""
    size = batch * kv_heads * length * (2 * dim // 4 + 16)
    caches = [Cache(batch, length, kv_heads, dim) for _ in range(max(2, -(-touched // size)))]
    splits = splits_to_try(batch, kv_heads, length, fills)
    run = Decode([length] * batch, n_head, dim, max(splits))
    launches = len(caches) if size > 100_000_000 else 4 * len(caches)
    time_of = lambda config, replays: time_graph(launches, lambda i: run(caches[i % len(caches)], *config), replays)
    tried = {(n, *shape): time_of((n, *shape), 3) for n, shape in itertools.product(splits, shapes)}
    best = min(tried, key=tried.get)
    ranking = sorted(shapes, key=lambda shape: min(us for config, us in tried.items() if config[1:] == shape))
    names = ("splits", "tokens_per_block", "warps", "stages")
    return {"us": time_of(best, 15), "bytes": size, **dict(zip(names, best))}, ranking
