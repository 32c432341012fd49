// `oscar bench`: how fast attention and whole models are with the 2-bit cache, beside stock llama.cpp's own caches.
#include <algorithm>
#include <charconv>

#include "bench_layer.h"
#include "cli.h"
#include "machine.h"
#include "oscar/attention/attention.h"
#include "oscar/base/error.h"
#include "oscar/version.h"
#include "output.h"
#include "settings.h"

#if OSCAR_WITH_LLAMA
#include <fstream>
#include <memory>
#include <set>
#include <thread>

#include "bench_kernel.h"
#include "bench_model.h"
#include "bench_report.h"
#include "bench_runs.h"
#include "oscar/base/date.h"
#include "oscar/io/files.h"
#include "program.h"
#include "session.h"
#endif

namespace oscar::cli {

extern const char* const kCommit;  // written at build time, cmake/commit.cmake

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;
// Attention outputs of ours and of f16 that differ by more are not of the same rows: two unrelated ones differ by 1.41.
constexpr double kMostDifference = 1.0;

struct BenchOptions {
  bool list = false, kernel = false, quick = false, hot = false, no_rope_mean = false, allow_noisy = false;
  std::vector<std::string> models;
  std::string depths, shapes = "12/2/128,14/2/64,9/3/64", operations = "decode,prefill,append", stock = "f16,q8_0,q4_0", filter;
  std::string artifact, llama_bench, codec = "spectral";
  std::string format = "md", json;
  int threads = 0, n_prompt = 512, n_gen = 32, sink = Windows{}.sink, recent = Windows{}.recent;
  int runs = 0, stock_runs = 0;
  double budget = 0, max_load = 0.1, max_spread = 0.25;
};

std::vector<std::string> split_words(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, comma - begin));
    begin = comma + 1;
  }
  return words;
}

std::vector<std::int64_t> parse_depths(const std::string& text) {
  std::vector<std::int64_t> depths;
  for (const std::string& word : split_words(text)) {
    std::int64_t depth = -1;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), depth);
    if (error != std::errc{} || end != word.data() + word.size() || depth < 0 || depth > kMostTokens)
      fail("-d {} makes no sense: numbers of tokens from 0 to {}, with commas between them", text, kMostTokens);
    depths.push_back(depth);
  }
  return depths;
}

struct KernelCase {
  std::string operation;  // "decode", "prefill", "append"
  AttentionShape shape;
  std::int64_t depth = 0;
  int tokens = 1;
  [[nodiscard]] std::string name() const {
    return fmt::format("{} {} {} tokens at {}", operation, to_text(shape), tokens, depth);
  }
};

struct ModelCase {
  std::string model;
  std::int64_t depth = 0;
};

struct Plan {
  std::vector<KernelCase> kernel;  // those of one shape and depth one after another, those of one token first
  std::vector<ModelCase> models;
  std::vector<std::string> contenders{"ours"};
};

void check(const BenchOptions& o) {
  if (o.threads < 0 || o.threads > 512) fail("-t {} makes no sense: 0 (all processors) to 512", o.threads);
  if (o.n_prompt < 2 || o.n_prompt > 8192) fail("-p {} makes no sense: 2 to 8192 tokens", o.n_prompt);
  if (o.n_gen < 1 || o.n_gen > 8192) fail("-n {} makes no sense: 1 to 8192 tokens", o.n_gen);
  if (o.sink < 0) fail("--sink {} makes no sense: it counts tokens", o.sink);
  if (o.recent < 0) fail("--recent {} makes no sense: it counts tokens", o.recent);
  if (o.runs < 0 || o.runs > 1000) fail("-r {} makes no sense: 1 to 1000 runs", o.runs);
  if (o.stock_runs < 0) fail("--stock-runs {} makes no sense: at least 1", o.stock_runs);
  if (o.budget < 0) fail("--budget {} makes no sense: it is a number of seconds", o.budget);
  if (!(o.max_load > 0)) fail("--max-load {} makes no sense: a number of processors above 0", o.max_load);
  if (!(o.max_spread > 0)) fail("--max-spread {} makes no sense: a share above 0", o.max_spread);
}

