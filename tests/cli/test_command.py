"""Help, documentation, sentences and exit codes."""
import json
import re
import tempfile
import unittest
from pathlib import Path

from cli import SOURCE, WITH_LLAMA, oscar, qwen3_gguf

COMMANDS = ["calibrate", "run", "exec", "compare", "eval", "bench", "report", "card", "inspect", "convert", "merge"]


class Help(unittest.TestCase):
    def test_every_command_teaches(self):
        overview = oscar("--help")
        self.assertEqual(overview.returncode, 0)
        for command in COMMANDS:
            self.assertRegex(overview.stdout, rf"(?m)^  {command} ")
            for flag in ("-h", "--help"):
                done = oscar(command, flag)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn(f"usage: oscar {command}", done.stdout)
                self.assertIn("examples:", done.stdout)
                self.assertEqual(done.stderr, "")
                self.assertLessEqual(max(map(len, done.stdout.splitlines())), 132)

    def test_version_is_the_projects(self):
        project = re.search(r"project\(oscar VERSION ([0-9.]+)", (SOURCE / "CMakeLists.txt").read_text()).group(1)
        self.assertEqual(oscar("--version").stdout, f"oscar {project}\n")

    def test_documentation_is_current(self):
        self.assertEqual((SOURCE / "docs" / "cli.md").read_text(), oscar("help", "--markdown").stdout,
                         "docs/cli.md is old: oscar help --markdown > docs/cli.md")

    def test_json_keys_are_documented(self):
        for command in ("calibrate", "run", "compare", "eval", "bench", "inspect"):
            self.assertIn("JSON keys:", oscar(command, "--help").stdout)


