#!/usr/bin/env python3
"""What our kernels are compared with: PyTorch's BF16 attention (flash and cuDNN backends of SDPA) and, for decode, INT2 attention
in Triton (int2_triton.py), timed as decode_bench times ours: CUDA-graph replays over rotating caches that together exceed
600 MB, median of 15 replays. Decode, and prefill: a chunk on itself (causal), or on a prefix of 32K (the prefix only). Needs
torch with CUDA and Triton. `decode_bench --anchors JSON-FILE` prints the ratios.

usage: anchors.py [--prefill | --int2] [JSON-FILE]      --int2: INT2 only
"""
import json
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

TOUCHED = 600_000_000
SIZES = [(1, 32768), (1, 131072), (8, 32768), (8, 131072), (32, 32768), (256, 1024)]
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def time_graph(launches, launch, replays=15):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(launches):
            launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for i in range(replays + 3):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / launches)
    return statistics.median(times[3:])


def measure(batch, length, backend, queries=1, causal=False, q_heads=32, kv_heads=8, dim=128):
    size = 2 * 2 * batch * kv_heads * length * dim
    caches = max(2, -(-TOUCHED // size))
    make = lambda heads, n: torch.randn(batch, heads, n, dim, device="cuda", dtype=torch.bfloat16)
    keys, values = [make(kv_heads, length) for _ in range(caches)], [make(kv_heads, length) for _ in range(caches)]
    q = make(q_heads, queries)

    def launch(i):
        torch.nn.functional.scaled_dot_product_attention(q, keys[i % caches], values[i % caches], enable_gqa=True, is_causal=causal)

    with sdpa_kernel(backend):
        return time_graph(2 if queries > 1 else caches if size > 400_000_000 else 4 * caches, launch), size


def sdpa_rows(sizes):
    rows = []
    for batch, length, queries in sizes:
        shape = f"{batch:3} x {length // 1024:3}K" + (f", {queries} queries" if queries > 1 else "")
        for name, backend in BACKENDS.items():
            try:
                us, size = measure(batch, length, backend, queries, queries == length)
                rows.append({"batch": batch, "context": length, "queries": queries, "backend": name, "us": us, "bytes": size})
                print(f"SDPA {name:6} {shape}  {us:9.1f} us  {size / us * 1e-6:5.2f} TB/s", flush=True)
            except RuntimeError as error:
                print(f"SDPA {name:6} {shape}  not available: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.empty_cache()
    return rows


def int2_rows():
    import int2_triton

    error = int2_triton.check()
    print(f"INT2 Triton: relative L2 error against float64 {error:.1e}", flush=True)
    # All shapes at two sizes, the best of them at all sizes.
    shapes = set()
    for batch, length in [(1, 32768), (8, 32768)]:
        shapes.update(int2_triton.measure(batch, length, time_graph, TOUCHED, int2_triton.SHAPES, [4, 8])[1][:3])
    rows = []
    for batch, length in SIZES:
        row = int2_triton.measure(batch, length, time_graph, TOUCHED, sorted(shapes))[0]
        rows.append({"batch": batch, "context": length, **row})
        print(f"INT2 Triton {batch:3} x {length // 1024:3}K  {row['us']:9.1f} us  {row['bytes'] / row['us'] * 1e-6:5.2f} TB/s  "
              f"{row['splits']} splits, {row['tokens_per_block']} tokens, {row['warps']} warps, {row['stages']} stages", flush=True)
        torch.cuda.empty_cache()
    return {"error": error, "rows": rows}


def main():
    flags = {"--prefill", "--int2"} & set(sys.argv[1:])
    files = [x for x in sys.argv[1:] if x not in flags]
    report = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    if "--int2" not in flags:
        prefill = "--prefill" in flags
        report["sdpa"] = sdpa_rows([(1, 8192, 8192), (1, 32768, 2048)] if prefill else [(*size, 1) for size in SIZES])
    if "--prefill" not in flags:
        report["int2_triton"] = int2_rows()
    if files:
        with open(files[0], "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
