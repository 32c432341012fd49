"""Runs stock llama.cpp programs, alone or through `oscar exec`, for the tests here and for scripts/memory.py.

Environment: OSCAR_TEST_OSCAR (the command), OSCAR_TEST_LLAMA_BIN (folder of the stock programs), OSCAR_TEST_MODEL,
OSCAR_TEST_ARTIFACT, OSCAR_TEST_TEXT (English prose).
"""
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

OSCAR = os.environ.get("OSCAR_TEST_OSCAR", "")
LLAMA_BIN = Path(os.environ.get("OSCAR_TEST_LLAMA_BIN", ""))
MODEL = os.environ.get("OSCAR_TEST_MODEL", "")
ARTIFACT = os.environ.get("OSCAR_TEST_ARTIFACT", "")
TEXT = os.environ.get("OSCAR_TEST_TEXT", "")
THREADS = str(len(os.sched_getaffinity(0)))


def prose(offset, characters):
    """A piece of the evaluation text that starts at a word; about 4.3 characters are one token."""
    text = Path(TEXT).read_text()
    start = text.index(" ", offset) + 1
    return text[start : start + characters].rsplit(" ", 1)[0]


def looks_like_text(answer):
    """English words, not the noise that a broken cache produces: mostly letters, and not the same two words over and over
    (whole sentences do repeat in greedy answers of small models)."""
    words = re.findall(r"[A-Za-z']+", answer)
    letters = sum(char.isascii() and (char.isalnum() or char in " .,;:'\"!?()-\n*_`#=<>/[]") for char in answer)
    return len(answer) > 10 and letters >= 0.9 * len(answer) and len(set(words)) >= 4


def command(program, arguments, mode):
    """mode: "stock", or a mode of the plug-in; then the program runs through `oscar exec`."""
    line = [str(LLAMA_BIN / program), *map(str, arguments)]
    return line if mode == "stock" else [OSCAR, "exec", "--", *line]


def environment(mode, stats):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OSCAR_", "LLAMA_", "GGML_"))}
    if "OSCAR_CACHE_DIR" in os.environ:
        env["OSCAR_CACHE_DIR"] = os.environ["OSCAR_CACHE_DIR"]
    if mode != "stock":
        env.update(OSCAR_MODE=mode, OSCAR_STRICT="1", OSCAR_STATS=str(stats))
        if mode == "oscar":
            env["OSCAR_ARTIFACT"] = ARTIFACT
    return env


class Run:
    """A program that ran to its end."""

    def __init__(self, program, arguments, mode="oscar", timeout=240):
        with tempfile.TemporaryDirectory() as folder:
            stats = Path(folder) / "stats.json"
            done = subprocess.run(command(program, arguments, mode), env=environment(mode, stats), stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, errors="replace", timeout=timeout)
            self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
            self.stats = json.loads(stats.read_text()) if stats.exists() else {}


class Server:
    """llama-server on a free loopback port; stops when the `with` block ends, then `stats` and `code` are set."""

    def __init__(self, *arguments, mode="oscar", model=None):
        self.mode = mode
        self.folder = tempfile.TemporaryDirectory()
        self.stats_path = Path(self.folder.name) / "stats.json"
        self.log_path = Path(self.folder.name) / "log"
        self.stats, self.code = {}, None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = ["-m", model or MODEL, "--host", "127.0.0.1", "--port", self.port, "-t", THREADS, "-fa", "on", *arguments]
        self.line = command("llama-server", words, mode)

    def __enter__(self):
        self.log = open(self.log_path, "wb")
        self.process = subprocess.Popen(self.line, env=environment(self.mode, self.stats_path), stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while True:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"llama-server did not start:\n{self.output()[-3000:]}")
                try:
                    if self.get("/health")[0] == 200:
                        return self
                except OSError:
                    pass
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.code = self.process.returncode
        self.log.close()
        self.final_output = self.output()
        if self.stats_path.exists():
            self.stats = json.loads(self.stats_path.read_text())
        self.folder.cleanup()

    def output(self):
        return self.log_path.read_text(errors="replace")

    def get(self, path):
        return self.request("GET", path, None)

    def request(self, method, path, body):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def post(self, path, **body):
        status, answer = self.request("POST", path, body)
        assert status == 200, f"{path}: HTTP {status}: {answer}"
        return answer

    def complete(self, prompt, n_predict=24, **more):
        return self.post("/completion", prompt=prompt, n_predict=n_predict, temperature=0, seed=1, **more)

    def program_pid(self):
        """The process that is llama-server: `oscar exec` may be its parent."""
        for candidate in [self.process.pid, *children(self.process.pid)]:
            if Path(f"/proc/{candidate}/exe").resolve().name == "llama-server":
                return candidate
        raise AssertionError("llama-server is not running")

    def resident_bytes(self):
        status = Path(f"/proc/{self.program_pid()}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def assert_served(test, result):
    """The program ended well, and every attention operation on its cache was ours."""
    test.assertEqual(result.code, 0, getattr(result, "err", None) or getattr(result, "final_output", ""))
    test.assertGreater(result.stats.get("attention_served", 0), 0, result.stats)
    test.assertEqual(result.stats["attention_bypassed"], 0, result.stats)
