#!/usr/bin/env python3
"""Builds an unmodified llama.cpp in the cache directory.

usage: llama.py GGML-VERSION TARGET...

Prints the build directory, which is what -DOSCAR_LLAMA_DIR= takes. An interrupted build is resumed; a finished one costs nothing.
0.25.3 is built with loadable ggml backends (as distributions do), 0.26.0 with linked ones (llama.cpp's own default): the plug-in
has to work in both.
"""
import fcntl
import json
import re
import subprocess
import sys
import time

from common import CACHE, PINS, Failure, main, run, say
import fetch

FLAGS = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF", "-DLLAMA_BUILD_UI=OFF",
         "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_CURL=OFF"]
EXTRA = {"0.25.3": ["-DGGML_BACKEND_DL=ON"], "0.26.0": []}


def ninja(build, targets):
    """Runs ninja; says every 15 seconds how far it is and when it will be done."""
    log = open(build / "oscar-build.log", "ab")
    process = subprocess.Popen(["ninja", "-C", str(build), *targets], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    start = last = time.monotonic()
    tail = []
    for line in process.stdout:
        log.write(line.encode())
        tail = (tail + [line])[-30:]
        step = re.match(r"\[(\d+)/(\d+)\]", line)
        now = time.monotonic()
        if step and now - last > 15:
            done, total = int(step[1]), int(step[2])
            left = (now - start) / done * (total - done)
            say(f"  llama.cpp {done}/{total} steps, about {max(1, round(left / 60))} min left")
            last = now
    if process.wait() != 0:
        print("".join(tail), file=sys.stderr)
        raise Failure(f"building llama.cpp failed; the whole output is in {log.name}")


def build_llama(version, targets):
    if version not in PINS["llama"]:
        raise Failure(f"there is no llama.cpp with ggml '{version}'; known are {', '.join(PINS['llama'])}")
    build = CACHE / "build" / f"llama-ggml-{version}"
    stamp = build / "oscar-built.json"
    build.mkdir(parents=True, exist_ok=True)
    with open(build.with_suffix(build.suffix + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two checkouts share this directory
        wanted = {"package": PINS["llama"][version]["packages"][0], "flags": FLAGS + EXTRA[version]}
        built = json.loads(stamp.read_text()) if stamp.exists() else {}
        same = all(built.get(key) == value for key, value in wanted.items())
        missing = [target for target in targets if not same or target not in built["targets"]]
        if missing:
            tree = fetch.source(version)
            say(f"building llama.cpp (ggml {version}): {' '.join(missing)}")
            run(["cmake", "-G", "Ninja", "-S", tree, "-B", build, *wanted["flags"]], log=build / "oscar-configure.log")
            ninja(build, missing)
            wanted["targets"] = sorted({*missing, *(built["targets"] if same else [])})
            stamp.write_text(json.dumps(wanted, indent=1))
    return build


def run_main():
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    print(build_llama(sys.argv[1], sys.argv[2:]))
    return 0


if __name__ == "__main__":
    main(run_main)
