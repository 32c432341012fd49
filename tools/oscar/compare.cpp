// `oscar compare`: how far the 2-bit cache's output is from the 16-bit cache's, on a text.
#include "cli.h"
#include "oscar/base/error.h"
#include "oscar/rivals/rivals.h"
#include "output.h"
#include "settings.h"

#if OSCAR_WITH_LLAMA
#include <algorithm>

#include "kl_engine.h"
#include "oscar/artifact/artifact.h"
#include "oscar/io/gguf.h"
#include "oscar/io/sha256.h"
#include "oscar/version.h"
#include "session.h"
#include "statistics.h"
#endif

namespace oscar::cli {
namespace {

struct CompareOptions {
  HostOptions host;
  Settings settings;
  std::string text, mode_a = "exact", mode_b = "oscar", format = "md";
  std::vector<std::string> variants;
  int chunks = 4, from = 0;
  std::uint64_t seed = 1;
};

#if OSCAR_WITH_LLAMA

constexpr std::int64_t kFewPositions = 256;

std::vector<Contender> contenders(const CompareOptions& options) {
  std::vector<Contender> all;
  const auto add = [&](const std::string& name, const std::string& mode) -> Settings& {
    all.emplace_back();
    all.back().name = name;
    all.back().settings = options.settings;
    all.back().settings.mode = mode;
    return all.back().settings;
  };
  add(options.mode_a, options.mode_a);
  add(options.mode_b, options.mode_b);
  for (const std::string& variant : options.variants) {
    Settings& settings = add(variant, options.mode_b);
    override_settings(settings, variant);
  }
  return all;
}

nlohmann::ordered_json interval(const Estimate& e) { return nlohmann::ordered_json::array({e.low, e.high}); }

void print_result(const nlohmann::ordered_json& result, Format format) {
  if (format == Format::json) {
    print(result.dump(1) + "\n");
    return;
  }
  Table table({"cache", "bits", "bits, all", "clamped %", "KV MiB", "f16 MiB", "KL mean", "±", "KL median", "KL 99 %", "KL max",
               "same top %", "± %", "PPL", "PPL ratio", "± ratio", "t/s"});
  const auto& base = result["base"];
  const auto mib = [](const nlohmann::ordered_json& bytes) {
    return bytes.is_null() ? nlohmann::ordered_json() : nlohmann::ordered_json(bytes.get<double>() / 1048576.0);
  };
  const auto percent = [](const nlohmann::ordered_json& share) {
    return share.is_null() ? nlohmann::ordered_json() : nlohmann::ordered_json(100.0 * share.get<double>());
  };
  const auto half = [](const nlohmann::ordered_json& ci, double scale) {
    return scale * (ci[1].get<double>() - ci[0].get<double>()) / 2.0;
  };
  const nlohmann::ordered_json none;
  table.add({base["name"], base["bits_per_element"], base["bits_per_element_all"], percent(base["saturated_share"]),
             mib(base["kv_bytes"]), mib(base["kv_bytes_f16"]), none, none, none, none, none, none, none, base["ppl"], none,
             none, base["pp"]});
  for (const auto& v : result["variants"]) {
    table.add({v["name"], v["bits_per_element"], v["bits_per_element_all"], percent(v["saturated_share"]), mib(v["kv_bytes"]),
               mib(v["kv_bytes_f16"]), v["kl_mean"], half(v["kl_mean_ci"], 1), v["kl_median"], v["kl_p99"], v["kl_max"],
               100.0 * v["same_top"].get<double>(), half(v["same_top_ci"], 100), v["ppl"], v["ppl_ratio"],
               half(v["ppl_ratio_ci"], 1), v["pp"]});
  }
  if (format == Format::csv) {
    print(table.csv());
    return;
  }
  print(table.markdown());
  print(fmt::format(
      "\n{}, {}: {} chunks of {} tokens, {} positions from {} on; KL in nats; ± = half of the 95 % interval (seed {})\n",
      result["model"].get<std::string>(), result["text"].get<std::string>(), result["chunks"].get<int>(),
      result["n_ctx"].get<int>(), result["positions"].get<std::int64_t>(), result["from"].get<int>(),
      result["seed"].get<std::uint64_t>()));
}

nlohmann::ordered_json describe(const Contender& c, const CacheReport& cache, double tokens) {
  nlohmann::ordered_json out;
  const bool known = Plugin::loaded();
  const auto or_null = [&](auto value, bool valid) { return valid ? nlohmann::ordered_json(value) : nlohmann::ordered_json(); };
  out["name"] = c.name;
  out["mode"] = c.settings.mode;
  out["settings"] = plugin_json(c.settings, "");
  out["settings"].erase("artifact");
  out["settings"].erase("log");
  out["artifact_digest"] =
      c.artifact.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(load_artifact(c.artifact).digest);
  out["kv_bytes"] = or_null(cache.resident_bytes, known);
  out["kv_bytes_f16"] = or_null(cache.nominal_bytes, known);
  out["bits_per_element"] = or_null(cache.bits_per_element, known);
  out["bits_per_element_all"] = or_null(cache.bits_per_element_all, known);
  out["saturated_share"] = cache.saturated_share ? nlohmann::ordered_json(*cache.saturated_share) : nlohmann::ordered_json();
  out["attention_served"] = or_null(c.served, known);
  out["attention_bypassed"] = or_null(c.bypassed, known);
  out["pp"] = c.seconds > 0 ? tokens / c.seconds : 0.0;
  return out;
}

int compare(CompareOptions options) {
  check(options.host);
  const Format format = parse_format(options.format);
  if (options.text.empty()) fail("no text was named: use -f TEXT");
  if (options.chunks == 0 || options.chunks < -1)
    fail("--chunks {} makes no sense: a number from 1, or -1 for the whole text", options.chunks);
  if (options.from < 0) fail("--from {} makes no sense: it is a position", options.from);
  if (options.host.n_ctx == 0) options.host.n_ctx = 4096;
  const int n_ctx = options.host.n_ctx;
  check(options.settings);
  const int coded = first_coded_query(options.settings);
  const int from = options.from > 0 ? options.from : std::max(std::min(1024, n_ctx / 2), coded);
  if (from + 2 > n_ctx)
    fail(
        "nothing of a context of {} tokens can be judged from position {} on (sink + recent are {} rows of 16 bit): use a "
        "larger -c",
        n_ctx, from, coded);
  options.host.n_batch = options.host.n_ubatch = std::min(options.host.n_ubatch, options.host.n_batch);
  const std::string text = read_text(options.text);
  std::vector<Contender> all = contenders(options);
  const bool plugin = settle_modes(all);
  for (Contender& c : all) c.artifact = resolve_artifact(c.settings, options.host.model);
  for (const Contender& c : all) {
    const int exact = first_coded_query(c.settings);
    if (c.settings.mode == "oscar" && from < exact) {
      fmt::print(stderr, "oscar: warning: {}: positions {} to {} read 16-bit rows only and count as perfect; use --from {}\n",
                 c.name, from, std::min(exact, n_ctx - 1) - 1, exact);
    }
  }

  Plugin::start(plugin, options.host.verbose);
  const Model model(options.host);
  const auto chunks = cut_text(model, text, n_ctx, options.chunks, from);
  open_contexts(all, model, options.host);
  watch_interrupts();

  std::size_t total = 0;
  for (const auto& chunk : chunks) total += chunk.size();
  Progress progress("comparing", static_cast<double>(total * all.size()), "tokens");
  std::size_t done = 0;
  std::vector<Contender*> order;
  order.reserve(all.size());
  for (Contender& c : all) order.push_back(&c);
  ChunkPass pass;
  pass.from = from;
  pass.n_ubatch = options.host.n_ubatch;
  pass.decoded = [&](std::size_t tokens) { progress.update(static_cast<double>(done += tokens)); };
  nlohmann::json stats;
  for (const auto& chunk : chunks) {
    run_chunk(model, order, chunk, pass);
    stats = Plugin::stats();
  }
  progress.finish();

  nlohmann::ordered_json result;
  const GgufModel description = describe_model(Gguf(options.host.model));
  result["oscar"] = version();
  result["model"] = std::filesystem::path(options.host.model).filename().string();
  result["model_fingerprint"] = description.fingerprint;
  result["text"] = std::filesystem::path(options.text).filename().string();
  result["text_sha256"] = sha256_hex(std::as_bytes(std::span(text)));
  result["n_ctx"] = n_ctx;
  result["n_ubatch"] = options.host.n_ubatch;
  result["chunks"] = chunks.size();
  result["tokens"] = total;
  result["from"] = from;
  result["seed"] = options.seed;
  int code = kOk;
  nlohmann::ordered_json variants = nlohmann::ordered_json::array();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Contender& c = all[i];
    nlohmann::ordered_json out = describe(c, cache_report(stats, i, all.size()), static_cast<double>(total));
    if (Plugin::loaded() && (c.served == 0 || c.bypassed > 0)) {
      fmt::print(stderr, "oscar: error: {}: {} attention operations were served and {} bypassed\n", c.name, c.served,
                 c.bypassed);
      code = kNotServed;
    }
    if (i == 0) {
      result["base"] = out;
      continue;
    }
    const Summary s = summarise(c.differences, options.seed);
    if (i == 1) {
      result["positions"] = s.positions;
      result["base"]["ppl"] = s.ppl_base;
      if (s.positions < kFewPositions) {
        fmt::print(stderr,
                   "oscar: warning: {} positions are too few for a claim; use a longer text, --chunks or a smaller --from\n",
                   s.positions);
      }
    }
    out["kl_mean"] = s.kl_mean.value;
    out["kl_mean_ci"] = interval(s.kl_mean);
    out["kl_median"] = s.kl_median;
    out["kl_p99"] = s.kl_p99;
    out["kl_max"] = s.kl_max;
    out["same_top"] = s.same_top.value;
    out["same_top_ci"] = interval(s.same_top);
    out["ppl"] = s.ppl;
    out["ppl_ratio"] = s.ppl_ratio.value;
    out["ppl_ratio_ci"] = interval(s.ppl_ratio);
    variants.push_back(std::move(out));
  }
  result["variants"] = std::move(variants);
  result["peak_rss_bytes"] = peak_rss_bytes();
  print_result(result, format);
  return code;
}

#else
int compare(const CompareOptions&) { requires_llama("compare"); }
#endif

}  // namespace

