// `oscar eval`: one model, several ways to store its cache, one table.
#include "cli.h"
#include "eval_methods.h"
#include "oscar/base/error.h"
#include "output.h"
#include "settings.h"

#if OSCAR_WITH_LLAMA
#include <algorithm>
#include <thread>

#include "eval_report.h"
#include "eval_tasks.h"
#include "ggml.h"
#include "kl_engine.h"
#include "oscar/artifact/artifact.h"
#include "oscar/cache/windows.h"
#include "oscar/io/gguf.h"
#include "oscar/io/sha256.h"
#include "oscar/version.h"
#include "result_store.h"
#include "retrieval.h"
#include "session.h"
#include "statistics.h"
#endif

namespace oscar::cli {
namespace {

struct EvalOptions {
  HostOptions host;
  Settings settings;
  std::vector<std::string> texts, variants;
  std::string methods, tasks = "kl,retrieval,continuations", format = "md";
  int sequences = 0, documents = 0, continuations = -1, from = 0;  // as --quick says
  bool all = false, quick = false, fresh = false, allow_small = false;
  std::uint64_t seed = 1;
};

#if OSCAR_WITH_LLAMA

// Raise it when a measurement means something else than before: kept results of the old meaning are then not found.
constexpr int kResultFormat = 1;
constexpr int kContinuationTokens = 64;

struct Text {
  std::string name, content, sha256;
};

struct Tasks {
  bool kl = false, retrieval = false, continuations = false;
};

Tasks parse_tasks(const std::string& list) {
  Tasks out;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t comma = std::min(list.find(',', begin), list.size());
    const std::string name = list.substr(begin, comma - begin);
    if (name == "kl") {
      out.kl = true;
    } else if (name == "retrieval") {
      out.retrieval = true;
    } else if (name == "continuations") {
      out.continuations = true;
    } else {
      fail("there is no task \"{}\": kl, retrieval and continuations, with commas between them", name);
    }
    begin = comma + 1;
  }
  if (out.continuations && !out.kl) fail("continuations start inside the text that task kl runs over: ask for both");
  return out;
}

void settle(EvalOptions& options) {
  check(options.host);
  if (options.texts.empty()) fail("no text was named: use -f TEXT");
  if (options.sequences < 0) fail("--sequences {} makes no sense: at least 1", options.sequences);
  if (options.documents < 0) fail("--documents {} makes no sense: at least 1", options.documents);
  if (options.continuations < -1) fail("--continuations {} makes no sense: a number from 0", options.continuations);
  if (options.from < 0) fail("--from {} makes no sense: it is a position", options.from);
  if (options.sequences == 0) options.sequences = options.quick ? 1 : 4;
  if (options.documents == 0) options.documents = options.quick ? 1 : 4;
  if (options.continuations < 0) options.continuations = options.quick ? 0 : 5;
  if (options.host.n_ctx == 0) options.host.n_ctx = 4096;
  if (options.from == 0) options.from = std::min(1024, options.host.n_ctx / 2);
  if (options.from + 2 > options.host.n_ctx)
    fail("--from {} leaves nothing of a context of {} tokens", options.from, options.host.n_ctx);
  options.host.n_ubatch = std::min(options.host.n_ubatch, options.host.n_batch);
  options.host.n_batch = std::max(options.host.n_ubatch, kQuestionTokens);
  if (options.host.n_threads == 0) options.host.n_threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  // Questions and continuations are taken back again; this only keeps 16-bit rows longer and changes no result.
  constexpr int needed = std::max(kQuestionTokens, kContinuationTokens);
  if (options.settings.rollback.empty()) options.settings.rollback = std::to_string(needed);
  check(options.settings);
  if (std::stoi(options.settings.rollback) < needed)
    fail("--rollback {} is too small: questions go back over up to {} tokens", options.settings.rollback, needed);
}

template <class T>
std::string digest(const std::vector<T>& values) {
  return sha256_hex(std::as_bytes(std::span(values)));
}

class Evaluation {
 public:
  Evaluation(EvalOptions options, Tasks tasks, std::vector<Method> methods, std::vector<Text> texts)
      : options_(std::move(options)),
        tasks_(tasks),
        methods_(std::move(methods)),
        texts_(std::move(texts)),
        store_(cache_dir() / "eval", options_.fresh) {}

