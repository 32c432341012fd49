// `oscar card`: the model card of an artifact, as the places where models are kept expect it: Markdown with YAML front matter.
#include <algorithm>
#include <ctime>
#include <iomanip>
#include <set>
#include <sstream>

#include "cli.h"
#include "fit_summary.h"
#include "oscar/artifact/artifact.h"
#include "oscar/base/error.h"
#include "oscar/io/files.h"
#include "oscar/io/sha256.h"
#include "output.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct CardOptions {
  std::string artifact, output, base_model, licence;
};

// Double-quoted YAML is JSON's string.
std::string yaml(const std::string& text) { return nlohmann::json(text).dump(); }

// As SOURCE_DATE_EPOCH wants it; empty when the date is in no form of ours.
std::string epoch(const std::string& date) {
  std::tm time{};
  std::istringstream stream(date);
  stream >> std::get_time(&time, "%Y-%m-%dT%H:%M:%SZ");
  return stream.fail() ? "" : std::to_string(timegm(&time));
}

std::string front_matter(const CardOptions& options, const std::string& licence) {
  std::string out = "---\n";
  out += fmt::format("license: {}\n", licence.empty() ? "unknown" : yaml(licence));
  if (!options.base_model.empty()) out += fmt::format("base_model: {}\n", yaml(options.base_model));
  return out + "library_name: oscar\ntags:\n- oscar\n- kv-cache\n- quantization\n- llama.cpp\n- gguf\n---\n";
}

template <class ValueOf>
std::string range_of(const std::vector<LayerArtifact>& layers, ValueOf value_of) {
  std::set<std::string> values;
  for (const LayerArtifact& layer : layers) values.insert(value_of(layer));
  return fmt::format("{}", fmt::join(values, " or "));
}

std::string rope_text(const RopeParams& rope) {
  if (rope.pairing == RopePairing::none) return "none";
  return fmt::format("{} pairing, {} coordinates, base {}, scale {}{}{}", rope.pairing == RopePairing::neox ? "NEOX" : "NORM",
                     rope.n_rot, rope.base, rope.freq_scale, rope.ext_factor != 0 ? ", YaRN" : "",
                     rope.freq_factors.empty() ? "" : ", frequency factors");
}

std::string model_section(const Artifact& artifact) {
  const auto& layers = artifact.layers;
  const auto sliding =
      std::count_if(layers.begin(), layers.end(), [](const auto& layer) { return layer.shape.sliding_window; });
  const auto number = [&](int LayerShape::*field) {
    return range_of(layers, [field](const LayerArtifact& layer) { return std::to_string(layer.shape.*field); });
  };
  Table table({"model", "value"});
  table.add({"name", artifact.model.name});
  table.add({"architecture", artifact.model.architecture});
  table.add({"fingerprint", artifact.model.fingerprint});
  if (const auto file = model_file(artifact)) {
    table.add({"calibrated in the file", file->name});
    table.add({"SHA-256 of that file", file->sha256});
  }
  table.add(
      {"layers", fmt::format("{}, of them {} with a sliding window, which stay at 16 bit", artifact.model.n_layer, sliding)});
  table.add({"query heads, KV heads", fmt::format("{}, {}", number(&LayerShape::n_head), number(&LayerShape::n_head_kv))});
  table.add({"head size of K, of V", fmt::format("{}, {}", number(&LayerShape::k_dim), number(&LayerShape::v_dim))});
  table.add({"RoPE", range_of(layers, [](const LayerArtifact& layer) { return rope_text(layer.shape.rope); })});
  return table.markdown() +
         "\nThe fingerprint covers architecture, geometry and one-dimensional weights: the artifact fits every quantisation of "
         "the "
         "same weights, and is refused for other models.\n";
}

// What a token really takes under a recipe, metadata included; sliding layers left out.
struct Size {
  std::size_t bytes = 0, f16 = 0;
};
Size size_under(const Artifact& artifact, const Recipe& recipe) {
  Size size;
  for (const LayerArtifact& layer : artifact.layers) {
    if (layer.k_rotation.empty()) continue;
    const LayerCodecs codecs = make_codecs(layer, recipe);
    size.bytes += codecs.k->row_bytes() + codecs.v->row_bytes();
    size.f16 +=
        2U * static_cast<std::size_t>(layer.shape.n_head_kv) * static_cast<std::size_t>(layer.shape.k_dim + layer.shape.v_dim);
  }
  return size;
}

