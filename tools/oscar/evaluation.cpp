#include "evaluation.h"

#include <algorithm>

#include "eval_report.h"
#include "eval_tasks.h"
#include "ggml.h"
#include "kl_engine.h"
#include "oscar/artifact/artifact.h"
#include "oscar/base/error.h"
#include "oscar/cache/windows.h"
#include "oscar/io/gguf.h"
#include "oscar/io/sha256.h"
#include "oscar/version.h"
#include "output.h"
#include "result_store.h"
#include "retrieval.h"
#include "session.h"
#include "statistics.h"
#include "tool_chat.h"

namespace oscar::cli {
namespace {

// Raise it when a measurement means something else than before: kept results of the old meaning are then not found.
constexpr int kResultFormat = 1;

template <class T>
std::string digest(const std::vector<T>& values) {
  return sha256_hex(std::as_bytes(std::span(values)));
}

class Evaluation {
 public:
  Evaluation(EvalOptions options, EvalTasks tasks, std::vector<Method> methods, std::vector<EvalText> texts)
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
      if (tasks_.tools) run_chats();
    } catch (const Error&) {
      if (interrupted()) fail("interrupted; what was finished is kept, the same command goes on from there");
      throw;
    }
    return options_.parts == 1 ? report() : nlohmann::ordered_json();
  }

 private:
  using Json = nlohmann::json;

  struct Subject {  // one method and what is known about it so far
    Contender contender;
    MethodResult result;
    Json settings;  // what decides its results: settings and the artifact's digest
    std::vector<Json> sequence_keys, document_keys, chat_keys;
    std::vector<std::optional<Json>> sequences, documents, chats;  // stored values
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
      for (const EvalText& text : texts_) {
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
      for (const EvalText& text : texts_)
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
    if (tasks_.tools) {
      for (int i = 0; i < options_.chats; ++i) chats_.push_back(chat(i));
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
      for (const ToolChat& c : chats_) {
        std::vector<std::int32_t> all = c.tokens;
        for (const CallRequest& r : c.requests) {
          all.insert(all.end(), r.ask.begin(), r.ask.end());
          for (const Question* q : {&r.function, &r.argument}) {
            all.insert(all.end(), q->ask.begin(), q->ask.end());
            for (const Tokens& t : q->candidates) all.insert(all.end(), t.begin(), t.end());
            all.push_back(q->right);
          }
        }
        s.chat_keys.push_back(key("tools", s.settings, {{"tokens", digest(all)}, {"answers", generates()}}));
      }
    }
  }

  [[nodiscard]] int sink() const { return options_.settings.sink.empty() ? Windows{}.sink : std::stoi(options_.settings.sink); }
  [[nodiscard]] int recent() const {
    return options_.settings.recent.empty() ? Windows{}.recent : std::stoi(options_.settings.recent);
  }
  [[nodiscard]] bool generates() const { return !options_.quick; }