Plan make_plan(const BenchOptions& o) {
  Plan plan;
  if (o.stock != "none") {
    for (const std::string& type : split_words(o.stock)) {
      if (type != "f16" && type != "q8_0" && type != "q4_0")
        fail("--stock {} makes no sense: f16, q8_0 and q4_0 with commas between them, or none", o.stock);
      if (std::find(plan.contenders.begin(), plan.contenders.end(), type) != plan.contenders.end())
        fail("--stock names {} twice", type);
      plan.contenders.push_back(type);
    }
  }
  std::vector<std::string> operations = split_words(o.operations);
  for (const std::string& operation : operations) {
    if (operation != "decode" && operation != "prefill" && operation != "append")
      fail("there is no operation \"{}\" to measure: decode, prefill and append, with commas between them", operation);
  }
  const auto wanted = [&](const char* name) {
    return std::find(operations.begin(), operations.end(), name) != operations.end();
  };
  if (o.kernel || o.models.empty()) {
    for (const std::string& text : split_words(o.shapes)) {
      const AttentionShape shape = parse_shape(text);
      for (const std::int64_t depth : parse_depths(!o.depths.empty() ? o.depths : o.quick ? "2048,8192" : "2048,8192,32768")) {
        for (const int tokens : {1, o.n_prompt}) {
          const char* attention = tokens == 1 ? "decode" : "prefill";
          for (const char* operation : {attention, "append"}) {
            const KernelCase c{operation, shape, depth, tokens};
            if (wanted(operation) && c.name().find(o.filter) != std::string::npos) plan.kernel.push_back(c);
          }
        }
      }
    }
  }
  for (const std::string& model : o.models) {
    for (const std::int64_t depth : parse_depths(!o.depths.empty() ? o.depths : o.quick ? "0,2048" : "0,2048,8192")) {
      plan.models.push_back({model, depth});
    }
  }
  if (plan.kernel.empty() && plan.models.empty())
    fail("--filter \"{}\" leaves nothing to measure (--list shows the cases)", o.filter);
  return plan;
}

int list_cases(const Plan& plan) {
  std::string out = "instruction sets usable here, the one in use first:\n";
  out += fmt::format("  {}\n", cpu_path());
  for (const std::string_view path : cpu_paths()) {
    if (path != cpu_path()) out += fmt::format("  {}\n", path);
  }
  out += fmt::format("cases, each with {}:\n", fmt::join(plan.contenders, ", "));
  for (const KernelCase& c : plan.kernel) out += fmt::format("  {}\n", c.name());
  for (const ModelCase& c : plan.models) out += fmt::format("  {} at {}\n", c.model, c.depth);
  print(out);
  return kOk;
}

#if OSCAR_WITH_LLAMA

using Json = nlohmann::ordered_json;

// One line on stderr per case, with the time left by the weights of what is still to do.
class Steps {
 public:
  explicit Steps(double total) : total_(total) {}
  void begin(const std::string& name) const {
    const double elapsed = std::chrono::duration<double>(Clock::now() - start_).count();
    const std::string left =
        done_ > 0 ? fmt::format(", about {} left", human_seconds(elapsed / done_ * (total_ - done_))) : std::string();
    fmt::print(stderr, "oscar: {:3.0f} %{}: {}\n", total_ > 0 ? 100 * done_ / total_ : 0.0, left, name);
  }
  void end(double weight) { done_ += weight; }

 private:
  using Clock = std::chrono::steady_clock;
  double total_, done_ = 0;
  Clock::time_point start_ = Clock::now();
};

class Bench {
 public:
  Bench(BenchOptions options, Plan plan) : o_(std::move(options)), plan_(std::move(plan)), steps_(total_weight()) {
    limits_.runs = o_.runs;
    limits_.stock_runs = o_.stock_runs;
    limits_.budget = o_.budget;
    limits_.max_load = o_.max_load;
    limits_.max_spread = o_.max_spread;
  }

  Json run() {
    check_models();
    Plugin::start(false, false);
    require_quiet();
    Json machine = describe();
    rows_ = Json::array();
    run_kernels();
    for (const ModelCase& c : plan_.models) run_model(c);
    machine["load_after"] = load_average();
    return {{"machine", machine}, {"date", utc_date()}, {"rows", rows_}, {"left_out", left_out_}};
  }