std::string recipe_section(const Artifact& artifact) {
  const Recipe& recipe = artifact.recipe;
  std::string out;
  if (recipe.codec == "spectral") {
    const std::string layers =
        recipe.layer_bits.empty() ? "" : fmt::format(" (layers {}: `--layer-bits`)", to_text(recipe.layer_bits));
    out = fmt::format("Codec `spectral`, {} bits for K and {} for V{} unless told otherwise (`--k-bits`, `--v-bits`). ",
                      recipe.k_bits, recipe.v_bits, layers);
  } else {
    out = fmt::format("Codec `{}`, K mean {}, V mean {}, objectives `{}` and `{}`, one rotation per {}. ", recipe.codec,
                      to_string(recipe.k_mean), to_string(recipe.v_mean), recipe.k_objective, recipe.v_objective,
                      recipe.per_head ? "KV head" : "layer");
  }
  out +=
      "What one coded token takes in all coded layers, metadata included; the first 64 and last 256 tokens stay at 16 bit:\n\n";
  Table table({"codec", "bits", "real bits per element", "bytes per token", "bytes at 16 bit"});
  const auto add = [&](const Recipe& r, const std::string& bits) {
    const Size size = size_under(artifact, r);
    if (size.f16 == 0) return;
    table.add({r.codec, bits, 16.0 * static_cast<double>(size.bytes) / static_cast<double>(size.f16), size.bytes, size.f16});
  };
  const bool spectral = std::all_of(artifact.layers.begin(), artifact.layers.end(), [](const LayerArtifact& layer) {
    return layer.k_rotation.empty() || !layer.spectral.empty();
  });
  Recipe row = recipe;
  row.codec = "spectral";
  row.k_mean = MeanMode::rope;
  row.v_mean = MeanMode::none;
  if (spectral && !row.layer_bits.empty()) add(row, describe_rates(row));
  row.layer_bits.clear();
  for (const double rate : kSpectralRates) {
    row.k_bits = row.v_bits = rate;
    if (spectral) add(row, fmt::format("{}", rate));
  }
  row = recipe;
  row.layer_bits.clear();
  row.codec = "int2";
  add(row, "2");
  return out + table.markdown();
}

std::string calibration_section(const Artifact& artifact) {
  const std::vector<TextSource> sources = calibration_sources(artifact);
  if (sources.empty()) return "Not calibrated by oscar: it was converted from rotation files.\n";
  Table table({"text", "SHA-256", "tokens"});
  for (const TextSource& source : sources) table.add({source.name, source.sha256, source.tokens});
  std::string out = table.markdown();
  const auto n_ctx = artifact.provenance.find("n_ctx");
  if (n_ctx != artifact.provenance.end() && n_ctx->is_number_integer())
    out += fmt::format("\nIn sequences of {} tokens. ", n_ctx->get<std::int64_t>());
  return out + "Do not judge the codec on these texts.\n";
}

std::string expectation_section(const Artifact& artifact) {
  const std::optional<FitSummary> fit = fit_summary(artifact);
  if (!fit) return "Not recorded: the artifact was converted, or made by an older oscar.\n";
  std::string out =
      fmt::format("Verdict: **{}**.\n\nWorrying heads:{}\n", fit->verdict, fit->worried.empty() ? " none." : "\n");
  for (const WorriedHead& w : fit->worried) out += fmt::format("* layer {} head {}: {}\n", w.layer, w.head, w.why);
  out += "\n";
  Table table({"layer", "K noise %", "int2 %", "K error %", "V error %"});
  const auto percent = [](const std::optional<double>& v) {
    return v ? nlohmann::ordered_json(100.0 * *v) : nlohmann::ordered_json();
  };
  for (const LayerExpectation& l : fit->layers)
    table.add({l.layer, percent(l.key_noise), percent(l.key_noise_int2), 100.0 * l.k_error, 100.0 * l.v_error});
  out += table.markdown();
  out +=
      "\nK noise: what coded keys add to the output of attention, relative to it; beside it the same for codec `int2`. K and V "
      "error: relative squared errors of logits and values.\n";
  for (const std::string& warning : fit->warnings) out += fmt::format("\nWarning of the calibration: {}.\n", warning);
  return out;
}

