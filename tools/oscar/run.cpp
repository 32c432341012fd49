// `oscar run`: one prompt or a chat, answered from the 2-bit cache through libllama's C API.
#include "cli.h"
#include "oscar/base/error.h"
#include "settings.h"

#if OSCAR_WITH_LLAMA
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iostream>

#include "output.h"
#include "session.h"
#endif

namespace oscar::cli {
namespace {

struct RunOptions {
  HostOptions host;
  Settings settings;
  std::string prompt, file, system, stats;
  bool chat = false, plain = false, no_timings = false;
  int n_predict = -1;
  double temperature = 0.0, top_p = 0.95, min_p = 0.05;
  int top_k = 40;
  std::int64_t seed = -1;
};

#if OSCAR_WITH_LLAMA

struct Timings {
  double load = 0, prompt = 0, generation = 0;
  int prompt_tokens = 0, generated = 0;
  [[nodiscard]] double prompt_rate() const { return prompt > 0 ? prompt_tokens / prompt : 0.0; }
  // The first token comes out of the prompt's own logits.
  [[nodiscard]] double generation_rate() const { return generation > 0 ? (generated - 1) / generation : 0.0; }
};

class Generator {
 public:
  Generator(const Model& model, Context& context, const RunOptions& options)
      : model_(model), context_(context), options_(options) {
    sampler_.reset(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    if (options.temperature <= 0.0) {
      llama_sampler_chain_add(sampler_.get(), llama_sampler_init_greedy());
      return;
    }
    llama_sampler_chain_add(sampler_.get(), llama_sampler_init_top_k(options.top_k));
    llama_sampler_chain_add(sampler_.get(), llama_sampler_init_top_p(static_cast<float>(options.top_p), 1));
    llama_sampler_chain_add(sampler_.get(), llama_sampler_init_min_p(static_cast<float>(options.min_p), 1));
    llama_sampler_chain_add(sampler_.get(), llama_sampler_init_temp(static_cast<float>(options.temperature)));
    const auto seed = options.seed < 0 ? LLAMA_DEFAULT_SEED : static_cast<std::uint32_t>(options.seed);
    llama_sampler_chain_add(sampler_.get(), llama_sampler_init_dist(seed));
  }

  // Feeds text, streams the answer, returns it. Stops at the end of the turn, -n tokens, a full context or Ctrl-C.
  std::string answer(const std::string& text, bool parse_special) {
    const std::vector<llama_token> tokens = model_.tokenize(text, position_ == 0, parse_special);
    if (tokens.empty()) fail("the prompt is empty");
    const int n = static_cast<int>(tokens.size());
    if (position_ + n >= context_.n_ctx()) {
      fail("the prompt needs {} tokens, the context has {}: use -c {} or more", position_ + n, context_.n_ctx(),
           position_ + n + 256);
    }
    feed(tokens);
    std::string out;
    stop_ = "limit";
    if (options_.n_predict == 0) return out;  // the prompt is only read
    for (int i = 0; stop_ = "interrupt", !interrupted(); ++i) {
      const llama_token token = llama_sampler_sample(sampler_.get(), context_.get(), -1);
      if (llama_vocab_is_eog(model_.vocab(), token)) {
        stop_ = "end";
        break;
      }
      const std::string piece = model_.piece(token);
      out += piece;
      print(piece);
      tokens_.push_back(token);
      ++timings_.generated;
      if (options_.n_predict >= 0 && i + 1 >= options_.n_predict) {
        stop_ = "limit";
        break;
      }
      if (position_ >= context_.n_ctx()) {
        stop_ = "context";
        break;
      }
      timings_.generation += context_.decode({token}, position_, position_);
      ++position_;
    }
    return out;
  }

  [[nodiscard]] const Timings& timings() const { return timings_; }
  void set_load_time(double seconds) { timings_.load = seconds; }
  [[nodiscard]] const std::string& stop() const { return stop_; }
  [[nodiscard]] const std::vector<llama_token>& tokens() const { return tokens_; }

 private:
  void feed(const std::vector<llama_token>& tokens) {
    // Small calls, so that Ctrl-C works and the bar moves.
    const std::size_t step = static_cast<std::size_t>(std::min(options_.host.n_ubatch, options_.host.n_batch));
    std::unique_ptr<Progress> progress;
    if (tokens.size() > 2 * step)
      progress = std::make_unique<Progress>("reading the prompt", static_cast<double>(tokens.size()), "tokens");
    const int last = position_ + static_cast<int>(tokens.size()) - 1;
    for (std::size_t i = 0; i < tokens.size(); i += step) {
      if (interrupted()) fail("interrupted while reading the prompt");
      const auto end = std::min(tokens.size(), i + step);
      const std::vector<llama_token> part(tokens.begin() + static_cast<std::ptrdiff_t>(i),
                                          tokens.begin() + static_cast<std::ptrdiff_t>(end));
      timings_.prompt += context_.decode(part, position_, last);
      position_ += static_cast<int>(part.size());
      if (progress) progress->update(static_cast<double>(end));
    }
    timings_.prompt_tokens += static_cast<int>(tokens.size());
  }

  const Model& model_;
  Context& context_;
  const RunOptions& options_;
  std::unique_ptr<llama_sampler, decltype(&llama_sampler_free)> sampler_{nullptr, &llama_sampler_free};
  Timings timings_;
  std::vector<llama_token> tokens_;
  std::string stop_;
  int position_ = 0;
};

void chat(const Model& model, Generator& generator, std::vector<Model::Turn> turns) {
  const bool terminal = isatty(STDIN_FILENO) != 0;
  std::size_t fed = 0;
  // The first turn may come from -p and -f; the others are lines of stdin.
  bool pending = !turns.empty() && turns.back().role == "user";
  if (terminal) fmt::print(stderr, "oscar: type a message; an empty line or Ctrl-D ends the chat\n");
  while (!interrupted()) {
    if (!pending) {
      if (terminal) fmt::print(stderr, "\n> ");
      std::string line;
      if (!std::getline(std::cin, line) || line.empty()) return;
      turns.push_back({"user", line});
    }
    pending = false;
    const std::string text = model.apply_template(turns, true);
    turns.push_back({"assistant", generator.answer(text.substr(std::min(fed, text.size())), true)});
    print("\n");
    fed = model.apply_template(turns, false).size();
    if (generator.stop() == "context") {
      fmt::print(stderr, "oscar: the context is full: use a larger -c for longer chats\n");
      return;
    }
  }
}

nlohmann::ordered_json report(const RunOptions& options, const Generator& generator, const Context& context,
                              const nlohmann::json& stats) {
  const Timings& t = generator.timings();
  const CacheReport cache = cache_report(stats, 0, 1);
  nlohmann::ordered_json out;
  out["model"] = std::filesystem::path(options.host.model).filename().string();
  out["mode"] = options.settings.mode;
  out["n_ctx"] = context.n_ctx();
  out["prompt_tokens"] = t.prompt_tokens;
  out["generated_tokens"] = t.generated;
  out["tokens"] = generator.tokens();
  out["stop"] = generator.stop();
  out["load_s"] = t.load;
  out["prompt_s"] = t.prompt;
  out["generation_s"] = t.generation;
  out["pp"] = t.prompt_rate();
  out["tg"] = t.generation_rate();
  const bool known = Plugin::loaded();
  const auto or_null = [&](auto value) { return known ? nlohmann::ordered_json(value) : nlohmann::ordered_json(); };
  out["kv_bytes_f16"] = or_null(cache.nominal_bytes);
  out["kv_bytes"] = or_null(cache.resident_bytes);
  out["bits_per_element"] = or_null(cache.bits_per_element);
  out["bits_per_element_all"] = or_null(cache.bits_per_element_all);
  out["attention_served"] = or_null(served_operations(stats));
  out["attention_bypassed"] = or_null(counter(stats, "attention_bypassed"));
  out["peak_rss_bytes"] = peak_rss_bytes();
  out["plugin"] = known ? nlohmann::ordered_json(stats) : nlohmann::ordered_json();
  return out;
}

void print_timings(const nlohmann::ordered_json& r) {
  const auto line = [](const char* what, double seconds, int n, double rate) {
    fmt::print(stderr, "oscar: {:>16} = {:10.2f} ms / {:5} tokens ({:8.2f} ms per token, {:8.2f} tokens per second)\n", what,
               1e3 * seconds, n, rate > 0 ? 1e3 / rate : 0.0, rate);
  };
  fmt::print(stderr, "\noscar: {:>16} = {:10.2f} ms\n", "load time", 1e3 * r["load_s"].get<double>());
  line("prompt eval time", r["prompt_s"], r["prompt_tokens"], r["pp"]);
  line("eval time", r["generation_s"], std::max(0, r["generated_tokens"].get<int>() - 1), r["tg"]);
  if (!r["kv_bytes"].is_null()) {
    fmt::print(stderr, "oscar: {:>16} = {} resident, {} for {} cells at 16 bit\n", "KV cache", human_bytes(r["kv_bytes"]),
               human_bytes(r["kv_bytes_f16"]), r["n_ctx"].get<int>());
    if (r["bits_per_element"].get<double>() < 16.0) {
      fmt::print(stderr, "oscar: {:>16} = {:.2f} bits per element coded, {:.2f} with the 16-bit windows\n", "",
                 r["bits_per_element"].get<double>(), r["bits_per_element_all"].get<double>());
    }
  }
}

int run(RunOptions options) {
  check(options.host);
  check(options.settings);
  if (options.chat && options.plain) fail("-cnv and -no-cnv contradict each other");
  if (options.settings.mode == "off") options.settings.mode = "stock";
  if (!options.stats.empty()) check_writable(options.stats);
  std::string user = options.file.empty() ? "" : read_text(options.file);
  if (!options.prompt.empty()) user += (user.empty() ? "" : "\n\n") + options.prompt;
  const std::string artifact = resolve_artifact(options.settings, options.host.model);

  const auto start = std::chrono::steady_clock::now();
  Plugin::start(options.settings.mode != "stock", options.host.verbose);
  if (Plugin::loaded()) Plugin::configure(plugin_json(options.settings, artifact));
  const Model model(options.host);
  if (user.empty() && !options.chat) {
    if (!model.has_chat_template() || options.plain) fail("there is no prompt: use -p TEXT or -f FILE");
    options.chat = true;
  }
  Context context(model, options.host);
  Generator generator(model, context, options);
  generator.set_load_time(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  watch_interrupts();

  std::vector<Model::Turn> turns;
  if (!options.system.empty()) turns.push_back({"system", options.system});
  if (!user.empty()) turns.push_back({"user", user});
  if (options.chat) {
    chat(model, generator, turns);
  } else if (options.plain || !model.has_chat_template()) {
    generator.answer(user, false);
    print("\n");
  } else {
    generator.answer(model.apply_template(turns, true), true);
    print("\n");
  }
  const nlohmann::json stats = Plugin::stats();
  const nlohmann::ordered_json result = report(options, generator, context, stats);
  if (!options.no_timings) print_timings(result);
  if (!options.stats.empty()) {
    std::ofstream file(options.stats);
    file << result.dump(1) << "\n";
    if (!file.flush()) fail("{} cannot be written", options.stats);
  }
  if (!Plugin::loaded() || generator.timings().prompt_tokens == 0) return kOk;
  if (served_operations(stats) == 0 || counter(stats, "attention_bypassed") > 0) {
    fmt::print(stderr, "oscar: error: {} attention operations were served and {} bypassed\n", served_operations(stats),
               counter(stats, "attention_bypassed"));
    return kNotServed;
  }
  return kOk;
}

#else
int run(const RunOptions&) { requires_llama("run"); }
#endif

}  // namespace

void add_run(CommandLine& line) {
  Command& command = line.add("run", "answer a prompt, or chat, from the 2-bit cache");
  const auto options = std::make_shared<RunOptions>();
  command.usage("-m MODEL -p PROMPT [options]");
  command.usage("-m MODEL -f DOCUMENT -p QUESTION [options]");
  command.usage("-m MODEL -cnv [options]");
  command.text(
      "The prompt becomes one user turn of the model's chat template (plain continuation for models without one, or with "
      "-no-cnv). -f puts "
      "a document before the question. Without -p and -f, or with -cnv, it is a chat: one message per line of stdin. The "
      "answer streams to "
      "stdout; timings and the cache's real size follow on stderr. Answers are greedy unless --temp is given, so that modes "
      "can be compared.");
  add_host(command, options->host, "context in tokens, 0 = what the model was trained for; unused cells cost nothing");
  command.option("-p,--prompt", options->prompt, "TEXT", "prompt or question");
  command.option("-f,--file", options->file, "FILE", "document or prompt, - = stdin");
  command.option("-sys,--system-prompt", options->system, "TEXT", "system turn");
  command.flag("-cnv,--conversation", options->chat, "chat");
  command.flag("-no-cnv,--no-conversation", options->plain, "no chat template: continue the text as it is");
  command.option("-n,--predict", options->n_predict, "N", "tokens of an answer, -1 = until it ends", "LLAMA_ARG_N_PREDICT");
  command.option("--temp,--temperature", options->temperature, "T", "temperature, 0 = greedy", "LLAMA_ARG_TEMPERATURE");
  command.option("--top-k", options->top_k, "K", "top-k sampling, 0 = off", "LLAMA_ARG_TOP_K");
  command.option("--top-p", options->top_p, "P", "top-p sampling, 1 = off", "LLAMA_ARG_TOP_P");
  command.option("--min-p", options->min_p, "P", "min-p sampling, 0 = off");
  command.option("-s,--seed", options->seed, "N", "seed, -1 = random");
  add_settings(command, options->settings, true);
  command.option("--stats-json", options->stats, "FILE", "write tokens, timings and counters here");
  command.flag("--no-timings", options->no_timings, "no timings on stderr");
  command.example("oscar run -m model.gguf -f book.txt -p \"Who is the narrator?\"", "a long document and a question");
  command.example("oscar run -m model.gguf --mode delegate -p \"Hello\"",
                  "the same with llama.cpp's own 16-bit cache, measured alike");
  command.json_key("model, mode, n_ctx", "what ran");
  command.json_key("prompt_tokens, generated_tokens", "counts");
  command.json_key("tokens", "ids of the generated tokens");
  command.json_key("stop", "end, limit, context or interrupt");
  command.json_key("load_s, prompt_s, generation_s", "seconds");
  command.json_key("pp, tg", "tokens per second: prompt, generation");
  command.json_key("kv_bytes, kv_bytes_f16",
                   "KV cache: resident bytes, measured; bytes of all cells at 16 bit (null in mode stock)");
  command.json_key("bits_per_element, bits_per_element_all",
                   "coded rows alone; 16-bit windows included (16: not coded; null in mode stock)");
  command.json_key("attention_served, attention_bypassed", "operations by OSCAR; operations that escaped it");
  command.json_key("peak_rss_bytes, plugin", "of this process; all counters of the plug-in (see OSCAR_STATS)");
  command.action([options] { return run(*options); });
}

}  // namespace oscar::cli