  Document document(int index) const {
    const llama_vocab* vocab = model_->vocab();
    const bool bos = llama_vocab_get_add_bos(vocab);
    DocumentPlan plan;
    plan.tokens = options_.host.n_ctx - kQuestionTokens - (bos ? 1 : 0);
    plan.first = sink();
    plan.last = plan.tokens - recent();
    plan.seed = options_.seed + static_cast<std::uint64_t>(index);
    const EvalText& text = texts_[static_cast<std::size_t>(index) % texts_.size()];
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

  ToolChat chat(int index) const {
    const bool bos = llama_vocab_get_add_bos(model_->vocab());
    ChatPlan plan;
    plan.tokens =
        (options_.quick ? std::min(kLeastChat, options_.host.n_ctx) : options_.host.n_ctx) - kChatTokens - (bos ? 1 : 0);
    plan.first = sink();
    plan.last = plan.tokens - recent();
    plan.seed = options_.seed + static_cast<std::uint64_t>(index);
    ToolChat out =
        make_tool_chat([this](const std::vector<ChatTurn>& turns, bool assistant) { return rendered(turns, assistant); },
                       [this](const std::string& t) { return model_->tokenize(t, false, true); }, plan);
    if (bos && out.tokens.front() != llama_vocab_bos(model_->vocab()))
      out.tokens.insert(out.tokens.begin(), llama_vocab_bos(model_->vocab()));
    return out;
  }

  [[nodiscard]] std::string rendered(const std::vector<ChatTurn>& turns, bool assistant) const {
    if (model_->has_chat_template()) {
      std::vector<Model::Turn> copy;
      copy.reserve(turns.size());
      for (const ChatTurn& turn : turns) copy.push_back({turn.role, turn.content});
      return model_->apply_template(copy, assistant);
    }
    std::string text;  // a base model continues the pattern
    for (const ChatTurn& turn : turns) text += fmt::format("{}: {}\n", turn.role, turn.content);
    return assistant ? text + "assistant: " : text;
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

  // What the store holds may be damaged: what has not the shape that `unpack` reads counts as absent.
  static bool numbers(const Json& value, const char* name, std::size_t count) {
    return value.is_object() && value.contains(name) && value[name].is_array() && value[name].size() == count &&
           std::all_of(value[name].begin(), value[name].end(), [](const Json& v) { return v.is_number(); });
  }
  static bool number(const Json& value, const char* name) {
    return value.is_object() && value.contains(name) && value[name].is_number();
  }
  [[nodiscard]] std::optional<Json> stored_sequence(const Json& stored_key, std::size_t i) const {
    std::optional<Json> value = store_.find(stored_key);
    if (!value) return value;
    const std::size_t n = sequences_[i].size() - 1 - static_cast<std::size_t>(options_.from);
    const bool sound = numbers(*value, "kl", n) && numbers(*value, "nll_base", n) && numbers(*value, "nll", n) &&
                       numbers(*value, "same_top", n) && numbers(*value, "equal_tokens", stops_.size()) &&
                       number(*value, "bits_per_element") && number(*value, "bits_per_element_all");
    return sound ? value : std::nullopt;
  }
  [[nodiscard]] std::optional<Json> stored_document(const Json& stored_key, std::size_t i) const {
    std::optional<Json> value = store_.find(stored_key);
    const std::size_t n = documents_[i].questions.size();
    return value && numbers(*value, "chosen", n) && numbers(*value, "probability", n) ? value : std::nullopt;
  }
  [[nodiscard]] std::optional<Json> stored_chat(const Json& stored_key, std::size_t i) const {
    std::optional<Json> value = store_.find(stored_key);
    const bool sound = value && value->is_array() && value->size() == chats_[i].requests.size() &&
                       std::all_of(value->begin(), value->end(), [](const Json& v) {
                         return number(v, "function") && number(v, "function_probability") && number(v, "argument") &&
                                number(v, "argument_probability") && v.contains("answer") &&
                                numbers(v, "answer", v["answer"].size());
                       });
    return sound ? value : std::nullopt;
  }

  void look_up() {
    std::size_t found = 0, wanted = 0;
    for (Subject& s : subjects_) {
      for (std::size_t i = 0; i < s.sequence_keys.size(); ++i)
        s.sequences.push_back(&s == subjects_.data() ? std::nullopt : stored_sequence(s.sequence_keys[i], i));
      for (std::size_t i = 0; i < s.document_keys.size(); ++i) s.documents.push_back(stored_document(s.document_keys[i], i));
      for (std::size_t i = 0; i < s.chat_keys.size(); ++i) s.chats.push_back(stored_chat(s.chat_keys[i], i));
      if (&s != subjects_.data()) {
        wanted += s.sequences.size();
        for (const auto& value : s.sequences) found += value ? 1U : 0U;
      }
      wanted += s.documents.size() + s.chats.size();
      for (const auto& value : s.documents) found += value ? 1U : 0U;
      for (const auto& value : s.chats) found += value ? 1U : 0U;
    }
    if (found > 0)
      fmt::print(stderr, "oscar: {} of {} measurements are there from before (--fresh measures them again)\n", found, wanted);
  }

  // Whether value i has to be measured by this process.
  [[nodiscard]] bool due(const std::vector<std::optional<Json>>& values, std::size_t i) const {
    return !values[i] && i % static_cast<std::size_t>(options_.parts) == static_cast<std::size_t>(options_.part);
  }
  [[nodiscard]] bool missing(const std::vector<std::optional<Json>>& values) const {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (due(values, i)) return true;
    }
    return false;
  }

  // Contexts only for methods that something is missing of; exact is the base of every text.
  void open() {
    bool base = missing(subjects_[0].documents) || missing(subjects_[0].chats);
    for (std::size_t i = 1; i < subjects_.size(); ++i) base |= missing(subjects_[i].sequences);
    for (Subject& s : subjects_) {
      if (&s == subjects_.data() ? !base : !missing(s.sequences) && !missing(s.documents) && !missing(s.chats)) continue;
      Plugin::configure(plugin_json(s.contender.settings, s.contender.artifact));
      s.contender.context = std::make_unique<Context>(*model_, options_.host);
      open_.push_back(&s);
    }
  }

  void run_sequences() {
    std::size_t total = 0, done = 0;
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      std::size_t runs = 0;
      for (std::size_t m = 1; m < subjects_.size(); ++m) runs += due(subjects_[m].sequences, i) ? 1U : 0U;
      total += runs > 0 ? (runs + 1) * sequences_[i].size() : 0;
    }
    Progress progress("comparing", static_cast<double>(total), "tokens");
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      std::vector<Contender*> order{&subjects_[0].contender};
      std::vector<Subject*> run;
      for (Subject& s : subjects_) {
        if (&s == subjects_.data() || !due(s.sequences, i)) continue;
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
      for (std::size_t i = 0; i < documents_.size(); ++i) total += due(s.documents, i) ? cost(documents_[i]) : 0;
    }
    Progress progress("asking", static_cast<double>(total), "tokens");
    for (std::size_t i = 0; i < documents_.size(); ++i) {
      for (Subject& s : subjects_) {
        if (!due(s.documents, i)) continue;
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

  void run_chats() {
    std::size_t total = 0, done = 0;
    for (const Subject& s : subjects_) {
      for (std::size_t i = 0; i < chats_.size(); ++i) {
        if (!due(s.chats, i)) continue;
        total += chats_[i].tokens.size();
        for (const CallRequest& r : chats_[i].requests) total += cost_of(r, generates());
      }
    }
    Progress progress("calling", static_cast<double>(total), "tokens");
    for (std::size_t i = 0; i < chats_.size(); ++i) {
      for (Subject& s : subjects_) {
        if (!due(s.chats, i)) continue;
        const std::vector<CallAnswer> answers =
            answer_calls(*model_, *s.contender.context, chats_[i], options_.host.n_ubatch, generates(),
                         [&](std::size_t tokens) { progress.update(static_cast<double>(done += tokens)); });
        Json value = Json::array();
        for (const CallAnswer& a : answers) {
          value.push_back({{"function", a.function.chosen},
                           {"function_probability", a.function.probability},
                           {"argument", a.argument.chosen},
                           {"argument_probability", a.argument.probability},
                           {"answer", a.text}});
        }
        store_.put(s.chat_keys[i], value);
        s.chats[i] = std::move(value);
      }
    }
    progress.finish();
  }

  // Always from the stored form, so that a resumed evaluation prints what an uninterrupted one does.
  void unpack(Subject& s, bool base) const {
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
    for (std::size_t i = 0; i < s.chats.size(); ++i) unpack_chat(*s.chats[i], chats_[i], s.result.chats.emplace_back());
  }

  void unpack_chat(const Json& value, const ToolChat& chat, std::vector<CallResult>& out) const {
    for (std::size_t i = 0; i < value.size(); ++i) {
      const Json& v = value[i];
      CallResult& result = out.emplace_back();
      result.function = {v["function"].get<int>(), v["function_probability"].get<double>()};
      result.argument = {v["argument"].get<int>(), v["argument_probability"].get<double>()};
      std::string text;
      for (const Json& token : v["answer"]) {
        result.answer.push_back(token.get<llama_token>());
        text += model_->piece(result.answer.back());
      }
      const CallJudgement judgement = judge_call(text, chat.requests[i].call);
      result.json = judgement.json;
      result.call = judgement.call;
      result.right = judgement.right;
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
    for (const ToolChat& c : chats_) {
      auto& calls = frame.calls.emplace_back();
      for (const CallRequest& r : c.requests)
        calls.push_back({r.function.right, static_cast<int>(r.function.candidates.size()), r.argument.right,
                         static_cast<int>(r.argument.candidates.size())});
    }
    frame.answers = generates();
    std::vector<MethodResult> results;
    for (Subject& s : subjects_) {
      unpack(s, &s == subjects_.data());
      s.result.settings = s.settings;
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
    out["chats"] = chats_.size();
    out["seed"] = frame.seed;
    out["n_ubatch"] = options_.host.n_ubatch;
    out["threads"] = options_.host.n_threads;
    out["confidence"] = confidence_source(sequences_.size());
    out["rows"] = kl_rows(results, frame);
    out["retrieval"] = retrieval_rows(results, frame);
    out["tools"] = tool_rows(results, frame);
    out["continuations"] = continuation_rows(results, frame);
    out["notes"] = nlohmann::ordered_json::array();
    if (!stops_.empty() && out["continuations"].empty()) {
      out["notes"].push_back(fmt::format("{} greedy continuations are too few for a claim, the least is {}: they are left out",
                                         stops_.size() * sequences_.size(), kLeastQuestions));
    }
    if (options_.tasks.empty() && !tasks_.tools)
      out["notes"].push_back(fmt::format("task tools needs a context of {} tokens (-c): it is left out", kLeastChat));
    if (tasks_.tools && !generates())
      out["notes"].push_back("with --quick no answers to the requests of task tools are generated");
    return out;
  }

  EvalOptions options_;
  EvalTasks tasks_;
  std::vector<Method> methods_;
  std::vector<EvalText> texts_;
  ResultStore store_;
  std::unique_ptr<Model> model_;
  std::vector<Subject> subjects_;  // exact first
  std::vector<Subject*> open_;     // those with a context, in order of creation
  std::vector<std::vector<llama_token>> sequences_;
  std::vector<Document> documents_;
  std::vector<ToolChat> chats_;
  std::vector<int> stops_;
  Json artifact_;
};

}  // namespace

nlohmann::ordered_json run_evaluation(EvalOptions options, EvalTasks tasks, std::vector<Method> methods,
                                      std::vector<EvalText> texts) {
  return Evaluation(std::move(options), tasks, std::move(methods), std::move(texts)).run();
}

}  // namespace oscar::cli
