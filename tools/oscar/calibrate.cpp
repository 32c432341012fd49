// `oscar calibrate`: text through the model in capture mode -> second moments -> artifact.
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <map>
#include <set>

#include "cli.h"
#include "fit_summary.h"
#include "oscar/artifact/artifact.h"
#include "oscar/artifact/rotation_zoo.h"
#include "oscar/base/date.h"
#include "oscar/base/error.h"
#include "oscar/cache/windows.h"
#include "oscar/io/gguf.h"
#include "oscar/io/sha256.h"
#include "oscar/method/moments.h"
#include "output.h"
#include "settings.h"

#if OSCAR_WITH_LLAMA
#include "ggml.h"
#include "output_metric.h"
#include "session.h"
#endif

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;

struct CalibrateOptions {
  HostOptions host;
  std::vector<std::string> texts;
  std::string output, moments, resume, from_moments;
  std::string codec = "spectral", k_bits, v_bits, layer_bits, rotation = "per-head", k_mean, v_mean, k_objective, v_objective,
              format = "md";
  std::int64_t tokens = 32768, token_floor = 1024;
  int save_every = 0, group_size = 0;
  float clip_k = -1.0F, clip_v = -1.0F;
};

constexpr std::int64_t kRecommendedTokens = 32768;
constexpr std::size_t kFewDifferent = 200;  // 1000 tokens of prose or code have more
[[maybe_unused]] constexpr int kSaveTokens = 4096;

FitOptions fit_options(const CalibrateOptions& options) {
  FitOptions fit;
  if (options.codec != "spectral" && options.codec != "int2")
    fail("--codec is {}, but only spectral and int2 exist", options.codec);
  fit.recipe.codec = options.codec;
  Settings rates;
  rates.k_bits = options.k_bits;
  rates.v_bits = options.v_bits;
  rates.layer_bits = options.layer_bits;
  check(rates);
  set_rates(fit.recipe, given_rates(rates));
  if (options.rotation == "per-head")
    fit.recipe.per_head = true;
  else if (options.rotation == "layer")
    fit.recipe.per_head = false;
  else
    fail("--rotation is {}, but only per-head and layer exist", options.rotation);
  if (!options.k_mean.empty()) fit.recipe.k_mean = parse_mean_mode(options.k_mean);
  if (!options.v_mean.empty()) fit.recipe.v_mean = parse_mean_mode(options.v_mean);
  if (fit.recipe.v_mean == MeanMode::rope)
    fail("--v-mean rope makes no sense: values are not rotated by RoPE (none or static)");
  if (!options.k_objective.empty()) fit.recipe.k_objective = options.k_objective;
  if (!options.v_objective.empty()) fit.recipe.v_objective = options.v_objective;
  check_objective(fit.recipe.k_objective);
  check_objective(fit.recipe.v_objective);
  for (const auto& [flag, value] : {std::pair{"--clip-k", options.clip_k}, std::pair{"--clip-v", options.clip_v}}) {
    if (std::isnan(value) || value > 1.0F)
      fail("{} is {}, but it is a share of coordinates: 0 (no clipping) to 1", flag, value);
  }
  if (options.clip_k >= 0.0F) fit.recipe.clip_k = options.clip_k;
  if (options.clip_v >= 0.0F) fit.recipe.clip_v = options.clip_v;
  if (options.group_size < 0 || options.group_size % 4 != 0) fail("--group-size {} is not a multiple of 4", options.group_size);
  fit.recipe.group_size = options.group_size;
  fit.token_floor = options.token_floor;
  fit.threads = options.host.n_threads;
  return fit;
}

// "x.gguf" -> "x<suffix>", beside the model where that can be written.
fs::path beside_model(const std::string& model, const std::string& suffix, const std::string& fingerprint) {
  fs::path path = model;
  if (path.extension() == ".gguf") path.replace_extension();
  path += suffix;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (access(folder.c_str(), W_OK) == 0) return path;
  fs::create_directories(cache_dir() / "artifacts");
  return cache_dir() / "artifacts" / (fingerprint + suffix);
}