  nlohmann::ordered_json run() {
    inspect_artifacts();
    Plugin::start(true, options_.host.verbose);
    model_ = std::make_unique<Model>(options_.host);
    plan();
    look_up();
    watch_interrupts();
    try {
      open();
      if (tasks_.kl) run_sequences();
      if (tasks_.retrieval) run_documents();
    } catch (const Error&) {
      if (interrupted()) fail("interrupted; what was finished is kept, the same command goes on from there");
      throw;
    }
    return report();
  }

 private:
  using Json = nlohmann::json;

  struct Subject {  // one method and what is known about it so far
    Contender contender;
    MethodResult result;
    Json settings;  // what decides its results: settings and the artifact's digest
    std::vector<Json> sequence_keys, document_keys;
    std::vector<std::optional<Json>> sequences, documents;  // stored values
  };

  void inspect_artifacts() {
    for (const Method& method : methods_) {
      Subject& s = subjects_.emplace_back();
      s.contender.name = s.result.name = method.name;
      s.result.variant = method.variant;
      s.contender.settings = method.settings;
      s.contender.artifact = resolve_artifact(method.settings, options_.host.model);
      s.settings = plugin_json(method.settings, "");
      s.settings.erase("artifact");
      s.settings.erase("log");
      s.result.k_bits = s.result.v_bits = 16;
      if (s.contender.artifact.empty()) continue;
      const Artifact artifact = load_artifact(s.contender.artifact);
      s.settings["artifact_digest"] = artifact.digest;
      if (artifact_.is_null())
        artifact_ = {{"name", std::filesystem::path(s.contender.artifact).filename().string()}, {"digest", artifact.digest}};
      describe_bits(s, method.settings, artifact);
      for (const Text& text : texts_) {
        for (const Json& source : artifact.provenance.value("sources", Json::array())) {
          if (source.value("sha256", "") == text.sha256)
            fail("{} is the text that {} was calibrated on: judge on another one", text.name, s.contender.artifact);
        }
      }
    }
  }

  static void describe_bits(Subject& s, const Settings& settings, const Artifact& artifact) {
    const std::string codec = settings.codec.empty() ? artifact.recipe.codec : settings.codec;
    if (codec == "int2") {
      s.result.k_bits = s.result.v_bits = 2;
    } else if (codec == "spectral") {
      Recipe recipe = artifact.recipe;
      set_rates(recipe, given_rates(settings));
      check_layer_bits(recipe, artifact);
      const Rates rates = mean_rates(artifact, recipe);
      s.result.k_bits = rates.k;
      s.result.v_bits = rates.v;
      if (std::any_of(artifact.layers.begin(), artifact.layers.end(),
                      [](const LayerArtifact& layer) { return !layer.k_rotation.empty() && layer.spectral.empty(); })) {
        fail("{} has no spectral codec, which method {} needs: calibrate the model again", s.contender.artifact, s.result.name);
      }
    } else {
      s.result.k_bits = s.result.v_bits = nullptr;  // only bits_per_element tells
    }
  }

  // Sequences, documents, and the keys of every result.
  void plan() {
    const int n_ctx = options_.host.n_ctx;
    std::vector<std::vector<std::vector<llama_token>>> cut;
    const int n_texts = static_cast<int>(texts_.size());
    if (tasks_.kl) {
      for (const Text& text : texts_)
        cut.push_back(cut_text(*model_, text.content, n_ctx, (options_.sequences + n_texts - 1) / n_texts, options_.from));
    }
    for (int i = 0; tasks_.kl && i < options_.sequences; ++i) {
      const auto& chunks = cut[static_cast<std::size_t>(i % n_texts)];
      const auto at = static_cast<std::size_t>(i / n_texts);
      if (at >= chunks.size() || static_cast<int>(chunks[at].size()) < n_ctx) {
        fail("{} has no {} sequences of {} tokens: use a longer text, or fewer --sequences",
             texts_[static_cast<std::size_t>(i % n_texts)].name, at + 1, n_ctx);
      }
      sequences_.push_back(chunks[at]);
    }
    if (tasks_.retrieval) {
      for (int i = 0; i < options_.documents; ++i) documents_.push_back(document(i));
    }
    choose_stops();
    for (Subject& s : subjects_) {
      for (const auto& sequence : sequences_) {
        s.sequence_keys.push_back(key("kl", s.settings,
                                      {{"base", subjects_[0].settings},
                                       {"tokens", digest(sequence)},
                                       {"from", options_.from},
                                       {"stops", stops_},
                                       {"continuation_tokens", kContinuationTokens}}));
      }
      for (const Document& d : documents_) {
        std::vector<std::int32_t> all = d.tokens;
        for (const Question& q : d.questions) {
          all.insert(all.end(), q.ask.begin(), q.ask.end());
          for (const Tokens& c : q.candidates) all.insert(all.end(), c.begin(), c.end());
          all.push_back(q.right);
        }
        s.document_keys.push_back(key("retrieval", s.settings, {{"tokens", digest(all)}}));
      }
    }
  }

