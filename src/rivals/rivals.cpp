// The table of rivals.
#include "oscar/rivals/rivals.h"

#include <algorithm>
#include <array>

#include "oscar/base/error.h"
#include "rivals/grids.h"
#include "rivals/simulated_codec.h"
#include "rivals/simulation.h"

namespace oscar {
namespace {

using namespace rival;

constexpr std::string_view kPrefix = "sim:";
constexpr std::string_view kMeanSuffix = "+mean";

struct Method {
  RivalInfo info;
  Simulation (*make)(bool is_k, Shape shape);
};

// A step and an offset of 16 bit for every run of `group` of `n` values.
double grid_bits(int n, int group) {
  const int grids = (n + group - 1) / group;
  return 32.0 * grids / n;
}

double kvarn_bits(bool is_k, int dim, int bits) {
  // K: a grid per channel and page, a scale per token. V: a grid per token, a scale per channel and page.
  return is_k ? bits + grid_bits(kPage, kPage) + 16.0 / dim : 2 + grid_bits(dim, dim) + 16.0 / kPage;
}

double ott_bits(bool is_k, int dim) {
  constexpr double share = static_cast<double>(kOttOutliers) / kPage;
  return is_k ? 2 + grid_bits(kPage, kPage) + share * 16 : 2 + grid_bits(dim, kPage);
}

double kitty_bits(bool is_k, int dim) {
  return is_k ? 2 + 2.0 * kitty_boosted_channels(dim) / dim + grid_bits(kPage, kPage) : 2 + grid_bits(dim, dim);
}

const std::array<Method, 17> kMethods = {{
    {{"q8_0", "8-bit blocks of 32 after a Hadamard", "llama.cpp", [](bool, int) { return 8.5; }},
     [](bool is_k, Shape s) { return llama_cache(is_k, s, true, rival::q8_0); }},
    {{"q4_0", "4-bit blocks of 32 after a Hadamard", "llama.cpp", [](bool, int) { return 4.5; }},
     [](bool is_k, Shape s) { return llama_cache(is_k, s, true, rival::q4_0); }},
    {{"q4_0-plain", "4-bit blocks of 32", "llama.cpp before April 2026", [](bool, int) { return 4.5; }},
     [](bool is_k, Shape s) { return llama_cache(is_k, s, false, rival::q4_0); }},
    {{"q4_1", "4-bit blocks of 32 with a minimum, after a Hadamard", "llama.cpp", [](bool, int) { return 5.0; }},
     [](bool is_k, Shape s) { return llama_cache(is_k, s, true, rival::q4_1); }},
    {{"fp8-e4m3", "saturating cast to E4M3, scale 1", "vLLM, SGLang", [](bool, int) { return 8.0; }},
     [](bool, Shape s) { return fp8(s); }},
    {{"naive-int2", "2-bit min-max per token", "", [](bool, int dim) { return 2 + grid_bits(dim, dim); }},
     [](bool, Shape s) { return naive(s, 2); }},
    {{"quarot-int2", "Hadamard, 2-bit min-max per token, clip .95", "QuaRot, arXiv 2404.00456",
      [](bool, int dim) { return 2 + grid_bits(dim, dim); }},
     [](bool, Shape s) { return quarot(s); }},
    {{"rotatekv", "K before RoPE, Hadamard over 4 heads, 2-bit per token, clip .8", "RotateKV, arXiv 2501.16383",
      [](bool, int dim) { return 2 + grid_bits(dim, kPage); }},
     [](bool is_k, Shape s) { return rotatekv(is_k, s); }},
    {{"turboquant-2", "K: Hadamard, Lloyd-Max on the unit sphere; V: min-max", "TurboQuant, arXiv 2504.19874",
      [](bool is_k, int dim) { return 2 + (is_k ? 16.0 / dim : grid_bits(dim, dim)); }},
     [](bool is_k, Shape s) { return turboquant(is_k, s, 2); }},
    {{"turboquant-3", "the same at 3 bits", "TurboQuant, arXiv 2504.19874",
      [](bool is_k, int dim) { return 3 + (is_k ? 16.0 / dim : grid_bits(dim, dim)); }},
     [](bool is_k, Shape s) { return turboquant(is_k, s, 3); }},
    {{"saw-int4", "4-bit min-max per token, K after a block Hadamard", "Saw-INT4",
      [](bool, int dim) { return 4 + grid_bits(dim, dim); }},
     [](bool is_k, Shape s) { return saw_int4(is_k, s); }},
    {{"kivi2-g32", "K per channel over 32 tokens, V per token over 32 dimensions", "KIVI, arXiv 2402.02750",
      [](bool is_k, int dim) { return 2 + (is_k ? grid_bits(32, 32) : grid_bits(dim, 32)); }},
     [](bool is_k, Shape s) { return kivi(is_k, s, 32); }},
    {{"kivi2-g128", "the same over 128", "KIVI, arXiv 2402.02750",
      [](bool is_k, int dim) { return 2 + (is_k ? grid_bits(128, 128) : grid_bits(dim, 128)); }},
     [](bool is_k, Shape s) { return kivi(is_k, s, 128); }},
    {{"ott", "KIVI over 128; the 2 keys of least norm of each page stay 16-bit", "Outlier Tokens Tracing, arXiv 2505.10938",
      ott_bits},
     [](bool is_k, Shape s) { return ott(is_k, s); }},
    {{"kitty", "K per channel over 128 tokens, 12.5 % of the channels at 4 bits", "Kitty, arXiv 2511.18643", kitty_bits},
     [](bool is_k, Shape s) { return kitty(is_k, s); }},
    {{"kvarn-k4v2", "Hadamard, 16 balancing passes on tiles of 128 tokens, K 4 bits per channel, V 2 bits per token", "KVarN",
      [](bool is_k, int dim) { return kvarn_bits(is_k, dim, 4); }},
     [](bool is_k, Shape s) { return kvarn(is_k, s, 4); }},
    {{"kvarn-k2v2", "the same with K at 2 bits", "KVarN", [](bool is_k, int dim) { return kvarn_bits(is_k, dim, 2); }},
     [](bool is_k, Shape s) { return kvarn(is_k, s, 2); }},
}};

// Null: unknown. `with_mean`: whether the variant removes the mean.
const Method* find(std::string_view codec, bool& with_mean) {
  if (!is_rival(codec)) return nullptr;
  std::string_view name = codec.substr(kPrefix.size());
  with_mean = name.ends_with(kMeanSuffix);
  if (with_mean) name.remove_suffix(kMeanSuffix.size());
  const auto* found = std::find_if(kMethods.begin(), kMethods.end(), [&](const Method& m) { return m.info.name == name; });
  return found == kMethods.end() ? nullptr : found;
}

[[noreturn]] void refuse(std::string_view codec) {
  fail("codec '{}' is unknown; sim:NAME and sim:NAME+mean are known, where NAME is one of {}", codec, rival_names(", "));
}

}  // namespace

std::span<const RivalInfo> rivals() {
  static const auto infos = [] {
    std::array<RivalInfo, kMethods.size()> all{};
    std::transform(kMethods.begin(), kMethods.end(), all.begin(), [](const Method& m) { return m.info; });
    return all;
  }();
  return infos;
}

bool is_rival(std::string_view codec) { return codec.starts_with(kPrefix); }

void check_rival(std::string_view codec) {
  bool with_mean = false;
  if (find(codec, with_mean) == nullptr) refuse(codec);
}

std::string rival_names(std::string_view separator) {
  std::string names;
  for (const Method& m : kMethods) {
    if (!names.empty()) names += separator;
    names += m.info.name;
  }
  return names;
}

std::shared_ptr<const Codec> make_rival(std::string_view codec, bool is_k, RivalLayer layer) {
  bool with_mean = false;
  const Method* method = find(codec, with_mean);
  if (method == nullptr) refuse(codec);
  if (!is_k || !with_mean) {
    layer.mean_pre_rope.resize(0, 0);
  } else if (layer.mean_pre_rope.size() == 0) {
    fail("{} needs the key mean before RoPE, which the artifact does not hold; leave +mean out or calibrate again", codec);
  }
  if (layer.n_head_kv <= 0 || layer.head_dim <= 0)
    fail("{}: {} KV heads of {}; both must be positive", codec, layer.n_head_kv, layer.head_dim);
  try {
    Simulation simulation = method->make(is_k, {layer.n_head_kv, layer.head_dim});
    const double bits = method->info.bits(is_k, layer.head_dim);
    return make_simulated_codec(std::string(codec), is_k, std::move(layer), bits, std::move(simulation));
  } catch (const Error& error) {
    fail("{} cannot be simulated on this model: {}", codec, error.what());
  }
}

}  // namespace oscar
