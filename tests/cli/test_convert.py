"""RotationZoo files to artifacts and back: the published files of Qwen3-4B, bit for bit."""
import json
import shutil
import tempfile
import unittest
import zipfile
from pathlib import Path

from cli import SHARED, WITH_LLAMA, oscar, qwen3_gguf

ZOO = SHARED / "data" / "rotationzoo" / "qwen3-4b-thinking-2507"
K, V = ZOO / "k_rotation_qqt_r_h_pbr.pt", ZOO / "v_rotation_sst_r_h_pbr.pt"
ROTATION_BYTES = 128 * 128 * 4


def rotations(path):
    """The contents of every storage of a rotation's size, in no order."""
    with zipfile.ZipFile(path) as file:
        members = [file.read(name) for name in file.namelist() if "/data/" in name]
    return sorted(member for member in members if len(member) == ROTATION_BYTES)


class Convert(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.model = self.folder / "model.gguf"
        self.artifact = self.folder / "model.oscar.safetensors"
        qwen3_gguf(self.model)

    def convert(self, *words):
        return oscar("convert", *words)

    def imported(self, k=K, v=V, model=None, *more):
        return self.convert("--k", k, "--v", v, "--model", model or self.model, self.artifact, *more)

    def test_there_and_back_again(self):
        done = self.imported()
        self.assertEqual(done.returncode, 0, done.stderr)
        facts = json.loads(oscar("inspect", self.artifact, "-o", "json").stdout)
        self.assertEqual((facts["kind"], facts["sound"], facts["coded_layers"]), ("artifact", True, 36))
        self.assertEqual((facts["k_objective"], facts["v_objective"]), ("qqt_r_h_pbr", "sst_r_h_pbr"))
        self.assertEqual((facts["k_mean"], facts["rotation"]), ("none", "layer"))
        self.assertEqual(facts["bits_per_element"], 2.25)
        self.assertLess(max(row["orthogonality error"] for row in facts["rows"]), 1e-3)
        done = self.convert(self.artifact, "--k", self.folder / "k.pt", "--v", self.folder / "v.pt")
        self.assertEqual(done.returncode, 0, done.stderr)
        for original, again in ((K, "k.pt"), (V, "v.pt")):
            self.assertEqual(len(rotations(original)), 36)
            self.assertEqual(rotations(self.folder / again), rotations(original))
            sound = json.loads(oscar("inspect", self.folder / again, "-o", "json").stdout)
            self.assertEqual((sound["kind"], sound["sound"], sound["layers"], sound["version"]), ("rotation", True, 36, 1))

    def test_the_model_finds_its_artifact(self):
        self.assertEqual(self.imported().returncode, 0)
        facts = json.loads(oscar("inspect", self.model, "-o", "json").stdout)
        self.assertEqual(Path(facts["artifact"]).name, self.artifact.name)

    def test_clips_can_be_given(self):
        self.assertEqual(self.imported(K, V, None, "--clip-k", "0.5", "--clip-v", "0").returncode, 0)
        rows = json.loads(oscar("inspect", self.artifact, "-o", "json").stdout)["rows"]
        self.assertEqual({(row["clip K"], row["clip V"]) for row in rows}, {("0.5", "0")})
        self.assertEqual(self.imported(K, V, None, "--clip-k", "1.1").returncode, 1)

    def refused(self, done, *fragments):
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for fragment in fragments:
            self.assertIn(fragment, done.stderr)
        self.assertFalse(self.artifact.exists())

    def test_a20_swapped_files_are_refused(self):
        self.refused(self.imported(V, K), "sst_r_h_pbr")
        self.refused(self.imported(K, K), "qqt_r_h_pbr")

    def test_a20_files_of_another_model_are_refused(self):
        other = self.folder / "other.gguf"
        qwen3_gguf(other, layers=40)
        self.refused(self.imported(model=other), "layer")
        qwen3_gguf(other, head_dim=64)
        self.refused(self.imported(model=other), "layer", "64")

    @unittest.skipUnless(WITH_LLAMA, "built without llama.cpp")
    def test_an_artifact_of_another_model_is_refused(self):
        self.assertEqual(self.imported().returncode, 0)
        text = self.folder / "text.txt"
        text.write_text("Some text.")
        other = self.folder / "other.gguf"
        for difference in ({"layers": 40}, {"heads_kv": 4}, {"head_dim": 64}):
            qwen3_gguf(other, **difference)
            for command in (["compare", "-f", text], ["eval", "-f", text, "--allow-small"], ["run", "-p", "x"]):
                done = oscar(*command, "-m", other, "--oscar", self.artifact)
                self.assertEqual((done.returncode, done.stdout), (1, ""), done.stderr)
                self.assertIn("was calibrated for another model (Geometry of Qwen3-4B, qwen3), not for other.gguf", done.stderr)

    def test_a_damaged_file_is_refused(self):
        damaged = self.folder / "k.pt"
        damaged.write_bytes(K.read_bytes()[: K.stat().st_size // 2])
        self.refused(self.imported(damaged), "k.pt")
        self.assertEqual(oscar("inspect", damaged).returncode, 1)

    def test_a_changed_artifact_is_unsound(self):
        self.assertEqual(self.imported().returncode, 0)
        changed = self.folder / "changed.oscar.safetensors"
        shutil.copy(self.artifact, changed)
        with open(changed, "r+b") as file:
            file.seek(-7, 2)
            byte = file.read(1)
            file.seek(-7, 2)
            file.write(bytes([byte[0] ^ 1]))
        done = oscar("inspect", changed, "-o", "json")
        self.assertEqual(done.returncode, 1)
        self.assertIn("digest", done.stderr)
        self.assertFalse(json.loads(done.stdout)["sound"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