  Document document(int index) const {
    const llama_vocab* vocab = model_->vocab();
    const bool bos = llama_vocab_get_add_bos(vocab);
    DocumentPlan plan;
    plan.tokens = options_.host.n_ctx - kQuestionTokens - (bos ? 1 : 0);
    const Windows windows;
    const auto window = [](const std::string& given, int normal) { return given.empty() ? normal : std::stoi(given); };
    plan.first = window(options_.settings.sink, windows.sink);
    plan.last = plan.tokens - window(options_.settings.recent, windows.recent);
    plan.seed = options_.seed + static_cast<std::uint64_t>(index);
    const Text& text = texts_[static_cast<std::size_t>(index) % texts_.size()];
    // Another stretch of the text for every document.
    const std::size_t start =
        text.content.size() * static_cast<std::size_t>(index) / static_cast<std::size_t>(options_.documents);
    const std::string filler = text.content.substr(start) + text.content.substr(0, start);
    Document out = make_document(
        filler.substr(0, 16 * static_cast<std::size_t>(plan.tokens)),
        [this](const std::string& t) { return model_->tokenize(t, false, false); }, plan);
    if (bos) out.tokens.insert(out.tokens.begin(), llama_vocab_bos(vocab));
    return out;
  }

  // Ends of batches behind which greedy continuations start: their logits are there, and there is room.
  void choose_stops() {
    if (!tasks_.continuations || options_.continuations == 0) return;
    std::vector<int> possible;
    for (int end = options_.host.n_ubatch; end + kContinuationTokens <= options_.host.n_ctx; end += options_.host.n_ubatch) {
      if (end > options_.from) possible.push_back(end);
    }
    const std::size_t n = std::min(possible.size(), static_cast<std::size_t>(options_.continuations));
    for (std::size_t i = 0; i < n; ++i) stops_.push_back(possible[i * possible.size() / n]);
  }

  [[nodiscard]] Json key(const char* task, const Json& settings, Json more) const {
    static const std::string plugin = sha256_file(find_plugin());
    static const GgufModel model = describe_model(Gguf(options_.host.model));
    more["format"] = kResultFormat;
    more["task"] = task;
    more["oscar"] = version();
    more["plugin"] = plugin;
    more["ggml"] = ggml_version();
    more["model"] = {{"fingerprint", model.fingerprint}, {"bytes", std::filesystem::file_size(options_.host.model)}};
    more["context"] = options_.host.n_ctx;
    more["n_ubatch"] = options_.host.n_ubatch;
    more["threads"] = options_.host.n_threads;
    more["method"] = settings;
    return more;
  }

  void look_up() {
    std::size_t found = 0, wanted = 0;
    for (Subject& s : subjects_) {
      for (const Json& k : s.sequence_keys) s.sequences.push_back(&s == subjects_.data() ? std::nullopt : store_.find(k));
      for (const Json& k : s.document_keys) s.documents.push_back(store_.find(k));
      if (&s != subjects_.data()) {
        wanted += s.sequences.size();
        for (const auto& value : s.sequences) found += value ? 1U : 0U;
      }
      wanted += s.documents.size();
      for (const auto& value : s.documents) found += value ? 1U : 0U;
    }
    if (found > 0)
      fmt::print(stderr, "oscar: {} of {} measurements are there from before (--fresh measures them again)\n", found, wanted);
  }

  static bool missing(const std::vector<std::optional<Json>>& values) {
    return std::any_of(values.begin(), values.end(), [](const auto& value) { return !value.has_value(); });
  }

  // Contexts only for methods that something is missing of; exact is the base of every text.
  void open() {
    bool base = missing(subjects_[0].documents);
    for (std::size_t i = 1; i < subjects_.size(); ++i) base |= missing(subjects_[i].sequences);
    for (Subject& s : subjects_) {
      if (&s == subjects_.data() ? !base : !missing(s.sequences) && !missing(s.documents)) continue;
      Plugin::configure(plugin_json(s.contender.settings, s.contender.artifact));
      s.contender.context = std::make_unique<Context>(*model_, options_.host);
      open_.push_back(&s);
    }
  }