std::string reproduction_section(const Artifact& artifact, const fs::path& path) {
  std::string out, tool = "oscar " + artifact.tool_version;
  const auto ggml = artifact.provenance.find("ggml");
  if (ggml != artifact.provenance.end() && ggml->is_string()) tool += ", ggml " + ggml->get<std::string>();
  const auto command = artifact.provenance.find("command");
  if (command != artifact.provenance.end() && command->is_string()) {
    const std::string seconds = epoch(artifact.date);
    out += fmt::format("```\n{}{} -o {}\n```\n\n", seconds.empty() ? "" : "SOURCE_DATE_EPOCH=" + seconds + " ",
                       command->get<std::string>(), path.filename().string());
    out += fmt::format(
        "With {}, the files above and a processor with the same instruction sets, this gives the same bytes; without "
        "SOURCE_DATE_EPOCH only the date differs, and with it both digests. Another instruction set rounds otherwise and gives "
        "slightly different numbers.\n\n",
        tool);
  }
  Table table({"this file", "value"});
  table.add({"SHA-256", sha256_file(path)});
  table.add({"digest inside, which oscar checks and reports", artifact.digest});
  table.add({"bytes", fs::file_size(path)});
  table.add({"date", artifact.date});
  table.add({"tool", tool});
  return out + table.markdown();
}

std::string card_of(const CardOptions& options) {
  const fs::path path = options.artifact;
  const Artifact artifact = load_artifact(path);
  std::string licence = options.licence;
  if (const auto file = model_file(artifact); licence.empty() && file) licence = file->licence;
  const std::string name = path.filename().string();
  const Rates mean = mean_rates(artifact, artifact.recipe);
  std::string out = front_matter(options, licence);
  out += fmt::format("\n# OSCAR calibration of {}\n\n", artifact.model.name);
  out += fmt::format(
      "Lets OSCAR keep the KV cache of this model in about {} bits per element instead of 16, inside an unmodified "
      "llama.cpp. It holds no weights: only statistics of keys and values turned into transforms and digit widths.\n",
      artifact.recipe.codec == "spectral" ? fmt::format("{:.3g}", (mean.k + mean.v) / 2) : "2");
  out += fmt::format(
      "\n## Use\n\n```\noscar run -m MODEL.gguf --oscar {0} -p \"Hello\"\nOSCAR_ARTIFACT={0} oscar exec -- llama-server -m "
      "MODEL.gguf\n```\n\nBeside the model as `MODEL.oscar.safetensors` it is found without being named.\n",
      name);
  out += "\n## Model\n\n" + model_section(artifact);
  out += "\n## Recipe and size\n\n" + recipe_section(artifact);
  out += "\n## Calibrated on\n\n" + calibration_section(artifact);
  out += "\n## Expected errors\n\n" + expectation_section(artifact);
  out += "\n## Reproduction\n\n" + reproduction_section(artifact, path);
  out += fmt::format(
      "\n## Licence\n\nThe numbers in this file were computed from the model, so treat it as the model's licence ({}) treats "
      "things derived from the model.\n",
      licence.empty() ? "which the model's file does not name" : licence);
  return out;
}

int card(const CardOptions& options) {
  if (options.artifact.empty()) fail("no artifact was named: oscar card MODEL.oscar.safetensors");
  const std::string text = card_of(options);
  if (options.output.empty()) {
    print(text);
    return kOk;
  }
  AtomicFile file(options.output);
  file.write(text);
  file.commit();
  return kOk;
}

}  // namespace

void add_card(CommandLine& line) {
  Command& command = line.add("card", "the model card of an artifact: Markdown with YAML front matter");
  const auto options = std::make_shared<CardOptions>();
  command.usage("ARTIFACT [-o README.md] [options]");
  command.text(
      "Says what whoever finds the artifact must know: model and fingerprint, geometry, recipe, what a token really takes at "
      "every rate, the texts of the calibration with their digests, the errors it expects per layer with its verdict, the "
      "command that makes the file again, its digests, and whose licence counts. Everything comes from the artifact itself.");
  command.option("ARTIFACT", options->artifact, "FILE", "calibration artifact");
  command.option("-o,--output", options->output, "FILE", "card to write; default: stdout");
  command.option("--base-model", options->base_model, "NAME", "base_model of the front matter, as model hubs name it");
  command.option("--licence", options->licence, "NAME", "the model's licence; default: what the model's file says");
  command.example("oscar card model.oscar.safetensors -o README.md", "a card to publish beside the artifact");
  command.action([options] { return card(*options); });
}

}  // namespace oscar::cli