 private:
  // Seconds, roughly: only their proportions matter.
  [[nodiscard]] double weight(const KernelCase& c) const {
    const double pairs = static_cast<double>(c.tokens) * static_cast<double>(c.depth + c.tokens) * c.shape.n_head * c.shape.dim;
    const double once = c.operation == "append" ? 0.002 : 0.01 + 4e-10 * pairs * static_cast<double>(plan_.contenders.size());
    return 0.5 + o_.runs * std::max(once, 0.5);
  }
  [[nodiscard]] double weight(const ModelCase& c) const {
    return o_.runs * static_cast<double>(plan_.contenders.size()) * (5 + 0.02 * static_cast<double>(c.depth));
  }
  [[nodiscard]] double total_weight() const {
    double sum = 0;
    for (const KernelCase& c : plan_.kernel) sum += weight(c);
    for (const ModelCase& c : plan_.models) sum += weight(c);
    return sum;
  }

  // Before anything is measured: what every model needs.
  void check_models() {
    if (plan_.models.empty()) return;
    llama_bench_ = find_llama_bench();
    Settings settings;
    settings.artifact = o_.artifact;
    for (const std::string& model : o_.models) {
      if (!std::filesystem::is_regular_file(model)) fail("there is no model file {}", model);
      artifacts_[model] = resolve_artifact(settings, model);
    }
  }

  [[nodiscard]] std::filesystem::path find_llama_bench() const {
    if (!o_.llama_bench.empty()) return find_program(o_.llama_bench);
    std::filesystem::path beside = library_folder() / "llama-bench";
    if (std::filesystem::is_regular_file(beside)) return beside;
    try {
      return find_program("llama-bench");
    } catch (const Error&) {
      fail("llama-bench is neither in {} nor in PATH: build that target of llama.cpp, or name the program with --llama-bench",
           beside.parent_path().string());
    }
  }

  void require_quiet() const {
    if (o_.allow_noisy) return;
    const Bystanders bystanders;
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const double load = bystanders.processors();
    if (load > o_.max_load) {
      fail("other programs use {:.2f} processors (limit {}, --max-load): wait until the machine is quiet, or use --allow-noisy",
           load, o_.max_load);
    }
  }

  [[nodiscard]] Json describe() const {
    const Machine m = this_machine();
    return {{"cpu", m.cpu},
            {"processors", m.processors},
            {"ghz", core_hertz() * 1e-9},
            {"last_cache_bytes", m.last_cache_bytes},
            {"load", load_average()},
            {"threads", o_.threads},
            {"isa", cpu_path()},
            {"version", version()},
            {"commit", kCommit},
            {"ggml", ggml_version()},
            {"cold", !o_.hot},
            {"codec", o_.codec},
            {"rope_mean", !o_.no_rope_mean},
            {"sink", o_.sink},
            {"recent", o_.recent}};
  }

  void add(BenchRow row, const std::string& name) {
    if (!row.runs.noise.empty() && !o_.allow_noisy) {
      left_out_.push_back({{"what", name}, {"why", row.runs.noise}});
      fmt::print(stderr, "oscar:   {} is left out: {}\n", name, row.runs.noise);
      return;
    }
    rows_.push_back(to_json(row));
    const Json& last = rows_.back();
    const Json& ratio = last["ratio_f16"];
    fmt::print(stderr, "oscar:   {} {:.4g} {}{}\n", row.what, last["ours"].get<double>(), last["unit"].get<std::string>(),
               ratio.is_null() ? "" : fmt::format(", {:.2f} times f16", ratio["median"].get<double>()));
  }

  void run_kernels() {
    if (plan_.kernel.empty()) return;
    GgmlThreads threads(o_.threads, !o_.hot);
    std::unique_ptr<KernelWorld> world;
    const KernelCase* of_world = nullptr;
    for (const KernelCase& c : plan_.kernel) {
      steps_.begin(c.name());
      if (of_world == nullptr || of_world->depth != c.depth || to_text(of_world->shape) != to_text(c.shape)) {
        world.reset();  // before the next one takes memory
        world = make_world(threads, c);
        of_world = &c;
      }
      run_kernel(*world, c);
      steps_.end(weight(c));
    }
  }