void add_compare(CommandLine& line) {
  Command& command = line.add("compare", "measure how far the 2-bit cache's output is from the 16-bit cache's on a text");
  const auto options = std::make_shared<CompareOptions>();
  command.usage("-m MODEL -f TEXT [options]");
  command.text(
      "Runs the model with both caches side by side over chunks of the text and compares the logits at every position from "
      "--from on (below "
      "sink + recent both read 16-bit rows). The base is OSCAR's own 16-bit mode, because any other arithmetic differs from "
      "llama.cpp's by "
      "rounding that CPU matrix products amplify: KL against mode delegate is about 0.003 at best. Never judge on the "
      "calibration text.");
  command.text(
      "KL(base || variant) in nats, from double-precision log-softmax over the whole vocabulary; 95 % intervals from a "
      "bootstrap over blocks "
      "of 64 positions.");
  command.text(
      "--variant codec=sim:NAME measures another KV quantizer, simulated inside OSCAR's cache, windows and attention: its "
      "accuracy; bits and bytes are what it would take. NAME is one of " +
      rival_names(", ") + "; NAME+mean removes the calibrated RoPE mean from K first.");
  options->host.n_ctx = 4096;
  add_host(command, options->host, "tokens of a chunk");
  command.option("-f,--file", options->text, "FILE", "text to judge on");
  command.option("--chunks", options->chunks, "N", "chunks of the text, -1 = all");
  command.option("--from", options->from, "POSITION",
                 "first position judged, 0 = 1024 or half the context, behind sink + recent", "");
  command.option("--mode-a", options->mode_a, "MODE", "base: exact, delegate, stock or oscar");
  command.option("--mode-b", options->mode_b, "MODE", "what is judged: oscar, exact, delegate or stock");
  command
      .option("--variant", options->variants, "KEY=VALUE[,...]",
              "one more contender: mode-b with these settings (codec, k_bits, v_bits, layer_bits, k_mean, v_mean, clip_k, "
              "clip_v, sink, "
              "recent, rollback, artifact, mode); repeatable")
      ->allow_extra_args(false);
  command.option("-s,--seed", options->seed, "N", "of the bootstrap");
  add_settings(command, options->settings, false);
  command.option("-o,--format", options->format, "FORMAT", "md, json or csv");
  command.example("oscar compare -m model.gguf -f essays.txt", "the standard question");
  command.example("oscar compare -m model.gguf -f essays.txt --variant k_mean=none -o json",
                  "with and without mean removal, one base");
  command.json_key("oscar, model, model_fingerprint, text, text_sha256", "what was compared");
  command.json_key("n_ctx, n_ubatch, chunks, tokens, from, positions, seed", "how");
  command.json_key("base, variants[]", "one object each: name, mode, settings, artifact_digest, ppl and the keys below");
  command.json_key("kv_bytes, kv_bytes_f16",
                   "KV cache at the end of the last chunk: resident, measured (codec sim:NAME: computed); all cells at 16 bit");
  command.json_key("bits_per_element, bits_per_element_all",
                   "coded rows alone; 16-bit windows included (16: not coded; null: no plug-in)");
  command.json_key(
      "saturated_share",
      "of all coded values, those outside the code's range: clamped, and counted (null: nothing coded, or simulated)");
  command.json_key("attention_served, attention_bypassed, pp", "operations by OSCAR; that escaped it; tokens per second");
  command.json_key("kl_mean, kl_median, kl_p99, kl_max", "variants: nats");
  command.json_key("same_top, ppl_ratio", "variants: share of equal most likely tokens; perplexity over the base's");
  command.json_key("kl_mean_ci, same_top_ci, ppl_ratio_ci", "variants: [low, high], 95 %");
  command.action([options] { return compare(*options); });
}

}  // namespace oscar::cli