struct Run {  // what the model run cost; zero when only fitting
  double seconds = 0;
  std::int64_t tokens = 0;
  std::uint64_t peak_rss = 0;
  std::set<std::int32_t> different;  // tokens fed
  std::string ggml;                  // version that computed it
};

std::int64_t total_tokens(const ModelMoments& moments) {
  std::int64_t sum = 0;
  for (const TextSource& source : moments.sources) sum += source.tokens;
  return sum;
}

// Per layer for reading; json and csv carry every head.
std::string layer_table(const FitSummary& summary) {
  Table table(
      {"layer", "K noise %", "int2 %", "K error %", "V error %", "mean share %", "head overlap", "clip K", "clip V", "notes"});
  for (const LayerExpectation& l : summary.layers) {
    std::string notes;
    for (const WorriedHead& w : summary.worried) {
      if (w.layer == l.layer) notes += fmt::format("{}head {}: {}", notes.empty() ? "" : "; ", w.head, w.why);
    }
    table.add({l.layer, 100 * l.key_noise.value_or(0), 100 * l.key_noise_int2.value_or(0), 100 * l.k_error, 100 * l.v_error,
               100 * l.mean_share, l.head_overlap, l.clip_k, l.clip_v, notes});
  }
  return table.markdown();
}

Table head_table(const FitReport& report) {
  Table table({"layer", "head", "key_noise", "key_noise_int2", "output_energy", "k_error", "v_error", "mean_share",
               "head_overlap", "clip_k", "clip_v", "flag"});
  for (const FitReport::Row& row : report.rows) {
    table.add({row.layer, row.head, row.key_noise, row.key_noise_int2, row.output_energy, row.k_error, row.v_error,
               row.mean_share, row.head_overlap, row.clip_k, row.clip_v, row.flag});
  }
  return table;
}

std::string quoted(const std::string& word) {  // for a shell
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || std::string_view("._-+=:,@%").find(c) != std::string_view::npos;
  });
  if (plain) return word;
  std::string out = "'";
  for (const char c : word) {
    if (c == '\'') {
      out += "'\\''";
    } else {
      out += c;
    }
  }
  return out + "'";
}

// What makes this artifact again, but for the date. Moments do not depend on threads or on where a run was resumed.
std::string reproducing_command(const CalibrateOptions& o, const ModelMoments& moments) {
  const CalibrateOptions usual;
  std::string out = "oscar calibrate";
  const auto name = [](const std::string& path) { return quoted(fs::path(path).filename().string()); };
  if (o.from_moments.empty()) {
    out += " -m " + name(o.host.model);
    for (const std::string& text : o.texts) out += " -f " + name(text);
    out += fmt::format(" -n {} -c {} -ub {}", o.tokens, o.host.n_ctx, std::min(o.host.n_ubatch, o.host.n_batch));
    if (moments.sources.size() != o.texts.size()) out += " --resume " + name(o.resume);  // which holds other texts
    if (o.save_every != usual.save_every) out += fmt::format(" --save-every {}", o.save_every);
  } else {
    out += " --from-moments " + name(o.from_moments);
  }
  const auto add = [&out](const char* flag, const auto& value, const auto& normal) {
    if (value != normal) out += fmt::format(" {} {}", flag, value);
  };
  add("--codec", o.codec, usual.codec);
  add("--k-bits", o.k_bits, usual.k_bits);
  add("--v-bits", o.v_bits, usual.v_bits);
  add("--layer-bits", o.layer_bits, usual.layer_bits);
  add("--rotation", o.rotation, usual.rotation);
  add("--k-mean", o.k_mean, usual.k_mean);
  add("--v-mean", o.v_mean, usual.v_mean);
  add("--objective-k", o.k_objective, usual.k_objective);
  add("--objective-v", o.v_objective, usual.v_objective);
  add("--clip-k", o.clip_k, usual.clip_k);
  add("--clip-v", o.clip_v, usual.clip_v);
  add("--group-size", o.group_size, usual.group_size);
  add("--token-floor", o.token_floor, usual.token_floor);
  return out;
}

