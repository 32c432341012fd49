"""`oscar exec` around programs that are not llama.cpp's (tests/tools runs the real ones): what it sets, refuses and reports."""
import os
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from cli import OSCAR, clean_environment, oscar, qwen3_gguf


class Exec(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def script(self, text, name="program"):
        path = self.folder / name
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
        return path

    def binary(self, source, *flags):
        path = self.folder / "binary"
        subprocess.run([os.environ["OSCAR_TEST_CXX"], "-x", "c++", "-", "-o", path, *flags], input=source, text=True, check=True)
        return path

    def refused(self, done, *fragments, code=1):
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for fragment in fragments:
            self.assertIn(fragment, done.stderr)

    def test_no_program(self):
        self.refused(oscar("exec"), "a program after --", code=2)
        self.refused(oscar("exec", "--", "no-such-program"), "no-such-program", "PATH")
        self.refused(oscar("exec", "--", self.folder / "missing"), "missing")
        plain = self.folder / "plain"
        plain.write_text("text")
        self.refused(oscar("exec", "--", plain), "not an executable")

    def test_what_cannot_work_is_refused_with_the_reason(self):
        for words in (["-ctk", "q8_0"], ["-ctv", "bf16"], ["--cache-type-k", "q4_0"], ["-ctk", "f16,q8_0"]):
            self.refused(oscar("exec", "--", "llama-server", *words), words[0], words[1], "f16")
        self.refused(oscar("exec", "--", "llama-server", LLAMA_ARG_CACHE_TYPE_V="q8_0"), "LLAMA_ARG_CACHE_TYPE_V", "q8_0")
        for value in ("off", "0", "on,off"):
            self.refused(oscar("exec", "--", "llama-bench", "-fa", value), f"-fa {value}", "flash-attention")
        self.refused(oscar("exec", "--mode", "stock", "--", self.script("exit 0")), "start it directly")
        self.refused(oscar("exec", "--layer-bits", "0:8", "--", self.script("exit 0")), "'0:8'", "only 1.5, 2, 2.5 or 3 exist")
        self.refused(oscar("exec", "--sink", "few", "--", self.script("exit 0")), "counts tokens")

    def test_static_programs_are_refused(self):
        static = self.binary("int main() { return 0; }", "-static")
        self.refused(oscar("exec", "--", static), "static executable", "-DBUILD_SHARED_LIBS=ON")

    def test_programs_with_ggml_inside_are_refused(self):
        inside = self.binary('extern "C" const char* ggml_backend_name() { return "x"; } int main() { return ggml_backend_name()[0] == 0; }')
        self.refused(oscar("exec", "--", inside), "linked into it statically", "-DBUILD_SHARED_LIBS=ON")

    def test_a_model_without_artifact(self):
        model = self.folder / "model.gguf"
        qwen3_gguf(model)
        done = oscar("exec", "--", self.script("exit 0"), "-m", model, OSCAR_CACHE_DIR=str(self.folder))
        self.refused(done, "no calibration artifact for model.gguf", "oscar calibrate -m model.gguf")

    def test_what_the_program_gets(self):
        done = oscar("exec", "--sink", "32", "--k-mean", "none", "--layer-bits", "0:3,5-7:k2.5", "--", self.script("env; echo args $*", "llama-server"), "-x", "a b")
        environment = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        plugin = environment["GGML_BACKEND_PATH"]
        self.assertTrue(plugin.endswith("liboscar-llama.so"))
        self.assertEqual(environment["LD_PRELOAD"].split(":")[0], plugin)
        self.assertEqual((environment["OSCAR_MODE"], environment["OSCAR_STRICT"]), ("oscar", "1"))
        self.assertEqual((environment["OSCAR_SINK"], environment["OSCAR_K_MEAN"], environment["OSCAR_LAYER_BITS"]),
                         ("32", "none", "0:3,5-7:k2.5"))
        self.assertEqual((environment["LLAMA_ARG_FLASH_ATTN"], environment["LLAMA_ARG_CACHE_RAM"]), ("on", "0"))
        self.assertIn("args -x a b\n", done.stdout)
        self.assertIn("--cache-ram 0", done.stderr)
        done = oscar("exec", "--no-strict", "--", self.script("env; echo args $*", "llama-bench"), GGML_BACKEND_PATH="other")
        self.assertIn("args -fa on\n", done.stdout)  # llama-bench reads no environment
        self.assertIn("OSCAR_STRICT=0\n", done.stdout)
        self.assertIn("GGML_BACKEND_PATH=other\n", done.stdout)
        self.assertNotIn("CACHE_RAM", done.stdout)
        done = oscar("exec", "--", self.script("env", "llama-server"), "-fa", "on", "-cram", "512")
        self.assertNotIn("LLAMA_ARG_", done.stdout)
        self.assertIn("warning: --cache-ram 512", done.stderr)

    def test_exit_codes(self):
        failed = oscar("exec", "--", self.script("exit 7"))
        self.assertEqual(failed.returncode, 7, failed.stderr)
        asked = oscar("exec", "--", self.script("exit 0"), "--help")
        self.assertEqual(asked.returncode, 0, asked.stderr)
        unserved = oscar("exec", "--", self.script("exit 0"))
        self.assertEqual(unserved.returncode, 3, unserved.stderr)
        self.assertIn("WITHOUT OSCAR", unserved.stderr)

    def test_a_crash_is_named(self):
        done = oscar("exec", "--", self.script("kill -SEGV $$"))
        self.assertEqual(done.returncode, 128 + signal.SIGSEGV)
        self.assertIn("program was ended by signal 11 (Segmentation fault)", done.stderr)

    def started(self, *words):
        process = subprocess.Popen([OSCAR, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment())
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        pid = int(process.stdout.readline())
        return process, pid

    def test_signals_are_passed_on(self):
        program = self.script("trap 'echo caught; exit 5' USR1\necho $$\nwhile :; do sleep 0.05; done")
        process, _ = self.started("exec", "--", program)
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=30)
        self.assertEqual((out, process.returncode), ("caught\n", 5))
        process, _ = self.started("exec", "--", program)
        process.terminate()
        _, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM)
        self.assertIn("signal 15", err)

    def test_a_signal_to_the_group_arrives_once(self):
        """`timeout` signals the whole group; llama-server aborts at the second one."""
        program = self.script("trap 'echo caught' TERM\necho $$\nfor i in $(seq 40); do sleep 0.05; done\nexit 5")
        words = ["timeout", "1", OSCAR, "exec", "--", program]
        done = subprocess.run([*map(str, words)], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=clean_environment(), timeout=60)
        self.assertEqual(done.stdout.splitlines()[1:], ["caught"])

    def test_a_killed_wrapper_leaves_no_program(self):
        process, pid = self.started("exec", "--", self.script("echo $$\nexec sleep 100"))
        process.kill()
        process.wait(timeout=30)
        for _ in range(200):
            try:
                os.kill(pid, 0)
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except (ProcessLookupError, FileNotFoundError):
                return
            if state == "Z":
                return
            time.sleep(0.05)
        self.fail(f"process {pid} is still there")


if __name__ == "__main__":
    unittest.main(verbosity=2)
