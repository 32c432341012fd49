// `oscar eval`: one model, several ways to store its cache, one table.
#include "cli.h"
#include "eval_methods.h"
#include "evaluation.h"
#include "oscar/base/error.h"
#include "output.h"
#include "settings.h"

#if OSCAR_WITH_LLAMA
#include <algorithm>
#include <regex>
#include <thread>

#include "eval_report.h"
#include "eval_tasks.h"
#include "oscar/io/sha256.h"
#endif

namespace oscar::cli {
namespace {

#if OSCAR_WITH_LLAMA

constexpr int kMostSamples = 1000;

EvalTasks parse_tasks(const EvalOptions& options) {
  EvalTasks out;
  if (options.tasks.empty()) {
    return {true, true, options.host.n_ctx >= kLeastChat, true};
  }
  for (std::size_t begin = 0; begin <= options.tasks.size();) {
    const std::size_t comma = std::min(options.tasks.find(',', begin), options.tasks.size());
    const std::string name = options.tasks.substr(begin, comma - begin);
    if (name == "kl") {
      out.kl = true;
    } else if (name == "retrieval") {
      out.retrieval = true;
    } else if (name == "tools") {
      out.tools = true;
    } else if (name == "continuations") {
      out.continuations = true;
    } else {
      fail("there is no task \"{}\": kl, retrieval, tools and continuations, with commas between them", name);
    }
    begin = comma + 1;
  }
  if (out.continuations && !out.kl) fail("continuations start inside the text that task kl runs over: ask for both");
  return out;
}

void parse_part(EvalOptions& options) {
  if (options.part_text.empty()) return;
  static const std::regex form("([0-9]{1,4})/([0-9]{1,4})");
  std::smatch match;
  if (std::regex_match(options.part_text, match, form)) {
    options.part = std::stoi(match[1]) - 1;
    options.parts = std::stoi(match[2]);
  }
  if (match.empty() || options.part < 0 || options.part >= options.parts)
    fail("--part {} makes no sense: I/N with I from 1 to N, such as 2/4", options.part_text);
}

void settle(EvalOptions& options, const EvalTasks& tasks) {
  check(options.host);
  parse_part(options);
  if (options.texts.empty() && (tasks.kl || tasks.retrieval)) fail("no text was named: use -f TEXT");
  if (options.sequences < 0) fail("--sequences {} makes no sense: at least 1", options.sequences);
  if (options.documents < 0) fail("--documents {} makes no sense: at least 1", options.documents);
  if (options.chats < 0) fail("--chats {} makes no sense: at least 1", options.chats);
  if (options.continuations < -1) fail("--continuations {} makes no sense: a number from 0", options.continuations);
  if (options.from < 0) fail("--from {} makes no sense: it is a position", options.from);
  if (options.sequences == 0) options.sequences = options.quick ? 1 : 4;
  if (options.documents == 0) options.documents = options.quick ? 1 : 4;
  if (options.chats == 0) options.chats = options.quick ? 1 : 2;
  if (options.continuations < 0) options.continuations = options.quick ? 0 : 5;
  options.host.n_ubatch = std::min(options.host.n_ubatch, options.host.n_batch);
  options.host.n_batch = std::max({options.host.n_ubatch, kQuestionTokens, kChatTokens});
  if (options.host.n_threads == 0) options.host.n_threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  // Questions and continuations are taken back again; this only keeps 16-bit rows longer and changes no result.
  const int needed = std::max({kQuestionTokens, kContinuationTokens, tasks.tools ? kChatTokens : 0});
  if (options.settings.rollback.empty()) options.settings.rollback = std::to_string(needed);
  check(options.settings);
  const int coded = first_coded_query(options.settings);
  if (options.from == 0) options.from = std::max(std::min(1024, options.host.n_ctx / 2), coded);
  if (options.from + 2 > options.host.n_ctx) {
    fail(
        "nothing of a context of {} tokens can be judged from position {} on (sink + recent are {} rows of 16 bit): use a "
        "larger "
        "-c",
        options.host.n_ctx, options.from, coded);
  }
  for (const int n : {options.sequences, options.documents, options.chats}) {
    if (n > kMostSamples) fail("{} sequences, documents or chats are more than the {} that eval takes", n, kMostSamples);
  }
  if (std::stoi(options.settings.rollback) < needed)
    fail("--rollback {} is too small: questions go back over up to {} tokens", options.settings.rollback, needed);
}

int evaluate(EvalOptions options) {
  const Format format = parse_format(options.format);
  if (options.host.n_ctx == 0) options.host.n_ctx = 4096;
  const EvalTasks tasks = parse_tasks(options);
  settle(options, tasks);
  std::vector<EvalText> texts;
  for (const std::string& path : options.texts) {
    EvalText text{std::filesystem::path(path).filename().string(), read_text(path), ""};
    text.sha256 = sha256_hex(std::as_bytes(std::span(text.content)));
    texts.push_back(std::move(text));
  }
  if (tasks.kl && !options.allow_small)
    check_sample(static_cast<std::int64_t>(options.sequences) * (options.host.n_ctx - 1 - options.from));
  std::vector<Method> methods =
      choose_methods(options.settings, options.methods, !options.no_floor, options.all, options.variants);
  for (const Method& method : methods) {
    const int coded = first_coded_query(method.settings);
    if (tasks.kl && !options.allow_small && method.settings.mode == "oscar" && options.from < coded) {
      fail("{}: positions before {} (sink + recent) read 16-bit rows only and would count as perfect: use --from {}",
           method.name, coded, coded);
    }
  }
  const std::string part = options.part_text;
  const nlohmann::ordered_json result = run_evaluation(std::move(options), tasks, std::move(methods), std::move(texts));
  if (part.empty()) {
    print_evaluation(result, format);
  } else {
    fmt::print(stderr, "oscar: part {} is kept; the same command without --part prints the figures\n", part);
  }
  return kOk;
}

#else
int evaluate(const EvalOptions&) { requires_llama("eval"); }
#endif

}  // namespace

void add_eval(CommandLine& line) {
  Command& command = line.add("eval", "one table of what each way to store the cache costs in quality, with its noise floor");
  const auto options = std::make_shared<EvalOptions>();
  command.usage("-m MODEL -f TEXT [-f TEXT ...] [options]");
  command.text(
      "Sets methods side by side on one model. KL divergence from the exact 16-bit cache (nats; mean, median, 99 %, maximum), "
      "share of equal most likely tokens and perplexity ratio, by context depth. Retrieval: facts hidden in long documents (a "
      "needle at 10 depths, two facts that must be joined, a register of pseudo-random keys), answered by choice among 6 words "
      "that all occur in the document, so that tiny models give usable figures too. Tools: a chat of many turns through the "
      "model's own template, with eight functions defined at its beginning and every answer a function call in JSON; behind it "
      "20 requests, scored by the choice of the function and of an argument's value (most were told once, far back), and by "
      "whether the greedy answer is JSON, is a call of a defined function, and is the right one. Greedy continuations: how "
      "many "
      "are still the exact cache's after 8, 16, 32 and 64 tokens.");
  command.text(
      "The noise floor is measured with them: the exact cache against itself with the lowest bit of every query flipped. A "
      "figure "
      "near it says nothing about a method. 95 % intervals come from a bootstrap over sequences from 4 sequences on, below "
      "that "
      "over blocks of 64 positions. Fewer than 512 positions are refused; ranges, kinds of question and continuations with too "
      "few samples of their own (512 positions, 20 questions, 20 prompts) are joined or left out. A file that the artifact was "
      "calibrated on is refused.");
  command.text(
      "Every measurement is kept in the cache directory (eval/) under the digest of everything it depends on: an interrupted "
      "command goes on, and one more method costs its own time only. So several processes that share that directory, each with "
      "its --part, share the work; they must agree in --threads, which is part of the digest.");
  options->host.n_ctx = 4096;
  add_host(command, options->host, "tokens of a sequence and of a document");
  command.option("-f,--file", options->texts, "FILE", "text to judge on; repeatable, sequences alternate between texts")
      ->allow_extra_args(false);
  command.option("--methods", options->methods, "NAME[,...]", "which of " + method_names() + "; default: all of them");
  command
      .option("--variant", options->variants, "KEY=VALUE[,...]", "one more method: these settings, as in compare; repeatable")
      ->allow_extra_args(false);
  command.flag("--no-floor", options->no_floor, "leave out the noise floor, which takes as long as a method");
  command.flag("--all", options->all, "other published methods too, simulated");
  command.flag("--quick", options->quick, "1 sequence, 1 document, 1 short chat without answers, no continuations");
  command.option("--tasks", options->tasks, "NAME[,...]",
                 "kl, retrieval, tools, continuations; default: all, tools from -c 2560 on");
  command.option("--sequences", options->sequences, "N", "sequences of -c tokens, 0 = 4, with --quick 1", "");
  command.option("--documents", options->documents, "N", "documents with 30 questions each, 0 = 4, with --quick 1", "");
  command.option("--chats", options->chats, "N", "chats with 20 requests each, 0 = 2, with --quick 1", "");
  command.option("--continuations", options->continuations, "N",
                 "greedy continuations of each sequence, -1 = 5, with --quick 0", "");
  command.option("--from", options->from, "POSITION",
                 "first position judged, 0 = 1024 or half the context, behind sink + recent", "");
  command.option("-s,--seed", options->seed, "N", "of the bootstrap and of the documents");
  command.option("--part", options->part_text, "I/N",
                 "measure only every N-th sequence, document and chat from the I-th on, and print nothing");
  command.flag("--fresh", options->fresh, "measure again what is there from before");
  command.flag("--allow-small", options->allow_small, "print figures from samples that are too small for a claim");
  add_cache_settings(command, options->settings);
  command.option("-o,--format", options->format, "FORMAT", "md, json or csv (csv: the first table; --tasks chooses)");
  command.example("oscar eval -m model.gguf -f essays.txt --quick", "our codecs and OSCAR's, in minutes for a small model");
  command.example("oscar eval -m model.gguf -f essays.txt -f code.txt -c 8192 --all -o json", "everything, for a report");
  command.example("oscar eval -m model.gguf -f essays.txt --variant codec=spectral,k_bits=2.5,v_bits=2",
                  "one more method beside the default ones");
  command.json_key("oscar, ggml, model, model_fingerprint, artifact", "what was judged");
  command.json_key("texts[]", "name, sha256, sequences, tokens of each");
  command.json_key("context, from, sequences, documents, chats, seed, n_ubatch, threads", "how");
  command.json_key("confidence", "what the bootstrap draws from");
  command.json_key("rows[]", "one per method and depth: the following keys; method noise-floor is exact against exact");
  command.json_key("method, variant, settings, depth",
                   "label; what it was made from; all settings and the artifact's digest; range of positions or all");
  command.json_key("k_bits, v_bits, bits_per_element, bits_per_element_all",
                   "nominal bits of K and V (null: unknown); with metadata; with the 16-bit windows too");
  command.json_key("kl_mean, kl_p50, kl_p99, kl_max", "nats");
  command.json_key("same_top, ppl_ratio", "share of equal most likely tokens; perplexity over the exact cache's");
  command.json_key("kl_mean_ci, same_top_ci, ppl_ratio_ci", "[low, high], 95 %");
  command.json_key("positions, sequences, context", "the sample of the row");
  command.json_key("retrieval[]",
                   "method, kind (needle, two-facts, lookup, all), questions, accuracy, chance, right_probability, same_choice "
                   "(as exact), accuracy_ci, same_choice_ci, accuracy_by_depth (needle)");
  command.json_key(
      "tools[]",
      "method, requests, function_accuracy, function_chance, function_probability, same_function (as exact), the "
      "same for argument, and of generated answers: answers, json_valid, call_valid, call_right, same_answer (token "
      "by token as exact); accuracies and shares with _ci");
  command.json_key("continuations[]", "method, length, prompts, same, same_ci, equal_prefix");
  command.json_key("notes[]", "what was left out and why");
  command.action([options] { return evaluate(*options); });
}

}  // namespace oscar::cli