void record_model_file(const std::string& path, Artifact& artifact) {
  const std::optional<std::string> licence = Gguf(path).text("general.license");
  artifact.provenance["model_file"] = {{"name", fs::path(path).filename().string()},
                                       {"sha256", sha256_file(path)},
                                       {"licence", licence ? nlohmann::json(*licence) : nlohmann::json()}};
}

int finish(const ModelMoments& moments, const CalibrateOptions& options, const fs::path& output,
           const std::string& moments_path, const Run& run) {
  const Format format = parse_format(options.format);
  const std::int64_t tokens = total_tokens(moments);
  FitReport report;
  Artifact artifact = fit(moments, fit_options(options), &report);
  if (options.host.n_ctx > 0 && run.tokens > 0) artifact.provenance["n_ctx"] = options.host.n_ctx;
  if (!run.ggml.empty()) artifact.provenance["ggml"] = run.ggml;
  if (tokens < kRecommendedTokens) {
    report.warnings.push_back(fmt::format("{} tokens are few: {} or more give steadier rotations (-n, longer or more texts)",
                                          tokens, kRecommendedTokens));
  }
  if (run.tokens >= 1024 && run.different.size() < kFewDifferent) {
    report.warnings.push_back(
        fmt::format("the texts hold only {} different tokens: what they do not say is not calibrated; use varied "
                    "text",
                    run.different.size()));
  }
  const FitSummary summary = summarise(report);
  artifact.provenance["fit"] = to_json(summary);
  artifact.provenance["command"] = reproducing_command(options, moments);
  if (!options.host.model.empty()) record_model_file(options.host.model, artifact);
  save_artifact(artifact, output);
  for (const std::string& warning : report.warnings) fmt::print(stderr, "oscar: warning: {}\n", warning);
  if (format == Format::csv) {
    print(head_table(report).csv());
    return kOk;
  }
  const double rate = run.seconds > 0 ? static_cast<double>(run.tokens) / run.seconds : 0.0;
  if (format == Format::json) {
    nlohmann::ordered_json out;
    out["artifact"] = output.string();
    out["digest"] = artifact.digest;
    out["moments"] = moments_path;
    out["model_fingerprint"] = artifact.model.fingerprint;
    out["architecture"] = artifact.model.architecture;
    out["tokens"] = tokens;
    out["run_tokens"] = run.tokens;
    out["run_seconds"] = run.seconds;
    out["tokens_per_second"] = rate;
    out["peak_rss_bytes"] = run.peak_rss;
    out["recipe"] = {{"codec", artifact.recipe.codec},
                     {"k_bits", artifact.recipe.k_bits},
                     {"v_bits", artifact.recipe.v_bits},
                     {"layer_bits", to_text(artifact.recipe.layer_bits)},
                     {"k_mean", std::string(to_string(artifact.recipe.k_mean))},
                     {"v_mean", std::string(to_string(artifact.recipe.v_mean))},
                     {"k_objective", artifact.recipe.k_objective},
                     {"v_objective", artifact.recipe.v_objective},
                     {"rotation", artifact.recipe.per_head ? "per-head" : "layer"},
                     {"group_size", artifact.recipe.group_size}};
    out["sources"] = nlohmann::ordered_json::array();
    for (const TextSource& source : moments.sources) {
      out["sources"].push_back({{"name", source.name}, {"sha256", source.sha256}, {"tokens", source.tokens}});
    }
    out["heads"] = head_table(report).json();
    out["warnings"] = report.warnings;
    out["verdict"] = report.verdict;
    out["advised_layer_bits"] = to_text(report.advised_layer_bits);
    print(out.dump(1) + "\n");
    return kOk;
  }
  print(layer_table(summary));
  print(fmt::format("\nverdict: {}\n", report.verdict));
  print(fmt::format("\n{}: {} layers, {} tokens, digest {}\n", output.string(), artifact.layers.size(), tokens,
                    artifact.digest.substr(0, 16)));
  if (run.tokens > 0) {
    print(fmt::format("{} tokens in {} ({:.1f} t/s), peak RSS {}; moments kept in {} (oscar merge, --from-moments)\n",
                      run.tokens, human_seconds(run.seconds), rate, human_bytes(static_cast<double>(run.peak_rss)),
                      moments_path));
  }
  return kOk;
}