class Usage(unittest.TestCase):
    def check(self, words, code, fragment, **env):
        done = oscar(*words, **env)
        self.assertEqual(done.returncode, code, f"{words}: {done.stderr}")
        self.assertIn(fragment, done.stderr, words)
        self.assertEqual(done.stdout, "", words)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("oscar: error: "), done.stderr)

    def test_wrong_usage_is_2(self):
        self.check(["exce"], 2, "did you mean exec?")
        self.check(["inspect", "--colour", "x"], 2, "inspect has no option --colour")
        self.check(["run", "-ngl", "99"], 2, "run has no option -ngl")
        self.check(["run", "-c", "many"], 2, "--ctx-size")
        self.check(["run", "-n"], 2, "--predict")
        self.check(["merge"], 1, "two or more files")
        no_command = oscar()
        self.assertEqual((no_command.returncode, no_command.stdout), (2, ""))
        self.assertIn("commands:", no_command.stderr)

    def test_bad_input_is_1(self):
        with tempfile.TemporaryDirectory() as folder:
            junk = Path(folder) / "junk.safetensors"
            junk.write_bytes(b"\xff" * 64)
            self.check(["inspect", Path(folder) / "nothing"], 1, "there is no file")
            self.check(["inspect", folder], 1, "is not a regular file")
            self.check(["inspect", junk, "-o", "xml"], 1, "md, json or csv")
            other = Path(folder) / "other.safetensors"
            other.write_bytes(b"\xfe" * 64)
            self.check(["merge", junk, other, "-o", Path(folder) / "sum"], 1, "junk.safetensors")
            self.check(["merge", junk, junk, "-o", Path(folder) / "sum"], 1, "named twice")
            self.check(["merge", junk, other, "-o", Path(folder) / "no" / "sum"], 1, "there is no folder")
            self.check(["convert", junk, "--k", "r.pt", "--v", Path(folder).cwd() / "r.pt"], 1, "are one file")
            self.check(["calibrate", "--objective-k", "foo"], 1, "must start with")
            self.check(["convert", junk, "--k", "k.pt"], 1, "both --k K.pt and --v V.pt")
            self.check(["calibrate", "--from-moments", junk, "-o", Path(folder) / "out"], 1, "junk.safetensors")
            self.check(["calibrate", "--rotation", "both"], 1, "per-head and layer")
            self.check(["calibrate", "--clip-k", "1.5"], 1, "0 (no clipping) to 1")
            self.check(["calibrate", "--v-mean", "rope"], 1, "none or static")

    def test_environment_is_a_twin_that_flags_beat(self):
        done = oscar("calibrate", "--from-moments", "missing", "-o", "y", OSCAR_V_MEAN="rope")
        self.assertIn("--v-mean rope", done.stderr)
        done = oscar("calibrate", "--from-moments", "missing", "-o", "y", "--v-mean", "none", OSCAR_V_MEAN="rope")
        self.assertIn("missing", done.stderr)

    def test_model_commands_name_what_is_missing(self):
        without = "-DOSCAR_LLAMA_DIR="
        for words, fragment in ((["run", "-m", "no.gguf", "-p", "x"], "no.gguf"), (["run", "-p", "x"], "-m MODEL.gguf"),
                                (["calibrate", "-m", "no.gguf", "-f", "no.txt"], "no.gguf"), (["calibrate", "-m", "no.gguf"], "-f TEXT"),
                                (["compare", "-m", "no.gguf", "-f", "no.txt"], "no.txt"), (["compare", "-m", "no.gguf"], "-f TEXT"),
                                (["eval", "-m", "no.gguf", "-f", "no.txt"], "no.txt"), (["eval", "-m", "no.gguf"], "-f TEXT"),
                                (["run", "-m", "no.gguf", "-p", "x", "--sink", "-1"], "counts tokens"),
                                (["run", "-m", "no.gguf", "-p", "x", "--clip-k", "nan"], "share of coordinates"),
                                (["run", "-m", "no.gguf", "-p", "x", "--recent", "0"], "from 1"),
                                (["run", "-m", "no.gguf", "-p", "x", "--stats-json", "/no/such/file"], "there is no folder"),
                                (["run", "-m", "no.gguf", "-p", "x", "--mode", "fast"], "oscar, exact, delegate, stock")):
            self.check(words, 1, fragment if WITH_LLAMA else without)
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "text"
            for data, fragment in ((b"a\0b", "zero byte at offset 1"), (b"ab\xc3(", "not UTF-8 (byte 2)"), (b"\xed\xa0\x80", "not UTF-8"), (b"", "empty")):
                text.write_bytes(data)
                self.check(["run", "-m", "no.gguf", "-f", text], 1, fragment if WITH_LLAMA else without)
            self.check(["run", "-m", "no.gguf", "-f", folder], 1, "is a directory" if WITH_LLAMA else without)
        self.check(["exec"], 2 if WITH_LLAMA else 1, "a program after --" if WITH_LLAMA else without)


class Inspect(unittest.TestCase):
    def test_model(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            qwen3_gguf(path, layers=3)
            facts = json.loads(oscar("inspect", path, "-o", "json").stdout)
            self.assertEqual((facts["kind"], facts["sound"], facts["problems"], facts["n_layer"]), ("gguf", True, [], 3))
            self.assertEqual(facts["bytes_per_token_f16"], 3 * 8 * 256 * 2)
            self.assertEqual([row["layer"] for row in facts["rows"]], [0, 1, 2])
            self.assertEqual(oscar("inspect", path, "-o", "csv").stdout.splitlines()[1], "0,32,8,128,128,coded")

    def test_unsound_is_1_with_the_reason(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            qwen3_gguf(path, heads=0)
            done = oscar("inspect", path, "-o", "json")
            self.assertEqual(done.returncode, 1)
            self.assertFalse(json.loads(done.stdout)["sound"])
            self.assertIn("head_count", done.stderr)
            qwen3_gguf(path, head_dim=126)
            done = oscar("inspect", path)
            self.assertEqual(done.returncode, 1)
            self.assertIn("not multiples of 4", done.stderr)
            path.write_bytes(path.read_bytes()[:100])
            self.assertEqual(oscar("inspect", path).returncode, 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