  [[nodiscard]] std::unique_ptr<KernelWorld> make_world(GgmlThreads& threads, const KernelCase& c) const {
    KernelSetup setup;
    setup.shape = c.shape;
    setup.depth = c.depth;
    setup.n_tokens = o_.n_prompt;
    setup.codec = o_.codec;
    setup.rope_mean = !o_.no_rope_mean;
    setup.windows.sink = o_.sink;
    setup.windows.recent = o_.recent;
    for (std::size_t i = 1; i < plan_.contenders.size(); ++i) setup.stock.push_back(contender(i));
    Progress progress(fmt::format("  {} caches of {}", plan_.contenders.size(), c.depth), static_cast<double>(c.depth),
                      "tokens");
    return std::make_unique<KernelWorld>(threads, setup,
                                         [&](double share) { progress.update(share * static_cast<double>(c.depth)); });
  }

  [[nodiscard]] Contender contender(std::size_t i) const {
    const std::string& name = plan_.contenders[i];
    return name == "ours"   ? Contender::ours
           : name == "f16"  ? Contender::f16
           : name == "q8_0" ? Contender::q8_0
                            : Contender::q4_0;
  }

  void run_kernel(KernelWorld& world, const KernelCase& c) {
    const bool append = c.operation == "append";
    world.prepare(append ? (c.tokens == 1 ? KernelOperation::append_one : KernelOperation::append)
                         : (c.tokens == 1 ? KernelOperation::decode : KernelOperation::prefill));
    for (std::size_t i = 0; i < plan_.contenders.size(); ++i) world.warm_up(contender(i));
    const double hertz = core_hertz();
    BenchRow row;
    row.what = c.operation;
    row.shape = to_text(c.shape);
    row.tokens = c.tokens;
    row.depth = c.depth;
    row.contenders = plan_.contenders;
    row.runs = take_runs(
                   limits_, plan_.contenders.size(), 1,
                   [&](std::size_t i) { return std::vector<double>{1e6 * world.measure(contender(i))}; }, count_bystanders)
                   .front();
    row.cycles = 1e-6 * *median_of(row.runs, 0) * o_.threads * hertz / world.work();
    const bool with_f16 = std::find(plan_.contenders.begin(), plan_.contenders.end(), "f16") != plan_.contenders.end();
    if (const double difference = append || !with_f16 ? 0 : world.difference(); !(difference < kMostDifference)) {
      fail("{}: the outputs of ours and f16 differ by {:.2f} of their length: they did not attend to the same rows", c.name(),
           difference);
    }
    add(std::move(row), c.name());
  }

  void run_model(const ModelCase& c) {
    const std::string name = fmt::format("{} at depth {}", std::filesystem::path(c.model).filename().string(), c.depth);
    steps_.begin(name);
    ModelBench bench;
    bench.llama_bench = llama_bench_;
    bench.model = c.model;
    bench.artifact = artifacts_[c.model];
    bench.threads = o_.threads;
    bench.depth = c.depth;
    bench.n_prompt = o_.n_prompt;
    bench.n_gen = o_.n_gen;
    std::vector<Runs> runs = take_runs(
        limits_, plan_.contenders.size(), 2,
        [&](std::size_t i) {
          const ModelSpeed speed = measure_model(bench, plan_.contenders[i]);
          return std::vector<double>{speed.decode, speed.prefill};
        },
        count_bystanders);
    for (const bool decode : {true, false}) {
      BenchRow row;
      row.tokens = decode ? o_.n_gen : o_.n_prompt;
      row.what = fmt::format("{}{}", decode ? "tg" : "pp", row.tokens);
      row.model = std::filesystem::path(c.model).filename().string();
      row.depth = c.depth;
      row.rate = true;
      row.contenders = plan_.contenders;
      row.runs = std::move(runs[decode ? 0 : 1]);
      add(std::move(row), fmt::format("{} of {}", decode ? "tg" : "pp", name));
    }
    steps_.end(weight(c));
  }