  void run_sequences() {
    std::size_t total = 0, done = 0;
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      std::size_t runs = 0;
      for (std::size_t m = 1; m < subjects_.size(); ++m) runs += subjects_[m].sequences[i] ? 0U : 1U;
      total += runs > 0 ? (runs + 1) * sequences_[i].size() : 0;
    }
    Progress progress("comparing", static_cast<double>(total), "tokens");
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      std::vector<Contender*> order{&subjects_[0].contender};
      std::vector<Subject*> run;
      for (Subject& s : subjects_) {
        if (&s == subjects_.data() || s.sequences[i]) continue;
        order.push_back(&s.contender);
        run.push_back(&s);
      }
      if (run.empty()) continue;
      std::vector<std::vector<int>> equal(run.size());
      ChunkPass pass;
      pass.from = options_.from;
      pass.n_ubatch = options_.host.n_ubatch;
      pass.decoded = [&](std::size_t tokens) { progress.update(static_cast<double>(done += tokens)); };
      pass.after_batch = [&](int end) {
        if (std::find(stops_.begin(), stops_.end(), end) == stops_.end()) return;
        const int row = end - 1 - std::max(options_.from, end - options_.host.n_ubatch);
        const Tokens base = continue_greedily(*model_, *order[0]->context, end, row, kContinuationTokens, {});
        for (std::size_t m = 0; m < run.size(); ++m) {
          const Tokens other = continue_greedily(*model_, *run[m]->contender.context, end, row, kContinuationTokens, base);
          equal[m].push_back(static_cast<int>(std::mismatch(other.begin(), other.end(), base.begin()).first - other.begin()));
        }
      };
      run_chunk(*model_, order, sequences_[i], pass);
      const Json stats = Plugin::stats();
      for (std::size_t m = 0; m < run.size(); ++m) keep_sequence(*run[m], i, equal[m], stats);
    }
    progress.finish();
  }

  void keep_sequence(Subject& s, std::size_t i, const std::vector<int>& equal, const Json& stats) {
    Contender& c = s.contender;
    if (c.served == 0 || c.bypassed > 0)
      fail("{}: {} attention operations were served and {} bypassed, so its figures would mean nothing", c.name, c.served,
           c.bypassed);
    const auto index = static_cast<std::size_t>(std::find(open_.begin(), open_.end(), &s) - open_.begin());
    const CacheReport cache = cache_report(stats, index, open_.size());
    Json value{{"bits_per_element", cache.bits_per_element},
               {"bits_per_element_all", cache.bits_per_element_all},
               {"equal_tokens", equal}};
    for (const char* name : {"kl", "nll_base", "nll", "same_top"}) value[name] = Json::array();
    for (const Difference& d : c.differences.back()) {
      value["kl"].push_back(d.kl);
      value["nll_base"].push_back(d.nll_base);
      value["nll"].push_back(d.nll_other);
      value["same_top"].push_back(d.same_top ? 1 : 0);
    }
    c.differences.clear();
    store_.put(s.sequence_keys[i], value);
    s.sequences[i] = std::move(value);
  }

  void run_documents() {
    std::size_t total = 0, done = 0;
    const auto cost = [](const Document& d) {
      std::size_t tokens = d.tokens.size();
      for (const Question& q : d.questions) tokens += q.ask.size();
      return tokens;
    };
    for (const Subject& s : subjects_) {
      for (std::size_t i = 0; i < documents_.size(); ++i) total += s.documents[i] ? 0 : cost(documents_[i]);
    }
    Progress progress("asking", static_cast<double>(total), "tokens");
    for (std::size_t i = 0; i < documents_.size(); ++i) {
      for (Subject& s : subjects_) {
        if (s.documents[i]) continue;
        const std::vector<Choice> choices =
            answer_questions(*model_, *s.contender.context, documents_[i], options_.host.n_ubatch,
                             [&](std::size_t tokens) { progress.update(static_cast<double>(done += tokens)); });
        Json value{{"chosen", Json::array()}, {"probability", Json::array()}};
        for (const Choice& choice : choices) {
          value["chosen"].push_back(choice.chosen);
          value["probability"].push_back(choice.probability);
        }
        store_.put(s.document_keys[i], value);
        s.documents[i] = std::move(value);
      }
    }
    progress.finish();
  }

  // Always from the stored form, so that a resumed evaluation prints what an uninterrupted one does.
  static void unpack(Subject& s, bool base) {
    for (const auto& stored : s.sequences) {
      if (base) continue;
      const Json& value = *stored;
      std::vector<Difference>& out = s.result.sequences.emplace_back();
      for (std::size_t i = 0; i < value["kl"].size(); ++i)
        out.push_back({value["kl"][i].get<double>(), value["nll_base"][i].get<double>(), value["nll"][i].get<double>(),
                       value["same_top"][i] == 1});
      s.result.bits = value["bits_per_element"];
      s.result.bits_all = value["bits_per_element_all"];
      for (const Json& n : value["equal_tokens"]) s.result.equal_tokens.push_back(n.get<int>());
    }
    for (const auto& stored : s.documents) {
      const Json& value = *stored;
      std::vector<Choice>& out = s.result.documents.emplace_back();
      for (std::size_t i = 0; i < value["chosen"].size(); ++i)
        out.push_back({value["chosen"][i].get<int>(), value["probability"][i].get<double>()});
    }
  }

  nlohmann::ordered_json report() {
    EvalFrame frame;
    frame.n_ctx = options_.host.n_ctx;
    frame.from = options_.from;
    frame.continuation_tokens = kContinuationTokens;
    frame.allow_small = options_.allow_small;
    frame.seed = options_.seed;
    for (const Document& d : documents_) {
      auto& questions = frame.questions.emplace_back();
      for (const Question& q : d.questions)
        questions.push_back({q.kind, q.depth, q.right, static_cast<int>(q.candidates.size())});
    }
    std::vector<MethodResult> results;
    for (Subject& s : subjects_) {
      unpack(s, &s == subjects_.data());
      results.push_back(s.result);
    }
    nlohmann::ordered_json out;
    out["oscar"] = version();
    out["ggml"] = ggml_version();
    out["model"] = std::filesystem::path(options_.host.model).filename().string();
    out["model_fingerprint"] = describe_model(Gguf(options_.host.model)).fingerprint;
    out["artifact"] = artifact_;
    out["texts"] = nlohmann::ordered_json::array();
    for (std::size_t t = 0; t < texts_.size(); ++t) {
      std::size_t n = 0;
      for (std::size_t i = t; i < sequences_.size(); i += texts_.size()) ++n;
      out["texts"].push_back({{"name", texts_[t].name},
                              {"sha256", texts_[t].sha256},
                              {"sequences", n},
                              {"tokens", n * static_cast<std::size_t>(frame.n_ctx)}});
    }
    out["context"] = frame.n_ctx;
    out["from"] = frame.from;
    out["sequences"] = sequences_.size();
    out["documents"] = documents_.size();
    out["seed"] = frame.seed;
    out["n_ubatch"] = options_.host.n_ubatch;
    out["threads"] = options_.host.n_threads;
    out["confidence"] = confidence_source(sequences_.size());
    out["rows"] = kl_rows(results, frame);
    out["retrieval"] = retrieval_rows(results, frame);
    out["continuations"] = continuation_rows(results, frame);
    out["notes"] = nlohmann::ordered_json::array();
    if (!stops_.empty() && out["continuations"].empty()) {
      out["notes"].push_back(fmt::format("{} greedy continuations are too few for a claim, the least is {}: they are left out",
                                         stops_.size() * sequences_.size(), kLeastQuestions));
    }
    return out;
  }

  EvalOptions options_;
  Tasks tasks_;
  std::vector<Method> methods_;
  std::vector<Text> texts_;
  ResultStore store_;
  std::unique_ptr<Model> model_;
  std::vector<Subject> subjects_;  // exact first
  std::vector<Subject*> open_;     // those with a context, in order of creation
  std::vector<std::vector<llama_token>> sequences_;
  std::vector<Document> documents_;
  std::vector<int> stops_;
  Json artifact_;
};