int fit_only(const CalibrateOptions& options) {
  const ModelMoments moments = load_moments(options.from_moments);
  fs::path output = options.output;
  if (!options.host.model.empty()) {
    const GgufModel model = describe_model(Gguf(options.host.model));
    if (model.fingerprint != moments.model_fingerprint) {
      fail("{} holds moments of another model ({}), not of {}", options.from_moments, moments.model_name, options.host.model);
    }
    if (output.empty()) output = beside_model(options.host.model, ".oscar.safetensors", model.fingerprint);
  }
  if (output.empty()) fail("where should the artifact go? use -o FILE, or -m MODEL to put it beside the model");
  return finish(moments, options, output, options.from_moments, {});
}

#if OSCAR_WITH_LLAMA

// One text, cut into sequences; sequences never straddle texts.
struct Source {
  TextSource info;  // tokens: fed so far
  std::vector<llama_token> tokens;
  std::size_t next = 0;  // first token not fed yet
};

Source open_source(const Model& model, const std::string& path, std::int64_t wanted) {
  Source source;
  std::string text = read_text(path);
  source.info = {fs::path(path).filename().string(), sha256_hex(std::as_bytes(std::span(text))), 0};
  // No tokeniser spends more than 16 bytes a token on average: a huge text need not be tokenised whole.
  const auto limit = static_cast<std::size_t>(wanted) * 16 + 65536;
  if (text.size() > limit) {
    std::size_t end = limit;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
    text.resize(end);
  }
  source.tokens = model.tokenize(text, false, false);
  return source;
}

class Calibration {
 public:
  Calibration(const CalibrateOptions& options, fs::path moments_path)
      : options_(options), moments_path_(std::move(moments_path)), description_(describe_model(Gguf(options.host.model))) {}

  // The moments are in the file afterwards, and nothing of the run is left in memory.
  void collect(Run& run) {
    run_model(run);
    Plugin::capture_end();
  }

 private:
  void run_model(Run& run) {
    std::vector<TextSource> done;
    if (!options_.resume.empty()) done = resumed_sources();
    Plugin::start(true, options_.host.verbose);
    const Model model(options_.host);
    for (const std::string& path : options_.texts) sources_.push_back(open_source(model, path, options_.tokens));
    // Tokens an earlier run fed are skipped; texts it used and this one does not name stay in the record.
    for (const TextSource& old : done) {
      const auto same =
          std::find_if(sources_.begin(), sources_.end(), [&](const Source& s) { return s.info.sha256 == old.sha256; });
      if (same == sources_.end()) {
        others_.push_back(old);
      } else {
        same->info.tokens = old.tokens;
        same->next = std::min(same->tokens.size(), static_cast<std::size_t>(old.tokens));
      }
      fed_ += old.tokens;
    }
    Plugin::configure({{"mode", "capture"}, {"strict", 1}});
    Plugin::capture_begin(model_json(), options_.resume);
    give_output_metrics();
    HostOptions host = options_.host;
    host.n_batch = host.n_ubatch = std::min(host.n_ubatch, host.n_batch);
    Context context(model, host);
    watch_interrupts();
    // llama.cpp rounds the context up, and a batch down to the context that was asked for.
    feed(model, context, std::min(host.n_ubatch, static_cast<int>(llama_n_batch(context.get()))), run);
    if (run.tokens > 0) {
      checkpoint();
    } else if (fs::path(options_.resume) != moments_path_) {
      fs::copy_file(options_.resume, moments_path_, fs::copy_options::overwrite_existing);
    }
    run.peak_rss = peak_rss_bytes();
    run.ggml = ggml_version();
  }

  void give_output_metrics() const {
    const Gguf file(options_.host.model);
    std::vector<int> missing;
    for (const LayerShape& shape : description_.layers) {
      const std::vector<float> metric = output_metric(file, shape);
      if (metric.empty()) {
        missing.push_back(shape.layer);
      } else {
        Plugin::capture_output_metric(shape.layer, metric);
      }
    }
    if (missing.empty()) return;
    fmt::print(stderr,
               "oscar: note: no output projection was found for layers {}: their values count alike in every direction\n",
               fmt::join(missing, ", "));
  }