  BenchOptions o_;
  Plan plan_;
  RunLimits limits_;
  Steps steps_;
  std::filesystem::path llama_bench_;
  std::map<std::string, std::string> artifacts_;
  Json rows_;
  Json left_out_ = Json::array();  // cases too noisy to report
};

int run_bench(BenchOptions options, Plan plan) {
  const Format format = parse_format(options.format);
  if (!options.json.empty()) check_writable(options.json);
  if (options.threads == 0) options.threads = this_machine().processors;
  if (options.runs == 0) options.runs = options.quick ? 3 : 7;
  if (options.stock_runs == 0) options.stock_runs = options.quick ? 1 : 3;
  if (options.budget == 0) options.budget = options.quick ? 10 : 60;
  const std::string file = options.json;
  const Json result = Bench(std::move(options), std::move(plan)).run();
  if (!file.empty()) {
    AtomicFile out(file);
    out.write(result.dump(1) + "\n");
    out.commit();
  }
  const Table table = bench_table(result["rows"]);
  if (format == Format::json) {
    print(result.dump(1) + "\n");
  } else if (format == Format::csv) {
    print(table.csv());
  } else {
    print(fmt::format("{}\n\n{}", bench_head(result["machine"]), table.markdown()));
  }
  if (const Json& left_out = result["left_out"]; !left_out.empty()) {
    fail(
        "{} of {} cases were too noisy and are left out (named above and under left_out in the JSON): wait until the machine "
        "is "
        "quiet, or use --allow-noisy to print them with a mark",
        left_out.size(), left_out.size() + result["rows"].size());
  }
  return kOk;
}

#else
int run_bench(const BenchOptions&, const Plan&) { requires_llama("bench"); }
#endif

int bench(const BenchOptions& options) {
  check(options);
  const Plan plan = make_plan(options);
  return options.list ? list_cases(plan) : run_bench(options, plan);
}

}  // namespace