int evaluate(EvalOptions options) {
  const Format format = parse_format(options.format);
  const Tasks tasks = parse_tasks(options.tasks);
  settle(options);
  std::vector<Text> texts;
  for (const std::string& path : options.texts) {
    Text text{std::filesystem::path(path).filename().string(), read_text(path), ""};
    text.sha256 = sha256_hex(std::as_bytes(std::span(text.content)));
    texts.push_back(std::move(text));
  }
  if (tasks.kl && !options.allow_small)
    check_sample(static_cast<std::int64_t>(options.sequences) * (options.host.n_ctx - 1 - options.from));
  std::vector<Method> methods = choose_methods(options.settings, options.methods, options.all, options.variants);
  print_evaluation(Evaluation(std::move(options), tasks, std::move(methods), std::move(texts)).run(), format);
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
      "that all occur in the document, so that tiny models give usable figures too. Greedy continuations: how many are still "
      "the exact cache's after 8, 16, 32 and 64 tokens.");
  command.text(
      "The noise floor is measured with them: the exact cache against itself with the lowest bit of every query flipped. A "
      "figure "
      "near it says nothing about a method. 95 % intervals come from a bootstrap over sequences from 4 sequences on, below "
      "that "
      "over blocks of 64 positions. Fewer than 512 positions are refused; ranges, kinds of question and continuations with too "
      "few samples of their own (512 positions, 20 questions, 20 prompts) are joined or left out. A text that the artifact was "
      "calibrated on is refused.");
  command.text(
      "Every measurement is kept in the cache directory (eval/) under the digest of everything it depends on: an interrupted "
      "command goes on, and one more method costs its own time only.");
  options->host.n_ctx = 4096;
  add_host(command, options->host, "tokens of a sequence and of a document");
  command.option("-f,--file", options->texts, "FILE", "text to judge on; repeatable, sequences alternate between texts")
      ->allow_extra_args(false);
  command.option("--methods", options->methods, "NAME[,...]", "which of " + method_names() + "; default: all of them");
  command
      .option("--variant", options->variants, "KEY=VALUE[,...]", "one more method: these settings, as in compare; repeatable")
      ->allow_extra_args(false);
  command.flag("--all", options->all, "other published methods too, simulated");
  command.flag("--quick", options->quick, "1 sequence, 1 document, no continuations");
  command.option("--tasks", options->tasks, "NAME[,...]", "kl, retrieval, continuations");
  command.option("--sequences", options->sequences, "N", "sequences of -c tokens, 0 = 4, with --quick 1", "");
  command.option("--documents", options->documents, "N", "documents with 30 questions each, 0 = 4, with --quick 1", "");
  command.option("--continuations", options->continuations, "N",
                 "greedy continuations of each sequence, -1 = 5, with --quick 0", "");
  command.option("--from", options->from, "POSITION", "first position judged, 0 = 1024 or half the context", "");
  command.option("-s,--seed", options->seed, "N", "of the bootstrap and of the documents");
  command.flag("--fresh", options->fresh, "measure again what is there from before");
  command.flag("--allow-small", options->allow_small, "print figures from samples that are too small for a claim");
  add_settings(command, options->settings, false);
  command.option("-o,--format", options->format, "FORMAT", "md, json or csv (csv: the rows by depth)");
  command.example("oscar eval -m model.gguf -f essays.txt --quick", "our codecs and OSCAR's, in minutes for a small model");
  command.example("oscar eval -m model.gguf -f essays.txt -f code.txt -c 8192 --all -o json", "everything, for a report");
  command.example("oscar eval -m model.gguf -f essays.txt --variant codec=spectral,k_bits=2.5,v_bits=2",
                  "one more method beside the default ones");
  command.json_key("oscar, ggml, model, model_fingerprint, artifact", "what was judged");
  command.json_key("texts[]", "name, sha256, sequences, tokens of each");
  command.json_key("context, from, sequences, documents, seed, n_ubatch, threads", "how");
  command.json_key("confidence", "what the bootstrap draws from");
  command.json_key("rows[]", "one per method and depth: the following keys; method noise-floor is exact against exact");
  command.json_key("method, variant, depth", "label, its settings, range of positions or all");
  command.json_key("k_bits, v_bits, bits_per_element, bits_per_element_all",
                   "nominal bits of K and V (null: unknown); with metadata; with the 16-bit windows too");
  command.json_key("kl_mean, kl_p50, kl_p99, kl_max", "nats");
  command.json_key("same_top, ppl_ratio", "share of equal most likely tokens; perplexity over the exact cache's");
  command.json_key("kl_mean_ci, same_top_ci, ppl_ratio_ci", "[low, high], 95 %");
  command.json_key("positions, sequences, context", "the sample of the row");
  command.json_key("retrieval[]",
                   "method, kind (needle, two-facts, lookup, all), questions, accuracy, chance, right_probability, same_choice "
                   "(as exact), accuracy_ci, same_choice_ci, accuracy_by_depth (needle)");
  command.json_key("continuations[]", "method, length, prompts, same, same_ci, equal_prefix");
  command.json_key("notes[]", "what was left out and why");
  command.action([options] { return evaluate(*options); });
}

}  // namespace oscar::cli