  std::vector<TextSource> resumed_sources() const {
    const ModelMoments moments = load_moments(options_.resume);
    if (moments.model_fingerprint != description_.fingerprint) {
      fail("{} holds moments of another model ({}), not of {}", options_.resume, moments.model_name, options_.host.model);
    }
    return moments.sources;
  }

  nlohmann::json sources_json() const {
    nlohmann::json sources = nlohmann::json::array();
    for (const TextSource& s : all_sources()) sources.push_back({{"name", s.name}, {"sha256", s.sha256}, {"tokens", s.tokens}});
    return sources;
  }

  nlohmann::json model_json() const {
    return {{"fingerprint", description_.fingerprint},
            {"architecture", description_.architecture},
            {"name", description_.name},
            {"n_layer", description_.n_layer},
            {"sources", sources_json()}};
  }

  std::vector<TextSource> all_sources() const {
    std::vector<TextSource> all = others_;
    for (const Source& source : sources_) all.push_back(source.info);
    return all;
  }

  // The text that has been used least, so that every text counts alike and the order does not depend on where a run stopped.
  Source* pick() {
    Source* best = nullptr;
    for (Source& source : sources_) {
      if (source.next < source.tokens.size() && (best == nullptr || source.info.tokens < best->info.tokens)) best = &source;
    }
    return best;
  }

  void feed(const Model& model, Context& context, int step, Run& run) {
    const bool bos = llama_vocab_get_add_bos(model.vocab());
    const std::int64_t already = fed_;
    std::int64_t available = fed_;
    for (const Source& source : sources_) available += static_cast<std::int64_t>(source.tokens.size() - source.next);
    const std::int64_t target = std::min(options_.tokens, available);
    constexpr std::int64_t kWarmUp = CollectorConfig().warmup_tokens;
    const std::int64_t sequences = (target + context.n_ctx() - 1) / context.n_ctx();
    if (const std::int64_t counted = target - sequences * kWarmUp; counted < options_.token_floor) {
      fail(
          "{} tokens are to be read, of which {} count (not the first {} of a sequence), and the floor is {}: {} (or "
          "--token-floor)",
          target, counted, kWarmUp, options_.token_floor,
          available < options_.tokens ? "use longer or more texts" : "raise -n");
    }
    if (available < options_.tokens)
      fmt::print(stderr, "oscar: warning: the texts give {} tokens of the {} wanted\n", available, options_.tokens);
    if (already >= target) {
      fmt::print(stderr, "oscar: note: {} holds {} tokens already; nothing is left to read\n", options_.resume, already);
      return;
    }
    Progress progress("calibrating", static_cast<double>(target - already), "tokens");
    // Moments begin anew after each save (their pilot too), so sequences that are short are saved several at a time.
    const int save_every =
        options_.save_every > 0 ? options_.save_every : (kSaveTokens + context.n_ctx() - 1) / context.n_ctx();
    int since_save = 0;
    while (fed_ < target) {
      Source* source = pick();
      if (source == nullptr) break;
      const std::int64_t room = std::min<std::int64_t>(context.n_ctx() - (bos ? 1 : 0), target - fed_);
      const auto take = std::min(static_cast<std::size_t>(room), source->tokens.size() - source->next);
      std::vector<llama_token> sequence;
      if (bos) sequence.push_back(llama_vocab_bos(model.vocab()));
      const auto begin = source->tokens.begin() + static_cast<std::ptrdiff_t>(source->next);
      sequence.insert(sequence.end(), begin, begin + static_cast<std::ptrdiff_t>(take));
      context.clear();
      Plugin::capture_sequence();
      const int n = static_cast<int>(sequence.size());
      for (int at = 0; at < n; at += step) {
        if (interrupted()) stop(progress);
        const std::vector<llama_token> part(sequence.begin() + at, sequence.begin() + std::min(n, at + step));
        run.seconds += context.decode(part, at, n - 1);
        run.tokens += static_cast<std::int64_t>(part.size());
        run.different.insert(part.begin(), part.end());
        progress.update(static_cast<double>(std::min(target, fed_ + at + static_cast<std::int64_t>(part.size())) - already));
      }
      source->next += take;
      source->info.tokens += static_cast<std::int64_t>(take);
      fed_ += static_cast<std::int64_t>(take);
      if (++since_save >= save_every && fed_ < target) {
        checkpoint();
        since_save = 0;
      }
    }
  }

