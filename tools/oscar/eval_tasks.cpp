#include "eval_tasks.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oscar/base/error.h"

namespace oscar::cli {
namespace {

std::span<const float> row_of(const Model& model, const Context& context, int row) {
  return {context.logits(row), static_cast<std::size_t>(model.n_vocab())};
}

double log_probability(std::span<const float> logits, double log_sum, llama_token token) {
  return static_cast<double>(logits[static_cast<std::size_t>(token)]) - log_sum;
}

Choice chosen(const std::vector<double>& scores, int right) {
  Choice out;
  out.chosen = static_cast<int>(std::max_element(scores.begin(), scores.end()) - scores.begin());
  double sum = 0;
  for (const double score : scores) sum += std::exp(score - scores[static_cast<std::size_t>(right)]);
  out.probability = 1 / sum;
  return out;
}

Choice choose(const Model& model, Context& context, int position, const Question& question) {
  const int asked = static_cast<int>(question.ask.size());
  context.decode(question.ask, position, position + asked - 1);
  std::vector<double> scores;
  // All first tokens before any second one: the next decode replaces the logits.
  const std::span<const float> logits = row_of(model, context, 0);
  const double log_sum = log_sum_exp(logits);
  for (const Tokens& candidate : question.candidates) scores.push_back(log_probability(logits, log_sum, candidate.at(0)));
  for (std::size_t c = 0; c < question.candidates.size(); ++c) {
    const Tokens& candidate = question.candidates[c];
    if (candidate.size() < 2) continue;
    if (asked + static_cast<int>(candidate.size()) > kQuestionTokens)
      fail("a question of {} tokens is too long: at most {} with its answer", asked, kQuestionTokens);
    context.decode({candidate.begin(), candidate.end() - 1}, position + asked, position + asked);
    for (std::size_t i = 1; i < candidate.size(); ++i) {
      const std::span<const float> next = row_of(model, context, static_cast<int>(i) - 1);
      scores[c] += log_probability(next, log_sum_exp(next), candidate[i]);
    }
    context.rewind(position + asked);
  }
  context.rewind(position);
  return chosen(scores, question.right);
}

void read(Context& context, const Tokens& tokens, int n_ubatch, const std::function<void(std::size_t)>& decoded) {
  context.clear();
  const int n = static_cast<int>(tokens.size());
  for (int begin = 0; begin < n; begin += n_ubatch) {
    if (interrupted()) fail("interrupted");
    const int end = std::min(n, begin + n_ubatch);
    context.decode({tokens.begin() + begin, tokens.begin() + end}, begin, std::numeric_limits<int>::max());
    decoded(static_cast<std::size_t>(end - begin));
  }
}

// Behind a text that the context has read: logits after different continuations, each taken back only as far as the next one
// differs.
class Continuations {
 public:
  Continuations(const Model& model, Context& context, int base) : model_(model), context_(context), base_(base) {}
  // Logits behind `tokens`, which follow the text; valid until the next call.
  std::span<const float> after(const Tokens& tokens) {
    auto shared = std::mismatch(tokens.begin(), tokens.end(), read_.begin(), read_.end()).first - tokens.begin();
    shared = std::min(shared, static_cast<std::ptrdiff_t>(tokens.size()) - 1);  // logits are of what was decoded last
    if (shared < static_cast<std::ptrdiff_t>(read_.size())) context_.rewind(base_ + static_cast<int>(shared));
    context_.decode({tokens.begin() + shared, tokens.end()}, base_ + static_cast<int>(shared),
                    base_ + static_cast<int>(tokens.size()) - 1);
    read_ = tokens;
    return row_of(model_, context_, 0);
  }
  Choice choose(const Question& question) {
    std::vector<double> scores(question.candidates.size(), 0.0);
    const std::span<const float> first = after(question.ask);
    const double log_sum = log_sum_exp(first);
    for (std::size_t c = 0; c < scores.size(); ++c) scores[c] = log_probability(first, log_sum, question.candidates[c].at(0));
    for (std::size_t c = 0; c < scores.size(); ++c) {
      Tokens tokens = question.ask;
      for (std::size_t i = 1; i < question.candidates[c].size(); ++i) {
        tokens.push_back(question.candidates[c][i - 1]);
        const std::span<const float> next = after(tokens);
        scores[c] += log_probability(next, log_sum_exp(next), question.candidates[c][i]);
      }
    }
    return chosen(scores, question.right);
  }
  Tokens generate(const Tokens& ask) {
    Tokens tokens = ask;
    Tokens out;
    std::string text;
    while (static_cast<int>(out.size()) < kAnswerTokens && !is_object(text)) {
      const std::span<const float> logits = after(tokens);
      const auto best = static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      if (llama_vocab_is_eog(model_.vocab(), best)) break;
      out.push_back(best);
      tokens.push_back(best);
      text += model_.piece(best);
    }
    return out;
  }
  void leave() {
    if (!read_.empty()) context_.rewind(base_);
    read_.clear();
  }

 private:
  const Model& model_;
  Context& context_;
  int base_;
  Tokens read_;
};

}  // namespace

std::vector<Choice> answer_questions(const Model& model, Context& context, const Document& document, int n_ubatch,
                                     const std::function<void(std::size_t)>& decoded) {
  read(context, document.tokens, n_ubatch, decoded);
  std::vector<Choice> out;
  for (const Question& question : document.questions) {
    if (interrupted()) fail("interrupted");
    out.push_back(choose(model, context, static_cast<int>(document.tokens.size()), question));
    decoded(question.ask.size());
  }
  return out;
}

std::size_t cost_of(const CallRequest& request, bool generate) {
  return request.argument.ask.size() + (generate ? 8 * request.call.size() / 3 : 0);  // a token alone costs as much as about 8
}

std::vector<CallAnswer> answer_calls(const Model& model, Context& context, const ToolChat& chat, int n_ubatch, bool generate,
                                     const std::function<void(std::size_t)>& decoded) {
  read(context, chat.tokens, n_ubatch, decoded);
  Continuations behind(model, context, static_cast<int>(chat.tokens.size()));
  std::vector<CallAnswer> out;
  for (const CallRequest& request : chat.requests) {
    if (interrupted()) fail("interrupted");
    CallAnswer& answer = out.emplace_back();
    answer.function = behind.choose(request.function);
    answer.argument = behind.choose(request.argument);
    if (generate) answer.text = behind.generate(request.ask);
    behind.leave();
    decoded(cost_of(request, generate));
  }
  return out;
}

Tokens continue_greedily(const Model& model, Context& context, int end, int row, int length, const Tokens& expected) {
  Tokens out;
  for (int i = 0; i < length; ++i) {
    const std::span<const float> logits = row_of(model, context, i == 0 ? row : 0);
    out.push_back(static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    if (i + 1 == length || (!expected.empty() && out.back() != expected[static_cast<std::size_t>(i)])) break;
    context.decode({out.back()}, end + i, end + i);
  }
  context.rewind(end);
  return out;
}

}  // namespace oscar::cli