void add_bench(CommandLine& line) {
  Command& command =
      line.add("bench", "how fast attention and models are with the 2-bit cache, beside stock llama.cpp's caches");
  const auto options = std::make_shared<BenchOptions>();
  command.usage("[--kernel] [-m MODEL ...] [options]");
  command.text(
      "Without a model (or with --kernel): single operations on one made-up layer. Attention of 1 token (decode) and of -p "
      "tokens "
      "(prefill) behind -d tokens, with the default codec, 16-bit windows, RoPE means, transforms and merge, beside "
      "llama.cpp's "
      "own FLASH_ATTN_EXT on f16, q8_0 and q4_0 rows; and append, coding and storing K and V of 1 and of -p tokens, beside its "
      "SET_ROWS. All are nodes of ggml graphs, run by the same ggml threads of this process, ours as custom operations like "
      "the "
      "plug-in's; only the node is timed. Data are cold for all: before each operation the threads read a buffer twice as "
      "large "
      "as the last cache (as a model's weights pass between two visits to a layer), and operations take turns over 4 layers, "
      "fewer where their f16 caches would exceed 512 MiB. The books of a batch, once for all layers, are not in it.");
  command.text(
      "With -m: whole models, through an unmodified llama-bench that runs by itself for f16, q8_0 and q4_0 (-fa 1 -ctk -ctv) "
      "and "
      "inside `oscar exec` for ours; pp of -p and tg of -n tokens behind -d tokens.");
  command.text(
      "A run measures every cache once, in turn; ratios are formed inside runs (above 1: ours is faster) and given as median, "
      "minimum and maximum. Runs during which other programs used more than --max-load processors (/proc/stat) are taken "
      "again. "
      "When too few stay undisturbed, or the ratios to f16 spread over more than --max-spread of their median, the case is "
      "left out and the command ends with an error after the figures of the others, unless --allow-noisy is given, which marks "
      "disturbed figures instead. Quantised stock caches, which are slow, take part in --stock-runs runs only.");
  command.flag("--kernel", options->kernel, "single operations, also when there is a model");
  command.option("-m,--model", options->models, "FILE", "model, GGUF, calibrated; repeatable")->allow_extra_args(false);
  command.option("--oscar", options->artifact, "FILE", "calibration artifact; default: as exec finds it", "OSCAR_ARTIFACT");
  command.option("--llama-bench", options->llama_bench, "PROGRAM",
                 "default: the one beside the libraries this command was linked with, else from PATH");
  command.flag(
      "--list", options->list,
      "print usable instruction sets (OSCAR_CPU forces one; OSCAR_ARITHMETIC=float decodes every code) and the cases, and end");
  command.flag("--quick", options->quick, "fewer depths and runs: minutes");
  command.option("-d,--depth", options->depths, "N[,...]",
                 "tokens in the cache before; default: 2048,8192,32768 (--quick: 2048,8192), models 0,2048,8192 (0,2048)");
  command.option("--shape", options->shapes, "Q/KV/DIM[,...]", "query heads, KV heads and dimensions of the made-up layer");
  command.option("--ops", options->operations, "NAME[,...]", "which of decode, prefill and append");
  command.option("--filter", options->filter, "TEXT", "only operations whose name, as --list prints it, contains this");
  command.option("--stock", options->stock, "TYPE[,...]", "llama.cpp's caches to measure beside ours, or none");
  command.option("-t,--threads", options->threads, "N", "threads, 0 = all processors", "LLAMA_ARG_THREADS");
  command.option("-p,--n-prompt", options->n_prompt, "N", "tokens of prefill, append and pp");
  command.option("-n,--n-gen", options->n_gen, "N", "tokens of tg");
  command.option("-r,--runs", options->runs, "N", "runs of a case, 0 = 7, with --quick 3", "");
  command.option("--stock-runs", options->stock_runs, "N", "runs with quantised stock caches, 0 = 3, with --quick 1", "");
  command.option("--budget", options->budget, "SECONDS", "after so long 3 runs of a case are enough, 0 = 60, with --quick 10",
                 "");
  command.option("--codec", options->codec, "NAME", "of the made-up layer: spectral, int2, or exact (16-bit rows only)");
  command.flag("--no-rope-mean", options->no_rope_mean, "made-up keys without a mean before RoPE");
  command.option("--sink", options->sink, "N", "of the made-up layer: first positions at 16 bit");
  command.option("--recent", options->recent, "N", "of the made-up layer: last positions at 16 bit");
  command.flag("--hot", options->hot, "leave data in the processor's caches: for work on kernels");
  command.option("--max-load", options->max_load, "PROCESSORS", "that other programs may use during a run");
  command.option("--max-spread", options->max_spread, "SHARE", "(largest - smallest ratio to f16) / median");
  command.flag("--allow-noisy", options->allow_noisy, "print disturbed figures too, marked");
  command.option("-o,--format", options->format, "FORMAT", "md, json or csv");
  command.option("--json", options->json, "FILE", "write the JSON here as well");
  command.example("oscar bench --quick", "attention beside llama.cpp's own, in minutes");
  command.example("oscar bench -m model.gguf -d 0,8192 --stock f16", "a model's speed beside stock llama.cpp's 16-bit cache");
  command.example("oscar bench --filter 'decode 12/2/128' --stock none --hot", "one kernel, again and again");
  command.json_key("machine",
                   "cpu, processors, ghz, last_cache_bytes, load, load_after (averages of a minute), threads, isa, "
                   "version, commit, ggml, cold, codec, rope_mean, sink, recent");
  command.json_key("date", "of the measurement");
  command.json_key("rows[]", "one per case: the following keys");
  command.json_key("what, shape or model, tokens, depth", "decode, prefill, append, or as tg32 and pp512");
  command.json_key("unit, ours, stock_f16, stock_q8_0, stock_q4_0", "us of one operation or t/s, medians; null: not measured");
  command.json_key("ratio_f16, ratio_q8_0, ratio_q4_0", "median, min, max over runs; above 1: ours is faster");
  command.json_key("cycles",
                   "of our operation: time x threads x clock, per visible key and query head (append: per stored value)");
  command.json_key("runs, disturbed, others", "kept, taken again, most processors used by other programs");
  command.json_key("noise", "why the row cannot be trusted; empty: it can");
  command.json_key("samples", "the figures of each cache, run by run");
  command.action([options] { return bench(*options); });
}

}  // namespace oscar::cli