  // Whole sequences only, so that going on from the file equals never having stopped.
  void checkpoint() {
    Plugin::capture_sources(sources_json());  // what was really fed, known only now
    Plugin::capture_save(moments_path_.string());
    saved_ = fed_;
  }

  [[noreturn]] void stop(Progress& progress) {
    progress.finish();
    if (saved_ == 0) fail("interrupted before the first sequence was complete; nothing is saved");
    fail("interrupted; {} tokens are saved, go on with the same command and --resume {}", saved_, moments_path_.string());
  }

  const CalibrateOptions& options_;
  fs::path moments_path_;
  GgufModel description_;
  std::vector<Source> sources_;
  std::vector<TextSource> others_;
  std::int64_t fed_ = 0, saved_ = 0;
};

int calibrate(CalibrateOptions options) {
  parse_format(options.format);
  fit_options(options);
  if (!options.from_moments.empty()) return fit_only(options);
  utc_date();  // a wrong SOURCE_DATE_EPOCH is worth a word before an hour of work
  check(options.host);
  if (options.texts.empty()) fail("no text was named: use -f TEXT (prose or code like what the model will read)");
  if (options.tokens < 1) fail("-n {} makes no sense: a number of tokens", options.tokens);
  constexpr Windows kWindows;
  if (const int least = kWindows.sink + kWindows.recent + 192; options.host.n_ctx < least)
    fail("-c {} is too short: only keys older than {} tokens are ever coded, use -c {} or more", options.host.n_ctx,
         kWindows.recent, least);
  const GgufModel model = describe_model(Gguf(options.host.model));
  check_layer_bits(fit_options(options).recipe, model.layers);
  const fs::path output = options.output.empty() ? beside_model(options.host.model, ".oscar.safetensors", model.fingerprint)
                                                 : fs::path(options.output);
  fs::path moments_path = options.moments;
  if (moments_path.empty()) {
    moments_path = output.string();
    const std::string suffix = ".oscar.safetensors";
    std::string stem = moments_path.string();
    if (stem.size() > suffix.size() && stem.compare(stem.size() - suffix.size(), suffix.size(), suffix) == 0) {
      stem.resize(stem.size() - suffix.size());
    }
    moments_path = stem + ".moments.safetensors";
  }
  check_writable(output.string());
  check_writable(moments_path.string());
  Run run;
  Calibration(options, moments_path).collect(run);
  return finish(load_moments(moments_path.string()), options, output, moments_path.string(), run);
}

#else
int calibrate(const CalibrateOptions& options) {
  parse_format(options.format);
  fit_options(options);
  if (!options.from_moments.empty()) return fit_only(options);
  requires_llama("calibrate");
}
#endif

}  // namespace

