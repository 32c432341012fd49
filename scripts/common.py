"""What every script here shares: where things are kept, progress lines, digests, child processes."""
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("OSCAR_CACHE_DIR") or Path.home() / ".cache" / "oscar").expanduser().resolve()
PINS = json.loads((ROOT / "scripts" / "pins.json").read_text())
MODELS = tuple(PINS["models"])
_start = time.monotonic()


class Failure(Exception):
    """One sentence for the user: what is wrong and what to do."""


def say(text):
    """A progress line on stderr with the time since the start."""
    seconds = int(time.monotonic() - _start)
    print(f"[{seconds // 60:3d}:{seconds % 60:02d}] {text}", file=sys.stderr, flush=True)


def main(function):
    """Runs a script's main function; a Failure becomes one sentence and exit status 1."""
    try:
        sys.exit(function())
    except Failure as failure:
        print(f"oscar: {failure}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def run(command, log=None, **options):
    """Runs a command; its output goes to `log` (kept) or to ours. Fails with the end of the log in the message."""
    command = [str(word) for word in command]
    if log is None:
        if subprocess.run(command, **options).returncode != 0:
            raise Failure(f"`{' '.join(command)}` failed, see above")
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **options).returncode
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        print(tail, file=sys.stderr)
        raise Failure(f"`{' '.join(command)}` failed with status {code}; the whole output is in {log}")


def write_atomically(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + f".partial{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)
