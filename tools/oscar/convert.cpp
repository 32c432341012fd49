// `oscar convert`: RotationZoo's .pt pairs to our artifact and back.
#include "cli.h"
#include "oscar/artifact/artifact.h"
#include "oscar/artifact/rotation_zoo.h"
#include "oscar/base/error.h"
#include "oscar/io/gguf.h"
#include "output.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct ConvertOptions {
  std::string artifact, k, v, model;
  float clip_k = -1.0F, clip_v = -1.0F;
};

int import_files(const ConvertOptions& options) {
  for (const auto& [flag, value] : {std::pair{"--clip-k", options.clip_k}, std::pair{"--clip-v", options.clip_v}}) {
    if (!(value <= 1.0F)) fail("{} is {}, but it is a share of coordinates: 0 (no clipping) to 1", flag, value);
  }
  const GgufModel model = describe_model(Gguf(options.model));
  Artifact artifact = artifact_from_rotation_files(read_rotation_file(options.k), read_rotation_file(options.v), model.layers,
                                                   {model.fingerprint, model.architecture, model.name, model.n_layer});
  if (options.clip_k >= 0.0F) artifact.recipe.clip_k = options.clip_k;
  if (options.clip_v >= 0.0F) artifact.recipe.clip_v = options.clip_v;
  artifact.provenance["converted_from"] = {fs::path(options.k).filename().string(), fs::path(options.v).filename().string()};
  save_artifact(artifact, options.artifact);
  print(fmt::format("{}: {} layers, K {}, V {}, digest {}\n", options.artifact, artifact.layers.size(),
                    artifact.recipe.k_objective, artifact.recipe.v_objective, artifact.digest.substr(0, 16)));
  return kOk;
}

int export_files(const ConvertOptions& options) {
  const Artifact artifact = load_artifact(options.artifact);
  const auto [k, v] = rotation_files_from_artifact(artifact);
  write_rotation_file(k, options.k);
  write_rotation_file(v, options.v);
  const bool per_head = !k.layers.empty() && k.layers.begin()->second.rotation.size() > 1;
  print(fmt::format("{} ({}) and {} ({}): {} layers, {}\n", options.k, k.objective, options.v, v.objective, k.layers.size(),
                    per_head ? "v2, one rotation per KV head" : "v1, one rotation per layer"));
  if (artifact.recipe.k_mean != MeanMode::none || artifact.recipe.v_mean != MeanMode::none) {
    fmt::print(stderr, "oscar: warning: .pt files carry no means; the artifact removes them (k_mean {}, v_mean {})\n",
               to_string(artifact.recipe.k_mean), to_string(artifact.recipe.v_mean));
  }
  return kOk;
}

int convert(const ConvertOptions& options) {
  if (options.artifact.empty())
    fail("no artifact was named: oscar convert --k K.pt --v V.pt --model MODEL.gguf OUT, or ARTIFACT --k K.pt --v V.pt");
  if (options.k.empty() || options.v.empty()) fail("rotations come in pairs: name both --k K.pt and --v V.pt");
  if (options.model.empty() && fs::weakly_canonical(fs::absolute(options.k)) == fs::weakly_canonical(fs::absolute(options.v)))
    fail("--k and --v are one file, {}: the rotations of keys and of values need two", options.k);
  return options.model.empty() ? export_files(options) : import_files(options);
}

}  // namespace

void add_convert(CommandLine& line) {
  Command& command = line.add("convert", "turn RotationZoo .pt files into an artifact, or an artifact into .pt files");
  const auto options = std::make_shared<ConvertOptions>();
  command.usage("--k K.pt --v V.pt --model MODEL.gguf OUT.oscar.safetensors");
  command.usage("IN.oscar.safetensors --k K.pt --v V.pt");
  command.text(
      "With --model, the .pt files are read and an artifact for that model is written; without, the artifact is read and the "
      ".pt files are "
      "written. PyTorch is not needed and nothing in a .pt is ever executed. Versions 1 (one rotation per layer) and 2 (one "
      "per KV head) are "
      "told apart by the tensors; which file is K and which is V by the objective inside, so swapped files are refused.");
  command.text(
      "The model supplies what .pt files lack: its fingerprint and geometry. Such artifacts remove no mean and clip as "
      "published (K 0.96, "
      "V 0.92) unless told otherwise.");
  command.option("ARTIFACT", options->artifact, "FILE", "artifact to write (with --model) or to read");
  command.option("--k", options->k, "FILE", "rotations of keys, .pt");
  command.option("--v", options->v, "FILE", "rotations of values, .pt");
  command.option("-m,--model", options->model, "FILE", "the model the .pt files were made for, GGUF");
  command.option("--clip-k", options->clip_k, "RATIO", "clip ratio of K in the artifact, 0 = off");
  command.option("--clip-v", options->clip_v, "RATIO", "clip ratio of V in the artifact, 0 = off");
  command.example(
      "oscar convert --k k_rotation_qqt_r_h_pbr.pt --v v_rotation_sst_r_h_pbr.pt --model model.gguf model.oscar.safetensors",
      "use published rotations");
  command.example("oscar convert model.oscar.safetensors --k k.pt --v v.pt", "for programs that read .pt");
  command.action([options] { return convert(*options); });
}

}  // namespace oscar::cli