void add_calibrate(CommandLine& line) {
  Command& command = line.add("calibrate", "make the calibration artifact of a model from text");
  const auto options = std::make_shared<CalibrateOptions>();
  command.usage("-m MODEL -f TEXT [-f TEXT ...] [options]");
  command.usage("--from-moments FILE [-m MODEL | -o OUT] [options]");
  command.text(
      "Runs the model over the text once (stock attention, no weights changed), collects second moments of keys, values and "
      "queries per layer "
      "and KV head in constant memory, how strongly the layer's output answers key errors, and fits "
      "transforms, rotations, means and widths for both codecs. The artifact goes beside the model as "
      "MODEL.oscar.safetensors, where run, compare and exec find it; it fits every quantisation of the same weights.");
  command.text(
      "Moments are saved as it goes, next to the output. Ctrl-C stops; --resume FILE goes on where it stopped. Moments of "
      "several "
      "runs or machines add up with oscar merge, and --from-moments fits again without running the model.");
  command.text(
      "The table shows per layer: what coded keys are expected to add to the output of attention, relative to that output (K "
      "noise; "
      "beside it the same for codec int2), the relative error of logits (K) and values (V), how much of K's energy is its "
      "mean, how "
      "far the heads share their main axes (near 1: one rotation per layer would do), clip thresholds of int2, and notes on "
      "worrying "
      "heads. The last line is a verdict; where single layers need more bits it says with which --layer-bits (of run, exec and "
      "the others, or given here with --from-moments, which writes it into the artifact).");
  options->host.n_ctx = 4096;
  add_host(command, options->host, "length of a sequence");
  command.option("-f,--file", options->texts, "FILE", "text to calibrate on; repeatable, texts take turns")
      ->allow_extra_args(false);
  command.option("-n,--tokens", options->tokens, "N", "tokens in all");
  command.option("-o,--output", options->output, "FILE", "artifact to write; default: beside the model");
  command.option("--moments", options->moments, "FILE", "moments to write; default: OUTPUT with .moments.safetensors");
  command.option("--save-every", options->save_every, "N", "save moments every N sequences, 0 = about every 4096 tokens");
  command.option("--resume", options->resume, "FILE", "go on from these moments");
  command.option("--from-moments", options->from_moments, "FILE", "only fit; the model is not run");
  command.option("--codec", options->codec, "NAME", "codec the artifact asks for: spectral (default) or int2; it holds both");
  add_rates(command, options->k_bits, options->v_bits, options->layer_bits, "2", "none");
  command.option("--rotation", options->rotation, "WHICH", "one rotation per-head or per layer");
  command.option("--k-mean", options->k_mean, "MODE", "mean removed from K: rope (default), static or none", "OSCAR_K_MEAN");
  command.option("--v-mean", options->v_mean, "MODE", "mean removed from V: none (default) or static", "OSCAR_V_MEAN");
  command.option("--clip-k", options->clip_k, "RATIO", "clip ratio of K instead of the fitted one, 0 = off (published: 0.96)");
  command.option("--clip-v", options->clip_v, "RATIO", "clip ratio of V instead of the fitted one, 0 = off (published: 0.92)");
  command.option("--objective-k", options->k_objective, "NAME",
                 "MOMENT_COMPOSITION of K, for example qqt_r_h_pbr (default) or ktk_r_h");
  command.option("--objective-v", options->v_objective, "NAME",
                 "MOMENT_COMPOSITION of V, for example sst_r_h_pbr (default) or oot_r_h_pbr");
  command.option("--group-size", options->group_size, "N", "coordinates that share a scale, 0 = the whole head");
  command.option("--token-floor", options->token_floor, "N", "refuse to fit on fewer tokens");
  command.option("--format", options->format, "FORMAT", "of the table: md, json or csv");
  command.example("oscar calibrate -m model.gguf -f prose.txt -f code.txt", "32k tokens, half prose, half code");
  command.example("oscar calibrate -m model.gguf -f prose.txt --resume model.moments.safetensors", "go on after Ctrl-C");
  command.example("oscar calibrate -m model.gguf --from-moments model.moments.safetensors --rotation layer",
                  "another recipe, seconds");
  command.json_key("artifact, digest, moments", "files written; the artifact's SHA-256 digest");
  command.json_key("model_fingerprint, architecture, sources[]", "what was calibrated, on what: {name, sha256, tokens}");
  command.json_key("tokens, run_tokens, run_seconds, tokens_per_second, peak_rss_bytes",
                   "in all; by this run (0: only fitted)");
  command.json_key("recipe",
                   "{codec, k_bits, v_bits, layer_bits, k_mean, v_mean, k_objective, v_objective, rotation, group_size}");
  command.json_key("heads[]",
                   "{layer, head, key_noise, key_noise_int2, output_energy (squares at the layer's output), k_error, v_error, "
                   "mean_share, head_overlap, clip_k, clip_v, flag}; shares, not percent");
  command.json_key("warnings[], verdict", "sentences");
  command.json_key("advised_layer_bits", "the --layer-bits of the verdict: what is needed so that no layer is noisy");
  command.action([options] { return calibrate(*options); });
}

}  // namespace oscar::cli
