#!/usr/bin/env python3
"""Runs clang-tidy on the sources of src/, hosts/ and tools/, each as its own target compiles it.

usage: tidy.py BUILD-DIRECTORY

A clean result is remembered in the cache directory under a digest of everything it depends on: the checks, the compile command,
the file and the headers it includes. So only what changed is looked at again.
"""
import concurrent.futures
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common import CACHE, ROOT, Failure, main, say

FOLDERS = [ROOT / "src", ROOT / "hosts", ROOT / "tools"]


@functools.cache
def content_digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def dependencies(build):
    """Object file -> source and headers, as ninja recorded them."""
    listing = subprocess.run(["ninja", "-C", str(build), "-t", "deps"], capture_output=True, text=True, check=True).stdout
    result, files = {}, None
    for line in listing.splitlines():
        if line.startswith("    "):
            files.append(os.path.normpath(os.path.join(build, line.strip())))
        elif match := re.match(r"(\S+): #deps \d+", line):
            files = result.setdefault(match[1], [])
    return result


def output_of(unit):
    return re.search(r" -o (\S+)", unit["command"])[1]


def check(source, command, files, version, database):
    parts = [version, content_digest(ROOT / ".clang-tidy"), command.replace(str(ROOT), "")]
    # Named from the checkout where they lie in it: another checkout of the same files is known.
    parts += sorted(f"{file.removeprefix(f'{ROOT}/')} {content_digest(file)}" for file in files)
    remembered = CACHE / "tidy" / hashlib.sha256("\n".join(parts).encode()).hexdigest()
    if remembered.exists():
        return None
    result = subprocess.run(["clang-tidy", "--quiet", "-p", database, source], capture_output=True, text=True)
    if result.returncode != 0:
        return result.stdout + result.stderr
    remembered.parent.mkdir(parents=True, exist_ok=True)
    remembered.touch()
    return None


def run_main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    build = Path(sys.argv[1]).resolve()
    recorded = dependencies(build)
    version = subprocess.run(["clang-tidy", "--version"], capture_output=True, text=True, check=True).stdout
    # Tests compile some of these files again. clang-tidy would look at a file once for each command that it knows.
    units = [unit for unit in json.loads((build / "compile_commands.json").read_text())
             if any(Path(unit["file"]).is_relative_to(folder) for folder in FOLDERS) and not unit["file"].endswith(".cu")
             and not output_of(unit).startswith("tests/")]
    if not units:
        raise Failure(f"{build} compiles nothing of src/, hosts/ and tools/; build it first")
    with tempfile.TemporaryDirectory() as database, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        (Path(database) / "compile_commands.json").write_text(json.dumps(units))
        futures = {}
        for unit in units:
            # A unit that was not built yet has no recorded headers, so nothing can be remembered about it.
            files = recorded.get(output_of(unit))
            if files is None:
                raise Failure(f"{unit['file']} was not built in {build}; build it first")
            futures[pool.submit(check, unit["file"], unit["command"], files, version, database)] = unit["file"]
        findings = 0
        for number, future in enumerate(concurrent.futures.as_completed(futures), 1):
            if message := future.result():
                findings += 1
                print(message)
            if number % 20 == 0:
                say(f"clang-tidy {number}/{len(futures)}")
    print(f"{len(futures)} files, {findings} with findings")
    return 1 if findings else 0


if __name__ == "__main__":
    main(run_main)
